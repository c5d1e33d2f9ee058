"""The lead's eye on the links of its job: every few seconds it looks at what was measured, and asks the pure rules whether
tensors should be sent otherwise (`fusion.runtime.training.lead.tuning`) or a stage run elsewhere (`.moves`). One thing at a time:
codecs first, they cost nothing to change.
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
from fusion.runtime.training.lead.tuning import Job, Sight, better_codecs, running
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.links.monitor import LinkMonitor
from fusion.swarm.links.view import LinkView
from fusion.swarm.printable import error_line
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

LIVE_SECONDS = 2.0  # from one look to the next where the codecs follow the links, or steps became slow
CALM_SECONDS = 5.0  # elsewhere
SLOWED = 1.5  # times what steps took by the last looks
SMALL_SWARM = 100  # peers; where there are more their records are read as much more rarely
MOVE_SECONDS = 60.0  # from one move to the next that saves little; the more it saves the sooner
WITNESSES = 2  # looks
ASKED_SECONDS = 20.0  # a move that was asked for may take so long to be seen
CANDIDATES = 16  # idle peers that are looked at, those of which most is known


@dataclass(frozen=True)
class _Advice:
    codecs: EdgeCodecs | None = None
    move: Move | None = None


class Tuner:
    """`owners` gives the peer of each stage as far as one is linked; `moved`: this lead took its stage over by a move, or
    may have, so that the next one waits. `run` never fails: without its advice the job goes on as it is. It ends at once
    where nothing is measured, and for a job that is to stay as it was launched."""

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
        self._known: Sight | None = None  # that the table in use was chosen with
        self._moved_at = clock() if moved else -math.inf
        self._looked_at = -math.inf
        self._step_seconds = math.inf  # as of the last looks
        self._promises = Promises()
        self._wanted: tuple[int, ...] = ()  # the stages that the last looks would have moved

    @property
    def follows(self) -> bool:
        """Whether the codecs follow the links, and not only the stages."""
        return self._job.config.compression.kind == "adaptive"

    async def run(self) -> None:
        links = self._context.links
        while links is not None and self._job.config.compression.live:
            scale = max(1.0, len(links.peers) / SMALL_SWARM)
            await asyncio.sleep(LIVE_SECONDS * scale)
            if not self._due(CALM_SECONDS * scale):
                continue
            try:
                await self._look(links)
            except Exception as error:
                # Made of what many strangers say of themselves: whatever is wrong with it, the steps go on.
                log.warning("the links of job %.8s: %s", self._lead.progress.job, error_line(error))
                log.debug("where it happened", exc_info=error)

    def _due(self, calm_seconds: float) -> bool:
        """Whether to look now: a step that takes much longer than the last ones is a reason."""
        pace, now = self._lead.pace, self._clock()
        slowed = pace is not None and pace.step_seconds > SLOWED * self._step_seconds
        if not (self.follows or slowed or self._wanted or now - self._looked_at >= calm_seconds):
            return False
        self._looked_at = now
        if pace is not None:
            self._step_seconds = (min(self._step_seconds, pace.step_seconds) + pace.step_seconds) / 2
        return True

    async def _look(self, links: LinkMonitor) -> None:
        pace, owners = self._lead.pace, self._owners()
        if pace is None or any(stage not in owners for stage in range(len(self._job.memory_bytes))):
            return
        held = tuple(owners[stage] for stage in range(len(self._job.memory_bytes)))
        self._promises = self._promises.looked(held, pace.step_seconds, self._clock())
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
        sight = Sight(
            owners=owners, network=known.network, compute_seconds=pace.compute_seconds, speeds=speeds
        )
        if self.follows:
            codecs = better_codecs(self._job, self._lead.codecs, sight, self._known)
            if codecs is not None:
                self._known = sight
                return _Advice(codecs=codecs)
        return _Advice(move=self._move(pace, sight, known, idle))

    def _move(self, pace: Pace, sight: Sight, known: KnownNetwork, idle: Sequence[PeerId]) -> Move | None:
        """Of the stage that WITNESSES looks in a row would move: while links are being measured anew their figures are on
        their way, and the worst of them is not always of the one that became slow."""
        if not idle:
            return None
        move = best_move(
            running(self._job, sight, self._lead.codecs),
            idle,
            state_bytes=self._job.state_bytes,
            steps_left=pace.steps_left,
            seconds=pace.step_seconds,
            known=known.known,
        )
        if move is not None:
            pause = max(ASKED_SECONDS, MOVE_SECONDS * (1.0 - move.gain))
            move = move if self._clock() - self._moved_at >= pause else None
        self._wanted = () if move is None else (*self._wanted, move.stage)[-WITNESSES:]
        return move if len(self._wanted) == WITNESSES and len(set(self._wanted)) == 1 else None

    def _idle(
        self, peers: Iterable[PeerRecord], owners: Sequence[PeerId], view: LinkView
    ) -> tuple[PeerId, ...]:
        """Peers without work, those first of whose links with the owners most is known."""
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
