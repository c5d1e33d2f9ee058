"""Received tensors of a stage, checked against its plan as they arrive.

The plan says what may arrive: each edge, microbatch and direction once per step. Everything else is refused, so memory is
bounded by the plan: this step and the next of the current attempt, and one attempt ahead of it from each partner (which may
receive the lead's `begin` or `commit` before we do).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

import torch

from fusion.compression.codec import NONE
from fusion.dag.cutting.stage import Stage, TieGroup
from fusion.dag.ir.dims import bind
from fusion.dag.ir.graph import DTYPE_BYTES, TensorType
from fusion.runtime.job.fields import build
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.training.compute.stage_codecs import DENSE, Sent, StageCodecs
from fusion.runtime.training.step.messages import TENSOR_KINDS, TensorHeader
from fusion.runtime.training.step.run_statistics import NO_ATTEMPT, Attempt
from fusion.swarm.errors import FrameError
from fusion.swarm.transport import Frame


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The facts of the job that a stage needs to run its part of a step."""

    stage: Stage
    stages: int
    ties: tuple[TieGroup, ...]  # with this stage among their members
    sizes: Mapping[str, int]  # of the symbolic dimensions; batch is a microbatch's
    # Of each stage of the job, as estimated by its launcher; may be empty
    memory_bytes: tuple[int, ...] = ()
    whole: tuple[Stage, ...] = ()  # all stages, on the first stage: its owner leads the job

    @property
    def partners(self) -> frozenset[int]:
        """The stages that this one exchanges frames with: neighbours on edges, tie-groups, the lead (for the lead: all)."""
        stage = self.stage
        partners = {0, *(edge.producer for edge in stage.receives)}
        partners.update(c for edge in stage.sends for c in edge.consumers)
        partners.update(s for group in self.ties for s in group.stages)
        if stage.index == 0:
            partners.update(range(self.stages))
        return frozenset(partners - {stage.index})

    def shape(self, kind: TensorType) -> tuple[int, ...]:
        return tuple(bind(dim, self.sizes) for dim in kind.shape)


@dataclass(frozen=True)
class Key:
    """Identifies a tensor within an attempt. `source`: the stage that sent it."""

    kind: str
    step: int
    microbatch: int
    edge: str
    source: int
    evaluate: bool = False


class Inbox:
    """`codecs`: also used for sending."""

    def __init__(self, plan: StagePlan, config: TrainConfig, codecs: StageCodecs | None = None) -> None:
        self._config = config
        self.codecs = codecs or StageCodecs(config)
        self._expected = _expected(plan)
        self._attempt: Attempt = NO_ATTEMPT
        self._step = 0
        # Partner stage -> the attempt, and its first step, that it has begun before us.
        self._ahead: dict[int, tuple[Attempt, int]] = {}
        self._held: dict[Attempt, dict[Key, torch.Tensor]] = {}
        self.taken = 0  # number of tensors
        self._waiting: dict[Key, asyncio.Future[torch.Tensor]] = {}

    @property
    def largest_bytes(self) -> int:
        """The largest tensor that may arrive. No codec makes one larger."""
        return max((math.prod(s) * DTYPE_BYTES[dtype] for s, dtype in self._expected.values()), default=0)

    @property
    def waits_for(self) -> int | None:
        """The stage whose tensor a `take` waits for; None if none does."""
        return next((key.source for key in self._waiting), None)

    def advance(self, attempt: Attempt, step: int) -> None:
        """Begin `step` in `attempt`. Tensors of earlier ones are dropped."""
        self._attempt, self._step = attempt, step
        self._held = {a: held for a, held in self._held.items() if a >= attempt}
        held = self._held.get(attempt, {})
        self._held[attempt] = {key: tensor for key, tensor in held.items() if key.step >= step}

    def drop(self) -> None:
        """Drop the tensors of the current attempt and cancel all `take`s."""
        self._held.pop(self._attempt, None)
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    def offer(self, source: int, frame: Frame) -> Awaitable[None] | None:
        """A tensor frame from stage `source`. Raises FrameError for one that the plan does not have. A tensor of an earlier attempt,
        or a duplicate, is dropped silently. Where it has to be decoded, the result must be awaited before the next frame of
        `source` is offered, and raises the same."""
        header = _header(frame)
        shape, dtype = self._check(source, frame.kind, header)
        if not self._wanted(source, header):
            return None
        if header.codec != DENSE:
            return self._decode(source, frame, header, shape, dtype)
        try:
            tensor = NONE.decode(frame.payload, shape, dtype)
        except ValueError as error:
            raise FrameError(f"{frame.kind} {header.edge[:80]!r}: {error}") from None
        self._put(source, frame.kind, header, tensor)
        return None

    async def _decode(
        self, source: int, frame: Frame, header: TensorHeader, shape: tuple[int, ...], dtype: str
    ) -> None:
        which = (header.attempt, header.step, header.microbatch, header.edge)
        sent = Sent(header.codec, header.masked, (frame.payload,))
        try:
            tensor = await self.codecs.decode(which, frame.kind, sent, shape, dtype, evaluate=header.evaluate)
        except ValueError as error:
            raise FrameError(f"{frame.kind} {header.edge[:80]!r}: {error}") from None
        if header.attempt == self._attempt:
            if header.step >= self._step:  # still wanted
                self._put(source, frame.kind, header, tensor)
        elif self._ahead.get(source) == (header.attempt, header.step):
            self._put(source, frame.kind, header, tensor)
        else:
            self.codecs.forget(header.attempt, {header.edge})

    def _put(self, source: int, kind: str, header: TensorHeader, tensor: torch.Tensor) -> None:
        key = Key(kind, header.step, header.microbatch, header.edge, source, header.evaluate)
        future = self._waiting.pop(key, None) if header.attempt == self._attempt else None
        if future is not None and not future.done():
            future.set_result(tensor)
        else:
            self._held.setdefault(header.attempt, {}).setdefault(key, tensor)

    def _wanted(self, source: int, header: TensorHeader) -> bool:
        if header.attempt == self._attempt:
            if header.step > self._step + 1:
                raise FrameError(f"a tensor of step {header.step} while step {self._step} is under way")
            return header.step >= self._step
        if header.attempt < self._attempt:
            return False
        ahead, step = self._ahead.get(source, (NO_ATTEMPT, 0))
        if header.attempt != ahead:
            # The last one, not the highest: an earlier owner may have sent any.
            if ahead > self._attempt:
                self._forget(source, ahead)
            self._ahead[source] = (header.attempt, header.step)
        elif header.step != step:  # its first step cannot be committed before we have begun it
            raise FrameError(f"a tensor of step {header.step} in an attempt that began with {step}")
        return True

    def _forget(self, source: int, attempt: Attempt) -> None:
        """Drop what a partner has sent of an attempt ahead of ours."""
        held = self._held.pop(attempt, {})
        left = {key: tensor for key, tensor in held.items() if key.source != source}
        if left:
            self._held[attempt] = left
        self.codecs.forget(attempt, {edge for _, edge, sender in self._expected if sender == source})

    async def take(self, key: Key) -> torch.Tensor:
        """Wait for a tensor of the current attempt. Each can be taken once."""
        held = self._held.get(self._attempt, {}).pop(key, None)
        if held is not None:
            self.taken += 1
            return held
        future: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            tensor = await future
            self.taken += 1
            return tensor
        finally:
            self._waiting.pop(key, None)

    def _check(self, source: int, kind: str, header: TensorHeader) -> tuple[tuple[int, ...], str]:
        expected = self._expected.get((kind, header.edge, source))
        if expected is None:
            raise FrameError(f"stage {source} has no {kind} {header.edge[:80]!r} for us")
        shape, dtype = expected
        if header.shape != shape or header.dtype != dtype:
            given = f"{header.dtype[:20]}{list(header.shape)[:8]}"
            raise FrameError(f"{kind} {header.edge[:80]!r} is {given}: the plan says {dtype}{list(shape)}")
        try:
            self.codecs.check(header.codec)
        except ValueError as error:
            raise FrameError(str(error)) from None
        last = self._config.evaluate_batches if header.evaluate else self._config.microbatches
        if not 0 <= header.microbatch < (1 if kind == "tie" else last):
            raise FrameError(f"no microbatch {header.microbatch} in the plan")
        if header.evaluate and kind != "activation":
            raise FrameError(f"evaluation has no {kind}")
        return shape, dtype


def _header(frame: Frame) -> TensorHeader:
    if frame.kind not in TENSOR_KINDS:
        raise FrameError(f"no tensor frame is called {frame.kind[:40]!r}")
    try:
        return build(TensorHeader, frame.header, frame.kind, known_only=True)
    except ValueError as error:
        raise FrameError(str(error)) from None


def _expected(plan: StagePlan) -> dict[tuple[str, str, int], tuple[tuple[int, ...], str]]:
    """(kind, edge, source) -> shape and dtype of every tensor that may arrive."""
    stage = plan.stage
    found = {
        ("activation", edge.name, edge.producer): (plan.shape(edge.type), edge.type.dtype)
        for edge in stage.receives
    }
    for edge in stage.sends:
        if edge.needs_gradient:
            for consumer in edge.consumers:
                found["gradient", edge.name, consumer] = (plan.shape(edge.type), edge.type.dtype)
    types = {variable.name: variable.type for variable in stage.graph.variables}
    for group in plan.ties:
        kind = types[group.variable]
        for member in group.stages:
            if member != stage.index:
                found["tie", group.variable, member] = (plan.shape(kind), kind.dtype)
    return found
