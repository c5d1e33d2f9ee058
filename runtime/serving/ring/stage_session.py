"""One session at one stage: its chunks, and running them in the worker thread. Knows nothing of peers or streams but
that a session has links to the stages it feeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fusion.runtime.planes.plane import DecodingStage, Piece
from fusion.runtime.serving.requests.request import Logprobs
from fusion.runtime.serving.ring.frames import Parcel, RingPlan
from fusion.runtime.serving.ring.penalties import TokenCounts
from fusion.runtime.serving.ring.sampling import logprobs, sample
from fusion.runtime.serving.ring.schedule import Work
from fusion.runtime.serving.ring.session import Feed, Opening, SessionId
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.transport import Frame

# What running a stage may raise: torch's errors for wrong data, no memory, and our own JobFailed.
PLANE_ERRORS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, MemoryError)


@dataclass(eq=False)
class StageSession:
    opening: Opening
    gateway: QueuedStream
    ready: bool = False
    closed: bool = False
    task: asyncio.Task[None] | None = None  # makes it ready
    hops: list[tuple[Parcel, QueuedStream]] = field(default_factory=list)
    back: QueuedStream | None = None  # from the last stage to the first
    feed: Feed | None = None  # at the first stage
    counts: TokenCounts | None = None  # at the last stage, where there are penalties
    parts: dict[int, dict[int, Frame]] = field(default_factory=dict)  # end of chunk -> sender -> its share
    ran: int = 0  # chunks
    heard_at: float = 0.0  # when its gateway last said anything about it, or a chunk of it ran
    freed: asyncio.Task[None] | None = None  # frees its memory, once it is closed

    @property
    def id(self) -> SessionId:
        return self.opening.session


@dataclass(frozen=True)
class Outcome:
    sends: tuple[list[memoryview], ...] = ()  # payload for each outgoing parcel
    token: int | None = None
    logits: bytes = b""
    logprobs: Logprobs | None = None


class StageRunner:
    """What the worker thread does for a stage. Every method runs there."""

    def __init__(
        self, plane: DecodingStage, plan: RingPlan, max_sequence: int, account: Callable[[], None]
    ) -> None:
        self._plane = plane
        self._plan = plan
        self._positions = torch.arange(max_sequence).unsqueeze(0)
        self._account = account  # called when sessions have come or gone; MemoryError: one too many

    def reserve(self, session: SessionId, capacity: int, positions: int) -> None:
        """Begin a session of at most `capacity` positions, with memory for the first. MemoryError, in one line, where these
        do not fit."""
        self._plane.open(session, capacity)
        self._plane.reserve(session, positions)
        try:
            self._account()
        except MemoryError:
            self._plane.close(session)
            raise

    def free(self, sessions: Sequence[SessionId]) -> None:
        for session in sessions:
            self._plane.close(session)
        self._account()

    def run(self, turn: Sequence[Work[StageSession]]) -> list[Outcome | Exception]:
        """What each chunk gave, or what went wrong with it: the others then go on without it. MemoryError: there is no
        memory for it now; it may be run again."""
        lacking = {id(work): error for work in turn if (error := self._grow(work)) is not None}
        outcomes = iter(self._run([work for work in turn if id(work) not in lacking]))
        return [lacking[id(work)] if id(work) in lacking else next(outcomes) for work in turn]

    def _grow(self, work: Work[StageSession]) -> MemoryError | None:
        """Set memory aside for the chunk."""
        session = work.session.id
        if self._plane.reserve(session, work.chunk.end):
            try:
                self._account()
            except MemoryError as error:
                self._plane.reserve(session, 0)
                return error
        return None

    def _run(self, turn: Sequence[Work[StageSession]]) -> list[Outcome | Exception]:
        if not turn:
            return []
        try:
            pieces, ids = zip(*(self._piece(work) for work in turn), strict=True)
            found = self._plane.run(pieces)
        except PLANE_ERRORS as error:
            return [_broken(error)] if len(turn) == 1 else [self._run((work,))[0] for work in turn]
        return [self._outcome(*each) for each in zip(turn, found, ids, strict=True)]

    def _piece(self, work: Work[StageSession]) -> tuple[Piece, memoryview]:
        """What the plane runs, and the bytes of the chunk's token ids where there are any."""
        chunk, ids = work.chunk, work.ids
        inputs: dict[str, torch.Tensor] = {}
        for parcel, payload in work.parts:
            ids = parcel.unpack(payload, chunk.length, inputs) or ids
        if self._plan.reads_ids:
            inputs["input_ids"] = torch.frombuffer(bytearray(ids), dtype=torch.int64).unsqueeze(0)
        if self._plan.reads_positions:
            inputs["position_ids"] = self._positions[:, chunk.start : chunk.end]
        return Piece(work.session.id, chunk.start, inputs), ids

    def _outcome(
        self, work: Work[StageSession], outputs: Mapping[str, torch.Tensor], ids: memoryview
    ) -> Outcome | Exception:
        try:
            return self._made(work, outputs, ids)
        except PLANE_ERRORS as error:  # this session's logits are not numbers, for example
            return error

    def _made(
        self, work: Work[StageSession], outputs: Mapping[str, torch.Tensor], ids: memoryview
    ) -> Outcome:
        chunk, opening = work.chunk, work.session.opening
        if not self._plan.last:
            return Outcome(sends=tuple(p.pack(outputs, ids) for p in self._plan.outgoing))
        if not chunk.sample:
            return Outcome()
        logits = outputs["result/0"][0, -1]
        counts, top = work.session.counts, opening.top_logprobs
        token = sample(logits, opening.sampling, chunk.end, counts)
        if counts is not None:
            counts.push(token)
        raw = logits.to(device="cpu", dtype=torch.float32).numpy().tobytes() if opening.logits else b""
        probable = None if top is None else logprobs(logits, token, top)
        return Outcome(token=token, logits=raw, logprobs=probable)


def _broken(error: Exception) -> Exception:
    """The device's own lack of memory is not one that others' sessions could give way to."""
    return RuntimeError(str(error)) if isinstance(error, MemoryError) else error
