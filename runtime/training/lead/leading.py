"""What the peer of stage 0 runs for the whole job: the lead, the tuner, and reports of what the job waits for."""

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

WAIT_SECONDS = 1.0  # from one report of what the job waits for to the next
PEERS_SECONDS = 4.0  # from one read of the swarm's peers to the next


class Leading:
    """`send`, `spawn`, `put` and `changed` are as in `Lead`."""

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
        group.create_task(self._report_waiting())
        group.create_task(self._tuner.run())
        group.create_task(self._read_peers())

    def report_owners(self) -> None:
        """Update the owners in the progress."""
        if not self.lead.progress.finished:
            owners = self._partners.holders()
            self.lead.update_progress(owners=tuple(owners.get(stage) for stage in range(self._stages)))

    def _spare(self, stage: int) -> frozenset[PeerId]:
        """Peers that could take the stage, as last read from the directory: its standbys, and peers with free memory for it, which
        claim vacant stages."""
        claims = self._context.leases.recent(self._job, stage)
        standbys = {claim.peer for claim in claims if claim.role == "standby"}
        needed = self._memory_bytes[stage]
        return frozenset(standbys | {peer.peer for peer in self._peers if peer.free_memory_bytes >= needed})

    async def _read_peers(self) -> None:
        while True:
            with suppress(SwarmError):
                records = await self._context.directory.peers(max_age_seconds=PEERS_SECONDS)
                self._peers = tuple(peer for peer in records if peer.role == "peer")
            await asyncio.sleep(PEERS_SECONDS)

    async def _report_waiting(self) -> None:
        while True:
            await asyncio.sleep(WAIT_SECONDS)
            if not self.lead.progress.finished:
                waiting = self._partners.waiting_for or self.lead.waiting_for
                self.lead.update_progress(message=waiting[:300])
