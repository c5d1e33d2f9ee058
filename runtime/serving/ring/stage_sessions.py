"""The sessions that run at one stage: opened where the stages they feed are reached and memory is reserved, failed in one
line to their gateways, freed."""

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
from fusion.runtime.serving.ring.links import LinkEnds, RingLinks, RingPosition, ShownGrants, no_grants
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

PROMPT_SECONDS = 10.0  # for the prompt to come, or a ping: a gateway that waits for another stage asks sooner
# Nothing may be heard for so long of a session that has its prompt, or whose prompt goes elsewhere.
QUIET_SECONDS = 120.0
BUSY_SECONDS = 0.02  # in which nothing is read of a gateway that opens too many
TOO_EARLY = "a part of the prompt came too long before the session was open"
LOOK_SECONDS = 1.0  # between two looks for sessions of which nothing was heard


class StageSessions:
    """`run` has to be under way for sessions to open. `terms`: by which our claim to the stage may be known.

    Sessions are counted by the gateway that opened them. Where memory or places run out, one that does nothing, or one
    of whoever holds most, gives way (`fusion.swarm.shares`), or whoever asks is told that the stage is full; so is who
    opens many and runs none (`openings`). What was retained of sessions that have ended gives way before any session
    (`stage_memory`)."""

    def __init__(
        self,
        transport: Transport,
        worker: Worker,
        runner: StageRunner,
        plan: RingPlan,
        position: RingPosition,
        clock: Callable[[], float],
        chain: ShownGrants = no_grants,
        constrain: Constrain = unconstrained,
        acked: Callable[[], None] = lambda: None,
    ) -> None:
        """`acked` is called where more of prompts has come to a stage that we feed."""
        self._constrain = constrain
        self._suppressed = suppressed_by(position.serve) if plan.last else None
        self.terms = {position.term}
        self.leaving = False  # our time is up: the sessions may end, and no new ones begin
        self.schedule: Schedule[StageSession] = Schedule(
            stages=plan.stages, bounded=not plan.first, user_of=lambda session: session.user
        )
        self._guesses, self._retains = runner.guesses, runner.chunks_agree
        self._clock = clock
        self._shares: Shares[StageSession] = Shares(clock)  # in positions of the sequence
        self._openings = Openings(clock)
        # What to do with each once its session is open.
        self._early: EarlyFrames[Callable[[StageSession], None]] = EarlyFrames(clock)
        self._parts: WaitingParts[StageSession] = WaitingParts()
        self.memory = StageMemory(worker, runner, self.schedule.sessions.values, clock)
        self._plan = plan
        self._position = position
        self._links = RingLinks(
            transport,
            on_frame=_unasked,
            on_end=self._lost,
            needed=self._needed,
            clock=clock,
            chain=chain,
            acked=acked,
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._emptied = asyncio.Event()  # no session is left
        self.room = asyncio.Event()  # what waited has been taken, or has gone with its session

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
        """The streams whose far ends take several frames in one: ours to other stages, and those of gateways."""
        return self._links.taking

    def round_trip_seconds(self, session: StageSession) -> float:
        """Of the longest of the links over which its chunks go out; 0 where there are none."""
        return max((self._links.round_trip_seconds(link) for _, link in session.hops), default=0.0)

    def in_window(self, session: StageSession) -> bool:
        """Whether a chunk of its prompt may go out although others' tokens would wait behind it."""
        return all(self._links.in_window(link) for _, link in (*session.hops, *session.source_hops))

    def sent(self, link: QueuedStream, size_bytes: int) -> None:
        """So much of a prompt has gone out over a link of ours."""
        self._links.sent(link, size_bytes)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Take sessions; what they need runs in `tasks`."""
        self._tasks = tasks
        self.memory.start(tasks)
        self._watching = tasks.create_task(self._close_the_silent())

    def stop(self) -> None:
        """Take none, and fail those that are left."""
        self._tasks = None
        self.memory.stop()
        self._watching.cancel()
        for session in self:
            self.fail(session, f"{self.here} is leaving", "moved")

    async def aclose(self) -> None:
        await asyncio.gather(self._links.aclose(), self.memory.aclose())

    async def emptied(self) -> None:
        """Until no session is left."""
        while self.schedule.sessions:
            self._emptied.clear()
            await self._emptied.wait()

    def named(self, header: Mapping[str, Any]) -> StageSession | None:
        """The session that a frame is for. FrameError where it does not name one at all."""
        name = header.get("session")
        if not isinstance(name, str):
            raise FrameError("a frame that names no session")
        return self.schedule.sessions.get(SessionId(name))

    # --- opening

    def open(self, gateway: QueuedStream, header: Mapping[str, Any], payload: memoryview) -> None:
        """Begin to open a session; the gateway is told when it is. `payload`: at the last stage the schema, if there is
        one, and the prompt's ids where it or penalties need them. Raises JobError, StaleTerm."""
        serve = self._position.serve
        opening = Opening.from_header(
            header, stages=self._plan.stages, max_sequence=serve.max_sequence, source=serve.source
        )
        hop = opening.route[self._plan.index]
        if hop.peer != self._position.peer or hop.term not in self.terms:
            raise StaleTerm(f"{self.here} is held under term {max(self.terms)}, the route says {hop.term}")
        if self._tasks is None or self.leaving:
            raise StaleTerm(f"{self.here} is leaving")
        asker = gateway.stream.remote
        if not self._openings.spend(asker):
            self.send_failure(gateway, opening.session, f"{self.here} is busy: ask again later", "full")
            gateway.rest(BUSY_SECONDS)
            return
        said = OpeningPayload()
        if self._plan.last:
            said = OpeningPayload.of(opening, payload, serve.vocabulary)
        if self._early.gave_up(opening.session):
            self.send_failure(gateway, opening.session, f"{self.here}: {TOO_EARLY}", "broken")
            return
        session = StageSession(
            opening, gateway, heard_at=self._clock(), counts=said.counts, scores=said.scores
        )
        session.suppressed = self._suppressed
        session.withheld = withheld_by(opening, serve) if self._plan.last else None
        if not self.schedule.admit(session):
            other = self._shares.yields(asker, opening.capacity)
            if other is None:
                message = f"{self.here} runs {len(self)} sessions already: ask again later"
                self.send_failure(gateway, opening.session, message, "full")
                return
            self._give_way(other)
            self.schedule.admit(session)
        self._shares.take(session, asker, opening.capacity)
        session.task = self._tasks.create_task(self._prepare(session, said))

    async def _prepare(self, session: StageSession, said: OpeningPayload) -> None:
        """Reach the stages we feed, reserve memory, then tell the gateway."""
        opening = session.opening
        serve, asker = self._position.serve, session.gateway_peer
        try:
            session.constraint = await constraint_of(self._constrain, said, serve, asker)
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
            self.broke(session, error)
            return
        for stage, link in links.items():
            if link.ended.is_set():  # while we waited for another
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
        # Before what came early is looked at: the gateway may have expected more to be held, and is to know why it ends.
        session.gateway.post("opened", {"session": session.id, "knows": known, **held})
        for early in self._early.take(session.id):
            early(session)

    def _feeds(self, session: StageSession) -> list[LinkEnds]:
        """The links that it needs: to the stages that we feed, and from the last to the first."""
        back = [0] if self._plan.last and not self._plan.first else []
        job, here, route = self._position.job, self._plan.index, session.opening.route
        return [LinkEnds(job, here, stage, route[stage].peer) for stage in [*self._plan.consumers, *back]]

    def _needed(self) -> set[LinkEnds]:
        """The links of all sessions, also of those that are being opened."""
        return {ends for session in self for ends in self._feeds(session)}

    async def _reserve(self, session: StageSession) -> None:
        """Set memory aside, where others have to give way for it once they have. MemoryError: nobody has to."""
        while True:
            try:
                await self.memory.begin(session)
                return
            except MemoryError:
                if not await self.make_room(session):
                    raise

    async def make_room(self, session: StageSession) -> bool:
        """Whether another session, or what was retained of one, has given its memory up for this one."""
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
        """The gateway asked about the session, or a chunk of it `ran`, up to that position."""
        session.heard_at = self._clock()
        if ran:
            if not session.ran:
                self._openings.earn(session.gateway_peer)
            session.ran += 1
            session.reached = ran
            self._shares.use(session)

    def _give_way(self, session: StageSession) -> None:
        self.fail(session, f"{self.here} is full, and others have less of it: ask again later", "full")

    async def _close_the_silent(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self._clock()
            self.memory.expire()
            self._early.expire()
            for session in self:
                awaited = self._plan.first and session.feed is None
                if now - session.heard_at > (PROMPT_SECONDS if awaited else QUIET_SECONDS):
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
        """What the gateway asked for cannot be: its session, if there is one, ends."""
        session = self.named(frame.header) if frame.kind != "open" else None
        if session is not None and session.gateway is gateway:
            self.drop(session)
        reason: FailedReason = "refused" if isinstance(error, JobError) else "moved"
        self.send_failure(gateway, frame.header.get("session"), str(error), reason)

    def broke(self, session: StageSession, error: Exception) -> None:
        """It could not be run here."""
        log.warning("session %s: %s", session.id, error_line(error))
        self.fail(session, f"{self.here}: {error_line(error)}", reason_of(error))

    def wait(
        self, name: SessionId, sender: PeerId, frame: Frame, ready: Callable[[StageSession, Frame], None]
    ) -> None:
        """`ready` is called with the frame once the session is open. One that is not known was most often closed while the frame was
        under way."""
        frame, size_bytes = kept(frame)
        waits = self._early.add(name, sender, lambda session: ready(session, frame), size_bytes)
        session = self.schedule.sessions.get(name)
        if session is not None and not waits:
            self._gave_up(session)

    def weigh(self, session: StageSession) -> None:
        """Something of it may wait for other stages now, or wait no more."""
        if session.closed:
            return
        while (other := self._parts.set(session, session.gateway_peer, session.waiting_bytes)) is not None:
            self._give_way(other)
            if other is session:
                return

    def _gave_up(self, session: StageSession) -> None:
        """On what came for it before it was open."""
        self.fail(session, f"{self.here}: {TOO_EARLY}", "broken")

    def fail(
        self, session: StageSession, message: str, reason: FailedReason, stage: int | None = None
    ) -> None:
        """`stage`: whose fault it is; ours where it is left out."""
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
        """Forget the session and free its memory, but for the blocks of `chain`; what waits for it does not run. `completed`: its
        gateway says that it is done with it."""
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


def _unasked(ends: LinkEnds, frame: Frame) -> None:
    raise FrameError(f"stage {ends.stage} sent {frame.kind!r:.40} the wrong way")
