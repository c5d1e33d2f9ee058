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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion.runtime.errors import JobError
from fusion.runtime.job import ServeConfig
from fusion.runtime.planes.plane import DecodingStage
from fusion.runtime.serving.request import pack_tokens, unpack_tokens, whole
from fusion.runtime.serving.ring_frames import Parcel, RingPlan
from fusion.runtime.serving.ring_link import GATEWAY, Ends, Link, Links
from fusion.runtime.serving.sampling import sample
from fusion.runtime.serving.session import Chunk, Feed, Opening, SessionId
from fusion.runtime.worker import Worker
from fusion.swarm.errors import FrameError, StaleTerm, SwarmError
from fusion.swarm.handlers import one_line
from fusion.swarm.identity import friendly_name
from fusion.swarm.records import JobId
from fusion.swarm.transport import Frame, PeerId, Stream, Transport

log = logging.getLogger(__name__)

MAX_SESSIONS = 1024
WAITING_CHUNKS = 4  # chunks of activations that may wait here before the stage that sends them has to
# What running a stage may raise: torch's errors for wrong data, no memory, and our own JobFailed.
PLANE_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, MemoryError)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Which stage of which job we hold, and under which term."""

    job: JobId
    name: str
    serve: ServeConfig
    peer: PeerId  # us
    term: int


@dataclass(eq=False)
class _Session:
    opening: Opening
    gateway: Link
    ready: bool = False
    closed: bool = False
    task: asyncio.Task[None] | None = None  # makes it ready
    hops: list[tuple[Parcel, Link]] = field(default_factory=list)
    back: Link | None = None  # from the last stage to the first
    feed: Feed | None = None  # at the first stage
    parts: dict[int, dict[int, Frame]] = field(default_factory=dict)  # end of chunk -> sender -> its share

    @property
    def id(self) -> SessionId:
        return self.opening.session


@dataclass(frozen=True)
class _Work:
    session: _Session
    chunk: Chunk
    ids: memoryview  # bytes of the token ids, at the first stage
    parts: tuple[tuple[Parcel, memoryview], ...] = ()


@dataclass(frozen=True)
class _Outcome:
    sends: tuple[list[memoryview], ...] = ()  # payload for each outgoing parcel
    token: int | None = None
    logits: bytes = b""


class RingStage:
    """Serves one stage until `run` is cancelled. `attend` takes each incoming ring stream that is for this stage."""

    def __init__(
        self,
        transport: Transport,
        worker: Worker,
        plane: DecodingStage,
        plan: RingPlan,
        seat: Seat,
        check_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_memory` runs in the worker thread after a session's memory was reserved: MemoryError (one line)
        where the peer holds more than it lends."""
        self._worker = worker
        self._plane = plane
        self._plan = plan
        self._seat = seat
        self._check_memory = check_memory
        self._incoming = {parcel.producer: parcel for parcel in plan.incoming}
        self._links = Links(transport, on_frame=_unasked, on_end=self._neighbour_lost)
        self._sessions: dict[SessionId, _Session] = {}
        # The first stage's queue holds at most one chunk of each session, so it needs no bound and never blocks
        # the token's way back; that is why the ring cannot lock up.
        self._queue: asyncio.Queue[_Work] = asyncio.Queue(0 if plan.first else WAITING_CHUNKS)
        self._positions = torch.arange(seat.serve.max_sequence).unsqueeze(0)
        self._tasks: asyncio.TaskGroup | None = None  # None: not running
        self._gateways: set[Link] = set()
        self._streams: set[Stream] = set()
        self._commands = {"open": self._open, "prompt": self._prompt, "close": self._close}
        self._busy_seconds = 0.0
        self._tokens = 0

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def counters(self) -> tuple[float, int]:
        """Seconds computed and tokens passed since the start."""
        return self._busy_seconds, self._tokens

    async def run(self) -> None:
        """Serve until cancelled; then tell the gateways, and end every stream."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                while True:
                    await self._turn(await self._next())
            finally:
                self._tasks = None
                for session in list(self._sessions.values()):
                    self._fail(session, f"{self._where(self._plan.index, self._seat.peer)} is leaving")
                for stream in self._streams:
                    stream.abort()
                await asyncio.gather(self._links.aclose(), *(link.aclose() for link in self._gateways))

    async def attend(self, stream: Stream, sender: int) -> None:
        """Answer one incoming stream of a gateway or of another stage until it ends."""
        if self._tasks is None:
            raise StaleTerm(f"stage {self._plan.index} of {self._seat.name} is not served here now")
        if sender == GATEWAY:
            await self._attend_gateway(stream)
            return
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

    def _named(self, header: Mapping[str, Any]) -> _Session | None:
        """The session that a frame is for. FrameError where it does not name one at all."""
        name = header.get("session")
        if not isinstance(name, str):
            raise FrameError("a frame that names no session")
        return self._sessions.get(SessionId(name))

    # --- what gateways say

    async def _attend_gateway(self, stream: Stream) -> None:
        link = Link(stream, on_frame=lambda frame: self._command(link, frame), on_end=lambda reason: None)
        self._gateways.add(link)
        try:
            await link.ended.wait()
        finally:
            self._gateways.discard(link)
            for session in [s for s in self._sessions.values() if s.gateway is link]:
                self._drop(session)  # nobody is left to read the answer
            await link.aclose()

    def _command(self, link: Link, frame: Frame) -> None:
        command = self._commands.get(frame.kind)
        if command is None:
            raise FrameError(f"gateways send open, prompt and close, not {frame.kind!r:.40}")
        try:
            command(link, frame)
        except (JobError, StaleTerm) as error:
            session = self._named(frame.header) if frame.kind != "open" else None
            if session is not None and session.gateway is link:
                self._drop(session)
            link.post("failed", {"session": frame.header.get("session"), "message": str(error)})

    def _open(self, link: Link, frame: Frame) -> None:
        opening = Opening.from_header(
            frame.header, stages=self._plan.stages, max_sequence=self._seat.serve.max_sequence
        )
        hop = opening.route[self._plan.index]
        if hop.peer != self._seat.peer or hop.term != self._seat.term:
            raise StaleTerm(
                f"{self._where(self._plan.index, self._seat.peer)} is held under term {self._seat.term}, "
                f"the route says {hop.term}"
            )
        if opening.session in self._sessions or len(self._sessions) >= MAX_SESSIONS:
            raise JobError(f"session: a new name, and at most {MAX_SESSIONS} of them")
        if self._tasks is None:
            raise StaleTerm(f"{self._where(self._plan.index, self._seat.peer)} is leaving")
        session = _Session(opening, link)
        self._sessions[session.id] = session
        session.task = self._tasks.create_task(self._prepare(session))

    async def _prepare(self, session: _Session) -> None:
        """Reach the stages we feed, reserve memory, then tell the gateway."""
        opening, index = session.opening, self._plan.index
        try:
            for parcel in self._plan.outgoing:
                session.hops.append((parcel, await self._link(opening, parcel.consumer)))
            if self._plan.last and not self._plan.first:
                session.back = await self._link(opening, 0)
            await self._worker.run(self._reserve, session.id, opening.capacity)
        except (SwarmError, *PLANE_ERRORS) as error:
            self._fail(session, f"{self._where(index, self._seat.peer)}: {one_line(error)}")
            return
        links = [(parcel.consumer, link) for parcel, link in session.hops]
        links += [(0, session.back)] if session.back is not None else []
        for stage, link in links:
            if link.ended.is_set():  # while we waited for another
                self._fail(session, f"{self._where(stage, link.stream.remote)} vanished")
                return
        session.ready = True
        session.gateway.post("opened", {"session": session.id})

    def _reserve(self, session: SessionId, capacity: int) -> None:
        """In the worker thread."""
        self._plane.open(session, capacity)
        try:
            self._check_memory()
        except MemoryError:
            self._plane.close(session)
            raise

    async def _link(self, opening: Opening, stage: int) -> Link:
        peer = opening.route[stage].peer
        return await self._links.to(Ends(self._seat.job, self._plan.index, stage, peer))

    def _prompt(self, link: Link, frame: Frame) -> None:
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

    def _close(self, link: Link, frame: Frame) -> None:
        session = self._named(frame.header)
        if session is not None and session.gateway is link:
            self._drop(session)

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
        await self._queue.put(_Work(session, chunk, memoryview(b""), parts))

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

    def _advance(self, session: _Session) -> None:
        """Queue the session's next chunk, if the first stage knows one."""
        assert session.feed is not None
        step = session.feed.next()
        if step is not None and not session.closed:
            chunk, ids = step
            self._tokens += chunk.sample
            self._queue.put_nowait(_Work(session, chunk, memoryview(pack_tokens(ids))))

    async def _next(self) -> _Work:
        return await self._queue.get()

    async def _turn(self, work: _Work) -> None:
        session = work.session
        if session.closed:
            return
        try:
            outcome = await self._worker.run(self._compute, work)
        except PLANE_ERRORS as error:
            log.warning("session %s: %s", session.id, one_line(error))
            self._fail(session, f"{self._where(self._plan.index, self._seat.peer)}: {one_line(error)}")
            return
        if session.closed:
            return
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

    def _answer(self, session: _Session, position: int, token: int, logits: bytes) -> None:
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

    def _compute(self, work: _Work) -> _Outcome:
        """In the worker thread: one chunk through the stage; at the last stage, the choice of a token too."""
        began = time.perf_counter()
        chunk, opening = work.chunk, work.session.opening
        inputs: dict[str, torch.Tensor] = {}
        ids = work.ids
        for parcel, payload in work.parts:
            ids = parcel.unpack(payload, chunk.length, inputs) or ids
        if self._plan.reads_ids:
            inputs["input_ids"] = torch.frombuffer(bytearray(ids), dtype=torch.int64).unsqueeze(0)
        if self._plan.reads_positions:
            inputs["position_ids"] = self._positions[:, chunk.start : chunk.end]
        outputs = self._plane.run(opening.session, chunk.start, inputs)
        if not self._plan.last:
            outcome = _Outcome(sends=tuple(p.pack(outputs, ids) for p in self._plan.outgoing))
        elif chunk.sample:
            logits = outputs["result/0"][0, -1]
            token = sample(logits, opening.sampling, chunk.end)
            raw = logits.to(device="cpu", dtype=torch.float32).numpy().tobytes() if opening.logits else b""
            outcome = _Outcome(token=token, logits=raw)
        else:
            outcome = _Outcome()
        self._busy_seconds += time.perf_counter() - began
        return outcome

    # --- ends

    def _where(self, stage: int, peer: PeerId) -> str:
        return f"stage {stage} of {self._seat.name} on {friendly_name(peer)}"

    def _neighbour_lost(self, ends: Ends, reason: str) -> None:
        log.info("%s: %s", self._where(ends.stage, ends.peer), reason)
        for session in list(self._sessions.values()):
            hop = session.opening.route[ends.stage]
            if session.ready and hop.peer == ends.peer:
                self._fail(session, f"{self._where(ends.stage, ends.peer)} vanished")

    def _fail(self, session: _Session, message: str) -> None:
        if not session.closed:
            session.gateway.post("failed", {"session": session.id, "message": message})
            self._drop(session)

    def _drop(self, session: _Session) -> None:
        """Forget the session and free its memory; what is queued for it is skipped."""
        if session.closed:
            return
        session.closed = True
        self._sessions.pop(session.id, None)
        if session.task is not None and session.task is not asyncio.current_task():
            session.task.cancel()
        if self._tasks is not None:
            # The worker runs calls in order: this comes after whatever still computes for the session.
            self._tasks.create_task(self._worker.run(self._plane.close, session.id))


def _unasked(ends: Ends, frame: Frame) -> None:
    raise FrameError(f"stage {ends.stage} sent {frame.kind!r:.40} the wrong way")
