"""One session at one stage: its chunks, and running them in the worker thread. Knows nothing of peers or streams but
that a session has links to the stages it feeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fusion.runtime.planes.plane import DecodingStage
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

    def reserve(self, session: SessionId, capacity: int) -> None:
        """MemoryError, in one line, where the session does not fit."""
        self._plane.open(session, capacity)
        try:
            self._account()
        except MemoryError:
            self._plane.close(session)
            raise

    def free(self, sessions: Sequence[SessionId]) -> None:
        for session in sessions:
            self._plane.close(session)
        self._account()

    def run(self, work: Work[StageSession]) -> Outcome:
        """One chunk through the stage; at the last stage, the choice of a token too."""
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
            return Outcome(sends=tuple(p.pack(outputs, ids) for p in self._plan.outgoing))
        if chunk.sample:
            logits = outputs["result/0"][0, -1]
            counts, top = work.session.counts, opening.top_logprobs
            token = sample(logits, opening.sampling, chunk.end, counts)
            if counts is not None:
                counts.push(token)
            raw = logits.to(device="cpu", dtype=torch.float32).numpy().tobytes() if opening.logits else b""
            probable = None if top is None else logprobs(logits, token, top)
            return Outcome(token=token, logits=raw, logprobs=probable)
        return Outcome()
