"""What the peer of stage 0 does for the whole job: the lead, its eye on the links, and what people are told meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.training.lead.lead import Lead
from fusion.runtime.training.lead.tuner import Tuner
from fusion.runtime.training.lead.tuning import job_of
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.step.messages import Message
from fusion.runtime.training.streams.partner import Held
from fusion.runtime.training.streams.partners import Partners
from fusion.swarm.directory.records import Digest, PeerRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

WAIT_SECONDS = 1.0  # how often what the job waits for is put in words
PEERS_SECONDS = 4.0  # how often it is looked who works in the swarm


class Leading:
    """`send`, `spawn`, `put` and `changed` as `Lead` has them."""

    def __init__(
        self,
        context: Context,
        here: Held,
        config: TrainConfig,
        loaded: Loaded,
        partners: Partners,
        *,
        send: Callable[[int, Message], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        put: Callable[[bytes], Awaitable[Digest]],
        changed: Callable[[], None],
    ) -> None:
        self._context, self._job = context, here.job
        plan, clock = loaded.plan, asyncio.get_running_loop().time
        job = job_of(config, plan.whole, plan.memory_bytes or (0,) * plan.stages)
        self.lead = Lead(
            here.job, config, plan.stages, here.term, loaded.start, loaded.handover,
            samples=loaded.batches.samples, edges=[edge.name for edge in job.edges], send=send, spawn=spawn,
            put=put, changed=changed, clock=clock, owners=partners.holders, spare=self._spare,
            faults=loaded.faults, state_bytes=max(job.state_bytes, default=0),
        )  # fmt: skip
        self._stages = plan.stages
        self._memory_bytes = plan.memory_bytes or (0,) * plan.stages
        self._peers: tuple[PeerRecord, ...] = ()
        self._partners = partners
        self._tuner = Tuner(
            context, job, self.lead, partners.holders, clock, moved=loaded.handover is not None
        )

    def start(self, group: asyncio.TaskGroup) -> None:
        group.create_task(self._explain_waiting())
        group.create_task(self._tuner.run())
        group.create_task(self._look_for_peers())

    def report_owners(self) -> None:
        """Who holds which stage has changed."""
        if not self.lead.progress.finished:
            owners = self._partners.holders()
            self.lead.update_progress(owners=tuple(owners.get(stage) for stage in range(self._stages)))

    def _spare(self, stage: int) -> frozenset[PeerId]:
        """Who could take the stage, as the directory said when it was last asked: its standbys, and any peer with memory
        for it, which claims a stage that nobody has."""
        claims = self._context.leases.recent(self._job, stage)
        standbys = {claim.peer for claim in claims if claim.role == "standby"}
        needed = self._memory_bytes[stage]
        return frozenset(standbys | {peer.peer for peer in self._peers if peer.free_memory_bytes >= needed})

    async def _look_for_peers(self) -> None:
        while True:
            with suppress(SwarmError):
                found = await self._context.directory.peers(max_age_seconds=PEERS_SECONDS)
                self._peers = tuple(peer for peer in found if peer.role == "peer")
            await asyncio.sleep(PEERS_SECONDS)

    async def _explain_waiting(self) -> None:
        while True:
            await asyncio.sleep(WAIT_SECONDS)
            if not self.lead.progress.finished:
                waiting = self._partners.waiting_for or self.lead.waiting_for
                self.lead.update_progress(message=waiting[:300])
