"""One stage of a model being served: its place in the decode ring.

A token makes one trip around the ring: the first stage feeds it, each stage runs its part in the worker thread and
passes the activations on, the last one samples and hands the new token to the first stage and to the gateway at
once. What a session's `open` fixed is not said again: a frame carries the session, the positions and the data.

Chunks of all sessions run in the order in which they arrive; a long prompt is fed chunk by chunk, each behind what
other sessions have waiting, so sessions interleave fairly. (`_next` is the seat of batching: it may take several.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.protocol import MAX_PROMPT_BYTES
from fusion.runtime.job.worker import Worker
from fusion.runtime.planes.plane import DecodingStage
from fusion.runtime.serving.requests.request import pack_tokens, unpack_tokens, whole
from fusion.runtime.serving.ring.frames import RingPlan
from fusion.runtime.serving.ring.links import GATEWAY, LinkEnds, RingLinks, RingPosition
from fusion.runtime.serving.ring.session import Chunk, FailedReason, Feed, Opening, SessionId
from fusion.runtime.serving.ring.stage_session import StageRunner, StageSession, Work
from fusion.swarm.errors import FrameError, StaleTerm, SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.printable import error_line
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.transport import Frame, PeerId, Stream, Transport, checked

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024
SEE_OFF_SECONDS = 3.0  # for sessions to move when we leave
WAITING_CHUNKS = 4  # chunks of activations that may wait here before the stage that sends them has to
# What running a stage may raise: torch's errors for wrong data, no memory, and our own JobFailed.
PLANE_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, MemoryError)


class RingStage:
    """Serves one stage until `run` is cancelled. `attend` takes each incoming ring stream that is for this stage."""

    def __init__(
        self,
        transport: Transport,
        worker: Worker,
        plane: DecodingStage,
        plan: RingPlan,
        seat: RingPosition,
        account: Callable[[], None] = lambda: None,
        doubt: Callable[[PeerId], None] = lambda peer: None,
    ) -> None:
        """`account` runs in the worker thread when sessions have come or gone: MemoryError (one line) where the peer
        would hold more than it lends. `doubt` is told of a peer whose link may have become slow."""
        self._worker = worker
        self._runner = StageRunner(plane, plan, seat.serve.max_sequence, account)
        self._plan = plan
        self._seat = seat
        self._terms = {seat.term}
        self._doubt = doubt
        self._incoming = {parcel.producer: parcel for parcel in plan.incoming}
        self._links = RingLinks(transport, on_frame=_unasked, on_end=self._neighbour_lost)
        self._sessions: dict[SessionId, StageSession] = {}
        # The first stage's queue holds at most one chunk of each session, so it needs no bound and never blocks
        # the token's way back; that is why the ring cannot lock up.
        self._queue: asyncio.Queue[Work] = asyncio.Queue(0 if plan.first else WAITING_CHUNKS)
        self._tasks: asyncio.TaskGroup | None = None  # None: not running
        self._leaving = False
        self._seen_off = False  # our time is up: the sessions may end, and no new ones begin
        self._emptied = asyncio.Event()  # no session is left
        self._gateways: set[QueuedStream] = set()
        self._streams: set[Stream] = set()
        self._commands = {
            "open": self._open,
            "prompt": self._prompt,
            "close": self._close,
            "ping": self._ping,
            "slow": self._slow,
        }
        self._tokens = 0

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def running(self) -> bool:
        return self._tasks is not None

    @property
    def tokens(self) -> int:
        """Passed since the start."""
        return self._tokens

    async def run(self) -> None:
        """Serve until cancelled; then tell the gateways, and end every stream. After `leave` the sessions have a
        moment to move first."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            turning = tasks.create_task(self._turn_for_ever())
            try:
                await asyncio.wait([turning])
            except asyncio.CancelledError:
                if self._leaving and not turning.done():
                    await self._see_off()
                raise
            finally:
                self._tasks = None
                for session in list(self._sessions.values()):
                    self._fail(session, f"{self._here} is leaving", "moved")
                for stream in self._streams:
                    stream.abort()
                await asyncio.gather(self._links.aclose(), *(link.aclose() for link in self._gateways))

    def hold(self, term: int) -> None:
        """We own now what we ran as a replica: sessions may know us by this term too."""
        self._terms.add(term)

    def leave(self) -> None:
        """When `run` is cancelled another peer will hold the stage already: serve the sessions until they moved."""
        self._leaving = True

    async def _see_off(self) -> None:
        self._seen_off = True
        for link in self._gateways:
            link.post("leaving", {})
        if self._sessions:
            self._emptied.clear()
            emptied = asyncio.create_task(self._emptied.wait())
            await asyncio.wait([emptied], timeout=SEE_OFF_SECONDS)
            emptied.cancel()

    async def _turn_for_ever(self) -> None:
        while True:
            await self._turn(await self._next())

    async def attend(self, stream: Stream, sender: int) -> None:
        """Answer one incoming stream of a gateway or of another stage until it ends."""
        if self._tasks is None:
            raise StaleTerm(f"stage {self._plan.index} of {self._seat.name} is not served here now")
        if sender == GATEWAY:
            stream.allow(MAX_PROMPT_BYTES)
            await self._attend_gateway(stream)
            return
        if sender in self._incoming:
            stream.allow(self._incoming[sender].size_bytes(self._seat.serve.max_sequence))
        self._streams.add(stream)
        try:
            while True:
                frame = await stream.receive()
                if frame.kind == "chunk":
                    await self._take_chunk(sender, stream.remote, frame)
                elif frame.kind == "token":
                    self._take_token(stream.remote, frame.header)
                else:
                    raise FrameError(f"stages send chunks and tokens, not {frame.kind!r:.40}")
        finally:
            self._streams.discard(stream)

    def _named(self, header: Mapping[str, Any]) -> StageSession | None:
        """The session that a frame is for. FrameError where it does not name one at all."""
        name = header.get("session")
        if not isinstance(name, str):
            raise FrameError("a frame that names no session")
        return self._sessions.get(SessionId(name))

    # --- what gateways say

    async def _attend_gateway(self, stream: Stream) -> None:
        link = QueuedStream(stream, on_frame=lambda frame: self._command(link, checked(frame)))
        self._gateways.add(link)
        try:
            await link.ended.wait()
        finally:
            self._gateways.discard(link)
            for session in [s for s in self._sessions.values() if s.gateway is link]:
                self._drop(session)  # nobody is left to read the answer
            await link.aclose()

    def _command(self, link: QueuedStream, frame: Frame) -> None:
        command = self._commands.get(frame.kind)
        if command is None:
            known = ", ".join(self._commands)
            raise FrameError(f"gateways send {known}, not {frame.kind!r:.40}")
        try:
            command(link, frame)
        except (JobError, StaleTerm) as error:
            session = self._named(frame.header) if frame.kind != "open" else None
            if session is not None and session.gateway is link:
                self._drop(session)
            reason: FailedReason = "refused" if isinstance(error, JobError) else "moved"
            self._tell(link, frame.header.get("session"), str(error), reason, self._plan.index)

    def _open(self, link: QueuedStream, frame: Frame) -> None:
        opening = Opening.from_header(
            frame.header, stages=self._plan.stages, max_sequence=self._seat.serve.max_sequence
        )
        hop = opening.route[self._plan.index]
        if hop.peer != self._seat.peer or hop.term not in self._terms:
            raise StaleTerm(f"{self._here} is held under term {max(self._terms)}, the route says {hop.term}")
        if opening.session in self._sessions:
            raise JobError("session: a new name")
        if self._tasks is None or self._seen_off:
            raise StaleTerm(f"{self._here} is leaving")
        if len(self._sessions) >= MAX_SESSIONS:
            message = f"{self._here} runs {MAX_SESSIONS} sessions already"
            self._tell(link, opening.session, message, "full", self._plan.index)
            return
        session = StageSession(opening, link)
        self._sessions[session.id] = session
        session.task = self._tasks.create_task(self._prepare(session))

    async def _prepare(self, session: StageSession) -> None:
        """Reach the stages we feed, reserve memory, then tell the gateway."""
        opening = session.opening
        wanted = [parcel.consumer for parcel in self._plan.outgoing]
        wanted += [0] if self._plan.last and not self._plan.first else []
        links: dict[int, QueuedStream] = {}
        for stage in wanted:
            try:
                links[stage] = await self._link(opening, stage)
            except SwarmError as error:
                where = self._where(stage, opening.route[stage].peer)
                message = f"{where} cannot be reached from {self._here}: {error_line(error)}"
                self._fail(session, message, "vanished", stage)
                return
        try:
            await self._worker.run(self._runner.reserve, session.id, opening.capacity)
        except PLANE_ERRORS as error:
            reason: FailedReason = "full" if isinstance(error, MemoryError) else "broken"
            self._fail(session, f"{self._here}: {error_line(error)}", reason)
            return
        for stage, link in links.items():
            if link.ended.is_set():  # while we waited for another
                self._fail(session, f"{self._where(stage, link.stream.remote)} vanished", "vanished", stage)
                return
        session.hops = [(parcel, links[parcel.consumer]) for parcel in self._plan.outgoing]
        session.back = links.get(0)
        session.ready = True
        session.gateway.post("opened", {"session": session.id})

    async def _link(self, opening: Opening, stage: int) -> QueuedStream:
        peer = opening.route[stage].peer
        return await self._links.to(LinkEnds(self._seat.job, self._plan.index, stage, peer))

    def _prompt(self, link: QueuedStream, frame: Frame) -> None:
        session = self._named(frame.header)
        if session is None:
            return  # closed while the frame was under way
        if (
            session.gateway is not link
            or not self._plan.first
            or not session.ready
            or session.feed is not None
        ):
            raise JobError(
                "prompt: one for each open session, to the first stage, from the gateway that opened it"
            )
        tokens = unpack_tokens(frame.payload)
        if len(tokens) != session.opening.prompt_length:
            raise JobError(
                f"prompt: {session.opening.prompt_length} tokens were announced, not {len(tokens)}"
            )
        if min(tokens) < 0 or max(tokens) >= self._seat.serve.vocabulary:
            raise JobError(f"prompt: tokens are 0 to {self._seat.serve.vocabulary - 1}")
        session.feed = Feed(
            tokens,
            prefill_chunk=self._seat.serve.prefill_chunk,
            recompute=self._seat.serve.cache == "recompute",
        )
        self._advance(session)

    def _close(self, link: QueuedStream, frame: Frame) -> None:
        session = self._named(frame.header)
        if session is not None and session.gateway is link:
            self._drop(session)

    def _ping(self, link: QueuedStream, frame: Frame) -> None:
        """Whoever asks wants to know whether we are there, and whether the session goes on here."""
        session = self._named(frame.header)
        if session is None:
            raise StaleTerm(f"{self._here} does not know this session")
        link.post("pong", {"session": session.id, "ran": session.ran})

    def _slow(self, link: QueuedStream, frame: Frame) -> None:
        """Tokens come slower than they did: is it the way from us to the stages that we feed?"""
        session = self._named(frame.header)
        if session is not None:
            for parcel, _ in session.hops:
                self._doubt(session.opening.route[parcel.consumer].peer)

    # --- what other stages say

    async def _take_chunk(self, sender: int, remote: PeerId, frame: Frame) -> None:
        session = self._named(frame.header)
        if session is None or not session.ready:
            return  # closed while the frame was under way
        parcel = self._incoming.get(sender)
        if parcel is None or session.opening.route[sender].peer != remote:
            raise StaleTerm(f"stage {sender} does not feed stage {self._plan.index} in this session")
        start, length = whole(frame.header, "start", -1), whole(frame.header, "length", 0)
        if start < 0 or length < 1 or start + length > session.opening.capacity:
            raise FrameError(f"positions {start} to {start + length} are not in the session")
        if len(frame.payload) != parcel.size_bytes(length):
            raise FrameError(f"{len(frame.payload)} bytes; {parcel.size_bytes(length)} were to come")
        chunk = Chunk(start, length, frame.header.get("sample") is True)
        if len(self._incoming) > 1:
            shares = session.parts.setdefault(chunk.end, {})
            shares[sender] = frame
            if len(shares) < len(self._incoming):
                return
            del session.parts[chunk.end]
            parts = tuple((p, shares[p.producer].payload) for p in self._plan.incoming)
        else:
            parts = ((parcel, frame.payload),)
        await self._queue.put(Work(session, chunk, memoryview(b""), parts))

    def _take_token(self, remote: PeerId, header: Mapping[str, Any]) -> None:
        session = self._named(header)
        if session is None:
            return  # closed while the frame was under way
        if session.opening.route[-1].peer != remote or session.feed is None:
            raise StaleTerm("only the last stage chooses tokens, and the first one takes them")
        token = whole(header, "id", -1)
        if not 0 <= token < self._seat.serve.vocabulary:
            raise FrameError(f"token {token} is not in the vocabulary")
        session.feed.push(whole(header, "position", -1), token)
        self._advance(session)

    # --- computing

    def _advance(self, session: StageSession) -> None:
        """Queue the session's next chunk, if the first stage knows one."""
        assert session.feed is not None
        step = session.feed.next()
        if step is not None and not session.closed:
            chunk, ids = step
            self._tokens += chunk.sample
            self._queue.put_nowait(Work(session, chunk, memoryview(pack_tokens(ids))))

    async def _next(self) -> Work:
        return await self._queue.get()

    async def _turn(self, work: Work) -> None:
        session = work.session
        if session.closed:
            return
        try:
            outcome = await self._worker.run(self._runner.run, work)
        except PLANE_ERRORS as error:
            log.warning("session %s: %s", session.id, error_line(error))
            self._fail(session, f"{self._here}: {error_line(error)}", "broken")
            return
        if session.closed:
            return
        session.ran += 1
        if outcome.token is not None:
            self._answer(session, work.chunk.end, outcome.token, outcome.logits)
        if session.hops:
            chunk = work.chunk
            header = {
                "session": session.id,
                "start": chunk.start,
                "length": chunk.length,
                "sample": chunk.sample,
            }
            for (_, link), payload in zip(session.hops, outcome.sends, strict=True):
                await link.send("chunk", header, payload)
        if session.feed is not None and not work.chunk.sample:
            self._advance(session)  # the prompt's next chunk, behind what others have waiting

    def _answer(self, session: StageSession, position: int, token: int, logits: bytes) -> None:
        """The last stage chose `token`: to the first stage first, it is what the ring waits for."""
        opening = session.opening
        finish = opening.finish(token, position, self._seat.serve.end_tokens)
        header = {"session": session.id, "id": token, "position": position}
        if not finish:
            if session.back is not None:
                session.back.post("token", header)
            elif session.feed is not None:
                session.feed.push(position, token)
                self._advance(session)
        payload = (logits,) if logits else ()
        session.gateway.post("token", {**header, "finish": finish}, payload)

    # --- ends

    @property
    def _here(self) -> str:
        return self._where(self._plan.index, self._seat.peer)

    def _where(self, stage: int, peer: PeerId) -> str:
        return f"stage {stage} of {self._seat.name} on {friendly_name(peer)}"

    def _neighbour_lost(self, ends: LinkEnds, reason: str) -> None:
        log.info("%s: %s", self._where(ends.stage, ends.peer), reason)
        for session in list(self._sessions.values()):
            hop = session.opening.route[ends.stage]
            if session.ready and hop.peer == ends.peer:
                self._fail(session, f"{self._where(ends.stage, ends.peer)} vanished", "vanished", ends.stage)

    def _fail(
        self, session: StageSession, message: str, reason: FailedReason, stage: int | None = None
    ) -> None:
        """`stage`: whose fault it is; ours where it is left out."""
        if not session.closed:
            blamed = self._plan.index if stage is None else stage
            self._tell(session.gateway, session.id, message, reason, blamed)
            self._drop(session)

    @staticmethod
    def _tell(gateway: QueuedStream, session: object, message: str, reason: FailedReason, stage: int) -> None:
        gateway.post("failed", {"session": session, "message": message, "reason": reason, "stage": stage})

    def _drop(self, session: StageSession) -> None:
        """Forget the session and free its memory; what is queued for it is skipped."""
        if session.closed:
            return
        session.closed = True
        self._sessions.pop(session.id, None)
        if not self._sessions:
            self._emptied.set()
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()
        if self._tasks is not None:
            # The worker runs calls in order: this comes after whatever still computes for the session.
            self._tasks.create_task(self._worker.run(self._runner.free, session.id))


def _unasked(ends: LinkEnds, frame: Frame) -> None:
    raise FrameError(f"stage {ends.stage} sent {frame.kind!r:.40} the wrong way")
