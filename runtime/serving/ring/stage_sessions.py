"""The sessions of one stage: opened once the stages they feed are connected and memory is reserved, failed with one line to their
gateways, freed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.worker import Worker
from fusion.runtime.serving.ring.constraint import (
    Constrain,
    NotConstrained,
    OpeningPayload,
    constraint_of,
    reason_of,
    suppressed_by,
    unconstrained,
    withheld_by,
)
from fusion.runtime.serving.ring.frames import RingPlan
from fusion.runtime.serving.ring.links import GrantsOf, LinkEnds, RingLinks, RingPosition, no_grants
from fusion.runtime.serving.ring.openings import EarlyFrames, Openings, WaitingParts, kept
from fusion.runtime.serving.ring.schedule import Schedule
from fusion.runtime.serving.ring.session import FailedReason, Opening, SessionId
from fusion.runtime.serving.ring.stage_memory import StageMemory
from fusion.runtime.serving.ring.stage_session import PLANE_ERRORS, StageRunner, StageSession
from fusion.swarm.errors import FrameError, StaleTerm, SwarmError
from fusion.swarm.printable import error_line
from fusion.swarm.shares import Shares
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.transport import Frame, PeerId, Transport

log = logging.getLogger(__name__)

PROMPT_SECONDS = 10.0  # for the prompt or a ping: a gateway that waits for another stage pings sooner
# Timeout of a session that has its prompt, or whose prompt goes to another stage.
QUIET_SECONDS = 120.0
BUSY_SECONDS = 0.02  # for which a gateway that opens too many sessions is not read
TOO_EARLY = "a part of the prompt came too long before the session was open"
LOOK_SECONDS = 1.0  # between two checks for silent sessions


class StageSessions:
    """Sessions open between `start` and `stop`. `terms`: the terms of this peer's claim that routes may name.

    Sessions are counted by the gateway that opened them. If memory or places run out, an idle session, or one of the gateway that holds
    most, is preempted (`fusion.swarm.shares`), or the new one is refused because the stage is full; so are gateways that open many and
    run none (`openings`). Retained prefixes are evicted before any session (`stage_memory`)."""

    def __init__(
        self,
        transport: Transport,
        worker: Worker,
        runner: StageRunner,
        plan: RingPlan,
        position: RingPosition,
        clock: Callable[[], float],
        chain: GrantsOf = no_grants,
        constrain: Constrain = unconstrained,
        acked: Callable[[], None] = lambda: None,
    ) -> None:
        """`acked` is called when a stage that we feed has acknowledged prompt bytes."""
        self._constrain = constrain
        self._suppressed = suppressed_by(position.serve) if plan.last else None
        self.terms = {position.term}
        self.leaving = False  # draining: sessions may end, and no new ones begin
        self.schedule: Schedule[StageSession] = Schedule(
            stages=plan.stages, bounded=not plan.first, user_of=lambda session: session.user
        )
        self._guesses, self._retains = runner.guesses, runner.chunk_invariant
        self._clock = clock
        self._shares: Shares[StageSession] = Shares(clock)  # in positions of the sequence
        self._openings = Openings(clock)
        # Callbacks for when a session is open.
        self._early: EarlyFrames[Callable[[StageSession], None]] = EarlyFrames(clock)
        self._parts: WaitingParts[StageSession] = WaitingParts()
        self.memory = StageMemory(worker, runner, self.schedule.sessions.values, clock)
        self._plan = plan
        self._position = position
        self._links = RingLinks(
            transport,
            on_frame=_unexpected,
            on_end=self._lost,
            needed=self._needed,
            clock=clock,
            chain=chain,
            acked=acked,
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._emptied = asyncio.Event()  # no session is left
        self.room = asyncio.Event()  # queued chunks have been taken, or dropped with their session

    def __len__(self) -> int:
        return len(self.schedule.sessions)

    def __iter__(self) -> Iterator[StageSession]:
        return iter(list(self.schedule.sessions.values()))

    @property
    def here(self) -> str:
        return self._position.where(self._plan.index)

    @property
    def running(self) -> bool:
        return self._tasks is not None

    @property
    def taking(self) -> WeakSet[QueuedStream]:
        """The streams whose far ends accept joined frames: links to other stages, and those of gateways."""
        return self._links.taking

    def round_trip_seconds(self, session: StageSession) -> float:
        """The longest of the links over which its chunks are sent; 0 where there are none."""
        return max((self._links.round_trip_seconds(link) for _, link in session.hops), default=0.0)

    def in_window(self, session: StageSession) -> bool:
        """Whether a chunk of its prompt may be sent although tokens of others would queue behind it."""
        return all(self._links.in_window(link) for _, link in (*session.hops, *session.source_hops))

    def count_sent(self, link: QueuedStream, size_bytes: int) -> None:
        """Count bytes of a prompt that were sent over a link."""
        self._links.count_sent(link, size_bytes)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Accept sessions; their tasks run in `tasks`."""
        self._tasks = tasks
        self.memory.start(tasks)
        self._watching = tasks.create_task(self._close_silent())

    def stop(self) -> None:
        """Accept none, and fail those that are left."""
        self._tasks = None
        self.memory.stop()
        self._watching.cancel()
        for session in self:
            self.fail(session, f"{self.here} is leaving", "moved")

    async def aclose(self) -> None:
        await asyncio.gather(self._links.aclose(), self.memory.aclose())

    async def emptied(self) -> None:
        """Wait until no session is left."""
        while self.schedule.sessions:
            self._emptied.clear()
            await self._emptied.wait()

    def named(self, header: Mapping[str, Any]) -> StageSession | None:
        """The session of a frame; None where it is not known. FrameError where the frame names none."""
        name = header.get("session")
        if not isinstance(name, str):
            raise FrameError("a frame that names no session")
        return self.schedule.sessions.get(SessionId(name))

    # --- opening

    def open(self, gateway: QueuedStream, header: Mapping[str, Any], payload: memoryview) -> None:
        """Begin to open a session; the gateway is notified when it is open. `payload`: at the last stage the schema, if there is one, and
        the prompt's ids where it or penalties need them. Raises JobError, StaleTerm."""
        serve = self._position.serve
        opening = Opening.from_header(
            header, stages=self._plan.stages, max_sequence=serve.max_sequence, source=serve.source
        )
        hop = opening.route[self._plan.index]
        if hop.peer != self._position.peer or hop.term not in self.terms:
            raise StaleTerm(f"{self.here} is held under term {max(self.terms)}, the route says {hop.term}")
        if self._tasks is None or self.leaving:
            raise StaleTerm(f"{self.here} is leaving")
        gateway_peer = gateway.stream.remote
        if not self._openings.spend(gateway_peer):
            self.send_failure(gateway, opening.session, f"{self.here} is busy: ask again later", "full")
            gateway.rest(BUSY_SECONDS)
            return
        opening_payload = OpeningPayload()
        if self._plan.last:
            opening_payload = OpeningPayload.of(opening, payload, serve.vocabulary)
        if self._early.gave_up(opening.session):
            self.send_failure(gateway, opening.session, f"{self.here}: {TOO_EARLY}", "broken")
            return
        session = StageSession(
            opening,
            gateway,
            active_at=self._clock(),
            counts=opening_payload.counts,
            scores=opening_payload.scores,
        )
        session.suppressed = self._suppressed
        session.withheld = withheld_by(opening, serve) if self._plan.last else None
        if not self.schedule.admit(session):
            other = self._shares.yields(gateway_peer, opening.capacity)
            if other is None:
                message = f"{self.here} runs {len(self)} sessions already: ask again later"
                self.send_failure(gateway, opening.session, message, "full")
                return
            self._give_way(other)
            self.schedule.admit(session)
        self._shares.take(session, gateway_peer, opening.capacity)
        session.task = self._tasks.create_task(self._prepare(session, opening_payload))

    async def _prepare(self, session: StageSession, opening_payload: OpeningPayload) -> None:
        """Connect to the stages we feed, reserve memory, then notify the gateway."""
        opening = session.opening
        serve, gateway_peer = self._position.serve, session.gateway_peer
        try:
            session.constraint = await constraint_of(self._constrain, opening_payload, serve, gateway_peer)
        except NotConstrained as error:
            self.fail(session, f"{self.here}: {error}", error.reason)
            return
        links: dict[int, QueuedStream] = {}
        for ends in self._feeds(session):
            stage, peer = ends.stage, ends.peer
            try:
                links[stage] = await self._links.to(ends)
            except SwarmError as error:
                where = self._position.where(stage, peer)
                message = f"{where} cannot be reached from {self.here}: {error_line(error)}"
                self.fail(session, message, "vanished", stage)
                return
        try:
            await self._reserve(session)
        except PLANE_ERRORS as error:
            self.fail_with(session, error)
            return
        for stage, link in links.items():
            if link.ended.is_set():  # while waiting for another
                self._vanished(session, stage)
                return
        session.hops = [(parcel, links[parcel.consumer]) for parcel in self._plan.outgoing]
        if self._plan.encode is not None:
            session.source_hops = [(p, links[p.consumer]) for p in self._plan.encode.outgoing]
        session.back = links.get(0)
        if self._early.gave_up(session.id):
            self._gave_up(session)
            return
        session.ready = True
        able = {"guesses": self._guesses, "early": True, "expects": self._retains}
        known = [*opening.newer, *(name for name, is_able in able.items() if is_able)]
        held = {"held": session.held} if opening.prefix else {}
        # Before early frames are handled: the gateway may have expected a longer cached prefix, and must learn why the session fails.
        session.gateway.post("opened", {"session": session.id, "knows": known, **held})
        for early in self._early.take(session.id):
            early(session)

    def _feeds(self, session: StageSession) -> list[LinkEnds]:
        """The links of a session: to the stages that we feed, and from the last stage to the first."""
        back = [0] if self._plan.last and not self._plan.first else []
        job, here, route = self._position.job, self._plan.index, session.opening.route
        return [LinkEnds(job, here, stage, route[stage].peer) for stage in [*self._plan.consumers, *back]]

    def _needed(self) -> set[LinkEnds]:
        """The links of all sessions, also of those that are being opened."""
        return {ends for session in self for ends in self._feeds(session)}

    async def _reserve(self, session: StageSession) -> None:
        """Reserve memory, preempting others where needed. MemoryError where no session may be preempted."""
        while True:
            try:
                await self.memory.begin(session)
                return
            except MemoryError:
                if not await self.make_room(session):
                    raise

    async def make_room(self, session: StageSession) -> bool:
        """Evict a retained prefix or preempt another session for this one. False where neither is possible."""
        if await self.memory.give_way():
            return True
        other = self._shares.yields(session.gateway_peer)
        if other is None or other is session:
            return False
        self._give_way(other)
        if other.freed is not None:
            await asyncio.wait([other.freed])
        return True

    # --- ends

    def record_activity(self, session: StageSession, *, ran: int = 0) -> None:
        """The gateway pinged the session, or a chunk of it ran, up to position `ran`."""
        session.active_at = self._clock()
        if ran:
            if not session.ran:
                self._openings.earn(session.gateway_peer)
            session.ran += 1
            session.reached = ran
            self._shares.use(session)

    def _give_way(self, session: StageSession) -> None:
        self.fail(session, f"{self.here} is full, and others have less of it: ask again later", "full")

    async def _close_silent(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            self.memory.expire()
            self._early.expire()
            for session in self:
                awaited = self._plan.first and session.feed is None
                if now - session.active_at > (PROMPT_SECONDS if awaited else QUIET_SECONDS):
                    self.fail(session, f"{self.here}: nothing was heard of the session for too long", "moved")

    def _lost(self, ends: LinkEnds, reason: str) -> None:
        log.info("%s: %s", self._position.where(ends.stage, ends.peer), reason)
        for session in self:
            if session.ready and session.opening.route[ends.stage].peer == ends.peer:
                self._vanished(session, ends.stage)

    def _vanished(self, session: StageSession, stage: int) -> None:
        where = self._position.where(stage, session.opening.route[stage].peer)
        self.fail(session, f"{where} vanished", "vanished", stage)

    def refuse(self, gateway: QueuedStream, frame: Frame, error: JobError | StaleTerm) -> None:
        """Refuse a gateway's frame; its session, if there is one, ends."""
        session = self.named(frame.header) if frame.kind != "open" else None
        if session is not None and session.gateway is gateway:
            self.drop(session)
        reason: FailedReason = "refused" if isinstance(error, JobError) else "moved"
        self.send_failure(gateway, frame.header.get("session"), str(error), reason)

    def fail_with(self, session: StageSession, error: Exception) -> None:
        """Fail the session with an error of this stage."""
        log.warning("session %s: %s", session.id, error_line(error))
        self.fail(session, f"{self.here}: {error_line(error)}", reason_of(error))

    def wait(
        self, name: SessionId, sender: PeerId, frame: Frame, ready: Callable[[StageSession, Frame], None]
    ) -> None:
        """Queue the frame; `ready` is called with it once the session is open. A session that is not known may also have been closed while
        the frame was in flight."""
        frame, size_bytes = kept(frame)
        waits = self._early.add(name, sender, lambda session: ready(session, frame), size_bytes)
        session = self.schedule.sessions.get(name)
        if session is not None and not waits:
            self._gave_up(session)

    def account_parts(self, session: StageSession) -> None:
        """Account for the session's parts that wait for those of other stages; preempt sessions if there are too many."""
        if session.closed:
            return
        while (other := self._parts.set(session, session.gateway_peer, session.waiting_bytes)) is not None:
            self._give_way(other)
            if other is session:
                return

    def _gave_up(self, session: StageSession) -> None:
        """Fail a session whose early frames were given up."""
        self.fail(session, f"{self.here}: {TOO_EARLY}", "broken")

    def fail(
        self, session: StageSession, message: str, reason: FailedReason, stage: int | None = None
    ) -> None:
        """`stage`: that is at fault; this one by default."""
        if not session.closed:
            self.send_failure(session.gateway, session.id, message, reason, stage)
            self.drop(session)

    def send_failure(
        self,
        gateway: QueuedStream,
        session: object,
        message: str,
        reason: FailedReason,
        stage: int | None = None,
    ) -> None:
        blamed = self._plan.index if stage is None else stage
        gateway.post("failed", {"session": session, "message": message, "reason": reason, "stage": blamed})

    def drop(self, session: StageSession, *, completed: bool = False, chain: bytes = b"") -> None:
        """Remove the session and its queued chunks, and free its memory except for the blocks of `chain`. `completed`: its gateway closed
        it."""
        if session.closed:
            return
        session.closed = True
        if session.constraint is not None:
            session.constraint.close()
        self._early.end(session.id)
        session.parts, session.early = {}, []
        self._parts.set(session, session.gateway_peer, 0)
        self.schedule.remove(session)
        self.room.set()
        self._shares.release(session, completed=completed and session.ran > 0)
        if not self.schedule.sessions:
            self._emptied.set()
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()
        self.memory.end(session, chain)


def _unexpected(ends: LinkEnds, frame: Frame) -> None:
    raise FrameError(f"stage {ends.stage} sent {frame.kind!r:.40} the wrong way")
