"""Remote automatic differentiation: one stage's part of a step (FusionLLM, arXiv 2410.12707, section 3.2).

    FP   wait for the stage's remote inputs, run, send each output once to every consumer, keep the stash
    BP   sum the remote gradients of each output in stage order, run backward, send each input's gradient back

The order of FP and BP is a schedule of `fusion.dag.placement.schedule`. The device's thread always has the next action queued, so it
never waits for the loop, for data or for a send: tensors are encoded and sent while the next action computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from fusion.dag.cutting.stage import Edge
from fusion.dag.placement.schedule import actions
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.planes.plane import RngKey, TrainingStage
from fusion.runtime.training.compute.device_calls import DeviceCalls
from fusion.runtime.training.compute.finite_check import FiniteCheck
from fusion.runtime.training.compute.inbox import Inbox, Key, StagePlan
from fusion.runtime.training.compute.stage_codecs import Sent
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.data.ledger import fed_digest
from fusion.runtime.training.step.faults import (
    GRADIENTS,
    GRADIENTS_RECEIVED,
    GRADIENTS_SENT,
    LOSS,
    RECEIVED,
    SENT,
)
from fusion.runtime.training.step.messages import Ready
from fusion.runtime.training.step.run_statistics import Attempt
from fusion.swarm.transport import Buffer

# One action running and one queued: more would only delay the end of a discarded step.
AHEAD = 2

Send = Callable[[int, str, Mapping[str, Any], Sequence[Buffer]], None]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of an attempt at `step`, or, with `evaluate`, of the held-out data at `step`."""

    attempt: Attempt
    step: int
    number: int
    evaluate: bool = False


class Rad:
    """Runs the microbatches of one stage. `send(stage, kind, header, payload)` queues a tensor (`Partners.post`) and
    returns at once; `room` is backpressure (`Partners.room`)."""

    def __init__(
        self,
        plan: StagePlan,
        config: TrainConfig,
        plane: TrainingStage,
        calls: DeviceCalls,
        batches: Batches,
        inbox: Inbox,
        send: Send,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.inbox = inbox
        self._codecs = inbox.codecs  # shared: masks of received activations apply to sent gradients
        self._plan = plan
        self._config = config
        self._plane = plane
        self._calls = calls
        self._batches = batches
        self._send = send
        self._room = room
        self._losses: dict[int, float] = {}
        self._check = FiniteCheck()
        self._fed: dict[int, list[int]] = {}  # microbatch -> the samples of its forward
        self._actions = actions(
            config.schedule, plan.stage.index, plan.stages, config.microbatches, config.depth
        )
        # A tied variable is held by several stages; its gradient counts in the norm of the lowest one only.
        self._uncounted = frozenset(t.variable for t in plan.ties if t.stages[0] != plan.stage.index)

    async def step(self, attempt: Attempt, step: int, *, look: bool = False) -> Ready:
        """Forward and backward of every microbatch of `step`, gradients summed over tie-groups. `look`: also check which tensors
        are not finite. If cancelled, gradients and stashes stay behind for `TrainingStage.discard`."""
        self.inbox.advance(attempt, step)
        self._codecs.advance(attempt, step)
        self._losses.clear()
        self._fed.clear()
        self._check.begin(look=look)
        before = self._calls.spent()
        gate = asyncio.Semaphore(AHEAD)
        async with _group() as group:
            for action in self._actions:
                work = await self._prepare(action.kind, Microbatch(attempt, step, action.microbatch))
                await gate.acquire()
                group.create_task(work()).add_done_callback(lambda _: gate.release())
        self._calls.report_pace(before, self._config.microbatches)
        if look:
            await self._calls.run(self._check_gradients)
        await self._sum_ties(attempt, step)
        squared_norm = await self._calls.run(self._plane.squared_norm, self._uncounted)
        return Ready(
            attempt,
            step,
            squared_norm=squared_norm,
            loss=self._mean_loss(),
            fed=None
            if self._batches.samples is None
            else fed_digest(self._fed[m] for m in sorted(self._fed)),
            not_finite=self._check.not_finite,
            busy=self._calls.busy_share(before),
        )

    def apply(self, learning_rate: float, clip_factor: float) -> Coroutine[Any, Any, None]:
        """The step is committed: its residuals become state at once, and the returned coroutine updates the weights."""
        return self._calls.worker.run(self._codecs.apply(self._plane, learning_rate, clip_factor))

    async def evaluate(self, attempt: Attempt, step: int) -> float | None:
        """Mean loss over the held-out microbatches at `step`; None at a stage that does not compute it."""
        self.inbox.advance(attempt, step)
        self._losses.clear()
        gate = asyncio.Semaphore(AHEAD)
        async with _group() as group:
            for batch in range(self._config.evaluate_batches):
                at = Microbatch(attempt, step, batch, evaluate=True)
                received = await self._receive(at)
                await gate.acquire()
                inputs = {**await asyncio.to_thread(self._batches.held_out, batch), **received}
                task = group.create_task(self._evaluate(at, inputs))
                task.add_done_callback(lambda _: gate.release())
        return self._mean_loss()

    def _mean_loss(self) -> float | None:
        """Over the microbatches, in order; None at a stage that does not compute it."""
        losses = [self._losses[m] for m in sorted(self._losses)]
        return sum(losses) / len(losses) if losses else None

    def answers_for(self, error: Exception) -> bool:
        """Whether this stage is at fault for `error`. Where it receives integers, an index out of range may be another stage's fault,
        whose owner could otherwise make two owners of this stage fail in turn, and so end the job."""
        received = any("int" in edge.type.dtype for edge in self._plan.stage.receives)
        return not (received and isinstance(error, IndexError))

    @property
    def mark(self) -> tuple[int, int]:
        """Changes whenever a step makes progress here."""
        return self.inbox.taken, self._calls.ended

    @property
    def waits_for(self) -> int | None:
        """The stage whose tensor is awaited while there is nothing to compute; else None."""
        return None if self._calls.waiting else self.inbox.waits_for

    # --- waiting

    async def _prepare(
        self, kind: Literal["forward", "backward"], at: Microbatch
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Wait for the inputs of the pass. The result runs it."""
        if kind == "forward":
            indices, inputs = await asyncio.to_thread(self._draw, at)
            inputs.update(await self._receive(at))
            return partial(self._forward, at, inputs, indices)
        gradients = [
            (edge.name, [await self._gradient(edge, consumer, at) for consumer in edge.consumers])
            for edge in self._plan.stage.sends
            if edge.needs_gradient
        ]
        return partial(self._backward, at, gradients)

    def _draw(self, at: Microbatch) -> tuple[list[int], Tensors]:
        """Runs in a thread: a large microbatch takes many hashes, and the disk may be slow."""
        indices = self._batches.indices(at.step, at.number)
        return indices, self._batches.read(indices)

    async def _receive(self, at: Microbatch) -> Tensors:
        return {
            edge.name: await self.inbox.take(
                Key("activation", at.step, at.number, edge.name, edge.producer, at.evaluate)
            )
            for edge in self._plan.stage.receives
        }

    async def _gradient(self, edge: Edge, consumer: int, at: Microbatch) -> torch.Tensor:
        return await self.inbox.take(Key("gradient", at.step, at.number, edge.name, consumer))

    # --- computing, then sending while the next action computes

    async def _forward(self, at: Microbatch, inputs: Tensors, indices: list[int]) -> None:
        rng = RngKey(self._config.seed, at.step, at.number)

        def run() -> tuple[Tensors, float | None]:
            self._check.see(RECEIVED, (inputs[edge.name] for edge in self._plan.stage.receives))
            sends, loss = _finish(self._plane.forward(at.number, inputs, rng))
            self._check.see(SENT, (sends[edge.name] for edge in self._plan.stage.sends))
            self._check.see(LOSS, () if loss is None else (torch.tensor(loss),))
            return sends, loss

        sends, loss = await self._calls.run(run)
        self._fed[at.number] = indices
        if loss is not None:
            self._losses[at.number] = loss
        await self._send_forward(at, sends)

    async def _evaluate(self, at: Microbatch, inputs: Tensors) -> None:
        def run() -> tuple[Tensors, float | None]:
            return _finish(self._plane.evaluate(inputs))

        sends, loss = await self._calls.run(run)
        if loss is not None:
            self._losses[at.number] = loss
        await self._send_forward(at, sends)
        if (
            self._room is not None
        ):  # evaluation has no backward pass to wait for: all batches would queue in memory
            await self._room()

    async def _backward(self, at: Microbatch, gradients: list[tuple[str, list[torch.Tensor]]]) -> None:
        def run() -> Tensors:
            summed = {name: _sum(parts) for name, parts in gradients}
            self._check.see(GRADIENTS_RECEIVED, summed.values())
            computed = self._plane.backward(at.number, summed, 1.0 / self._config.microbatches)
            self._check.see(GRADIENTS_SENT, computed.values())
            return {name: tensor.to("cpu").contiguous() for name, tensor in computed.items()}

        computed = await self._calls.run(run)
        for edge in self._plan.stage.receives:
            if edge.needs_gradient:
                tensor = computed[edge.name]
                sent = await self._codecs.gradient(at.attempt, at.step, at.number, edge.name, tensor)
                self._post(edge.producer, "gradient", at, edge.name, tensor, sent)

    def _check_gradients(self) -> None:
        """Our own, before those of tied variables are added."""
        self._check.see(GRADIENTS, (torch.tensor(self._plane.squared_norm()),))

    async def _sum_ties(self, attempt: Attempt, step: int) -> None:
        """Every member of a tie-group computes the same sum, in stage order."""
        for group in self._plan.ties:
            own = await self._calls.run(self._own_gradient, group.variable)
            here = self._plan.stage.index
            others = [member for member in group.stages if member != here]
            sent, decoded = await self._codecs.tie(group.variable, own)
            for member in others:
                self._post(member, "tie", Microbatch(attempt, step, 0), group.variable, own, sent)
            parts = {here: decoded}
            for member in others:
                parts[member] = await self.inbox.take(Key("tie", step, 0, group.variable, member))
            ordered = [parts[member] for member in group.stages]
            await self._calls.run(self._set_gradient, group.variable, ordered, decoded)

    def _own_gradient(self, variable: str) -> torch.Tensor:
        """Not copied where it is on the host already: a vocabulary's gradient may be the largest tensor of all."""
        return self._plane.gradients([variable])[variable].to("cpu").contiguous()

    def _set_gradient(self, variable: str, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """Sum the parts in order, in the memory of a received one: `own` may still be queued for sending."""
        total = parts[0]
        for part in parts[1:]:
            total = part.add_(total) if total is own else total.add_(part)  # a + b is b + a, to the bit
        self._plane.set_gradients({variable: total})

    async def _send_forward(self, at: Microbatch, sends: Tensors) -> None:
        for edge in self._plan.stage.sends:
            name, tensor = edge.name, sends[edge.name]
            sent = await self._codecs.activation(
                at.attempt, at.step, at.number, name, tensor, evaluate=at.evaluate
            )
            for consumer in edge.consumers:
                self._post(consumer, "activation", at, name, tensor, sent)

    def _post(
        self, target: int, kind: str, at: Microbatch, edge: str, tensor: torch.Tensor, sent: Sent
    ) -> None:
        header = {
            "attempt": at.attempt,
            "step": at.step,
            "microbatch": at.number,
            "edge": edge,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tuple(tensor.shape),
            "codec": sent.spec,
            "masked": sent.masked,
            "evaluate": at.evaluate,
        }
        self._send(target, kind, header, sent.buffers)


@asynccontextmanager
async def _group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first error, not a group: once one action fails, the step is over."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _finish(outputs: Tensors) -> tuple[Tensors, float | None]:
    """On the worker thread: the outputs on the host, and the loss as a number."""
    loss = float(outputs["result/0"]) if "result/0" in outputs else None
    return {name: tensor.to("cpu").contiguous() for name, tensor in outputs.items()}, loss


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
