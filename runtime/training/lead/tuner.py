"""Adapts a running job to its links: every few seconds the lead passes the measurements to the pure rules, which may change
codecs (`fusion.runtime.training.lead.tuning`) or move a stage (`.moves`). One change at a time, codecs first: they cost
nothing to change.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusion.compression.adaptive import CodecSpeed
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import EdgeCodecs
from fusion.runtime.placing.known_network import KnownNetwork, known_network
from fusion.runtime.training.lead.codec_speeds import measured, needed_families
from fusion.runtime.training.lead.lead import Lead
from fusion.runtime.training.lead.moves import Move, best_move
from fusion.runtime.training.lead.promises import Promises
from fusion.runtime.training.lead.step_times import Pace
from fusion.runtime.training.lead.tuning import Job, Measurements, better_codecs, running
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.links.monitor import LinkMonitor
from fusion.swarm.links.view import LinkView
from fusion.swarm.printable import error_line
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

LIVE_SECONDS = 2.0  # from one check to the next where the codecs follow the links, or steps became slow
CALM_SECONDS = 5.0  # otherwise
SLOWED = 1.5  # times the step time of the last checks
SMALL_SWARM = 100  # peers; in a larger swarm their records are read proportionally less often
MOVE_SECONDS = 60.0  # from one move to the next that saves little; the more it saves the sooner
WITNESSES = 2  # checks in a row that agree on a move
REQUESTED_SECONDS = 20.0  # from the request of a move until it has happened
CANDIDATES = 16  # idle peers that are considered: those with the most measured links


@dataclass(frozen=True)
class _Advice:
    codecs: EdgeCodecs | None = None
    move: Move | None = None


class Tuner:
    """`owners` returns the linked owners by stage; `moved`: this lead took its stage over by a move, or may have, so the next move
    waits. `run` never fails: without advice the job goes on as it is. It returns at once where nothing is measured, and for a
    job whose placement is fixed."""

    def __init__(
        self,
        context: Context,
        job: Job,
        lead: Lead,
        owners: Callable[[], Mapping[int, PeerId]],
        clock: Callable[[], float],
        *,
        moved: bool = False,
    ) -> None:
        self._context = context
        self._job = job
        self._lead = lead
        self._owners = owners
        self._clock = clock
        self._known: Measurements | None = None  # the figures by which the current codecs were chosen
        self._moved_at = clock() if moved else -math.inf
        self._checked_at = -math.inf
        self._step_seconds = math.inf  # as of the last checks
        self._promises = Promises()
        self._wanted: tuple[int, ...] = ()  # the stages that the last checks would have moved

    @property
    def follows(self) -> bool:
        """Whether codecs follow the links, and not only the placement."""
        return self._job.config.compression.kind == "adaptive"

    async def run(self) -> None:
        links = self._context.links
        while links is not None and self._job.config.compression.live:
            scale = max(1.0, len(links.peers) / SMALL_SWARM)
            await asyncio.sleep(LIVE_SECONDS * scale)
            if not self._due(CALM_SECONDS * scale):
                continue
            try:
                await self._check(links)
            except Exception as error:
                # The figures come from many strangers: whatever is wrong with them, the steps go on.
                log.warning("the links of job %.8s: %s", self._lead.progress.job, error_line(error))
                log.debug("where it happened", exc_info=error)

    def _due(self, calm_seconds: float) -> bool:
        """Whether to check now. A step that takes much longer than the last ones is a reason."""
        pace, now = self._lead.pace, self._clock()
        slowed = pace is not None and pace.step_seconds > SLOWED * self._step_seconds
        if not (self.follows or slowed or self._wanted or now - self._checked_at >= calm_seconds):
            return False
        self._checked_at = now
        if pace is not None:
            self._step_seconds = (min(self._step_seconds, pace.step_seconds) + pace.step_seconds) / 2
        return True

    async def _check(self, links: LinkMonitor) -> None:
        pace, owners = self._lead.pace, self._owners()
        if pace is None or any(stage not in owners for stage in range(len(self._job.memory_bytes))):
            return
        held = tuple(owners[stage] for stage in range(len(self._job.memory_bytes)))
        self._promises = self._promises.observed(held, pace.step_seconds, self._clock())
        view = await links.refresh(LIVE_SECONDS)
        peers = {peer.peer: peer for peer in links.peers}
        if any(peer not in peers for peer in held):
            return
        idle = self._idle(peers.values(), held, view)
        speeds = await self._speeds()
        advice = await asyncio.to_thread(self._advise, pace, held, idle, peers, view, speeds)
        if self._lead.pace is None or self._owners() != owners:
            return
        if advice.codecs is not None:
            self._lead.change_codecs(advice.codecs)
        elif (move := advice.move) is not None:
            self._moved_at, self._wanted = self._clock(), ()
            self._promises = self._promises.made(move, self._moved_at)
            log.info(
                "stage %d would do better at %s: a step of %.2f s instead of %.2f s, for %.1f s once",
                move.stage, move.peer, move.after_seconds, move.before_seconds, move.cost_seconds,
            )  # fmt: skip
            self._lead.move(move.stage, PeerId(move.peer))

    def _advise(
        self,
        pace: Pace,
        owners: tuple[PeerId, ...],
        idle: Sequence[PeerId],
        peers: Mapping[PeerId, PeerRecord],
        view: LinkView,
        speeds: Mapping[str, CodecSpeed],
    ) -> _Advice:
        known = known_network([peers[peer] for peer in dict.fromkeys((*owners, *idle))], view)
        measurements = Measurements(
            owners=owners, network=known.network, compute_seconds=pace.compute_seconds, speeds=speeds
        )
        if self.follows:
            codecs = better_codecs(self._job, self._lead.codecs, measurements, self._known)
            if codecs is not None:
                self._known = measurements
                return _Advice(codecs=codecs)
        return _Advice(move=self._move(pace, measurements, known, idle))

    def _move(
        self, pace: Pace, measurements: Measurements, known: KnownNetwork, idle: Sequence[PeerId]
    ) -> Move | None:
        """The move that WITNESSES checks in a row agree on: while links are being measured again, the worst figure is not always that
        of the link that became slow."""
        if not idle:
            return None
        move = best_move(
            running(self._job, measurements, self._lead.codecs),
            idle,
            state_bytes=self._job.state_bytes,
            steps_left=pace.steps_left,
            seconds=pace.step_seconds,
            known=known.known,
        )
        if move is not None:
            pause = max(REQUESTED_SECONDS, MOVE_SECONDS * (1.0 - move.gain))
            move = move if self._clock() - self._moved_at >= pause else None
        self._wanted = () if move is None else (*self._wanted, move.stage)[-WITNESSES:]
        return move if len(self._wanted) == WITNESSES and len(set(self._wanted)) == 1 else None

    def _idle(
        self, peers: Iterable[PeerRecord], owners: Sequence[PeerId], view: LinkView
    ) -> tuple[PeerId, ...]:
        """Idle peers, those with the most measured links to the owners first."""
        least = min(self._job.memory_bytes, default=0)
        found = [
            peer.peer
            for peer in peers
            if peer.role == "peer" and peer.peer not in owners and peer.peer not in self._promises.broken
            and peer.idle and least <= peer.free_memory_bytes and self._job.opset <= peer.opset
            and self._job.ops.isdisjoint(peer.lacks)
        ]  # fmt: skip

        def seen(peer: PeerId) -> int:
            return sum((peer, owner) in view.pairs or (owner, peer) in view.pairs for owner in owners)

        return tuple(sorted(found, key=lambda peer: (-seen(peer), peer))[:CANDIDATES])

    async def _speeds(self) -> Mapping[str, CodecSpeed]:
        families = needed_families(self._job.config.compression)
        worker = self._context.codec_worker
        return await worker.run(measured, families) if worker is not None and families else {}
