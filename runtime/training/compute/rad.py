"""Remote automatic differentiation: one stage's part of a step (FusionLLM, arXiv 2410.12707, section 3.2).

    FP   wait for the stage's remote inputs, run, send each output once to every consumer, keep the stash
    BP   sum the remote gradients of each output in stage order, run backward, send each input's gradient back

The order of FP and BP is a schedule of `fusion.dag.placement.schedule`. The device's thread has the next action waiting while it
runs one, so it never waits for the loop, for data or for a send: what is sent is encoded and goes out beside the
computation that follows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch

from fusion.dag.cutting.stage import Edge
from fusion.dag.placement.schedule import Action, gpipe, one_f_one_b
from fusion.runtime.device.overrun import Overrun, call_seconds
from fusion.runtime.device.real_pace import Asks, RealPace
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.job.worker import Worker
from fusion.runtime.planes.plane import RngKey, TrainingStage
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

# An action that runs and one that is ready to: more would only make a discarded step take longer to stop.
AHEAD = 2

Send = Callable[[int, str, Mapping[str, Any], Sequence[Buffer]], None]
Tensors = dict[str, torch.Tensor]


class Rad:
    """Runs the microbatches of one stage. `send(stage, kind, header, payload)` queues a tensor (`Partners.post`) and
    returns at once; `clock` gives seconds that only rise, on any thread; `flops_per_second`: that the device was measured to
    have, or 0: calls are held to what their graph promises; `pace` is told how long the calls of a step took; `room` waits
    until little of what was sent waits to go out (`Partners.room`)."""

    def __init__(
        self,
        plan: StagePlan,
        config: TrainConfig,
        plane: TrainingStage,
        worker: Worker,
        batches: Batches,
        inbox: Inbox,
        send: Send,
        clock: Callable[[], float] = time.monotonic,
        flops_per_second: float = 0.0,
        pace: RealPace | None = None,
        room: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.inbox = inbox
        self._codecs = inbox.codecs  # what comes in says which elements go back
        self._plan = plan
        self._config = config
        self._plane = plane
        self._worker = worker
        self._batches = batches
        self._send = send
        self._room = room
        self._clock = clock
        self._flops_per_second = flops_per_second
        self._overrun: Overrun | None = None  # made with the first call, in the worker thread
        self._pace = pace
        self._asks: Asks | None = None  # of a microbatch, the same
        self._computing = 0  # calls that run, or wait for the device
        self._called = 0  # calls that have ended
        self._computed = 0.0  # seconds, by the clock of `pace`
        self._busy = 0.0  # seconds computed; written by the worker thread only
        self._losses: dict[int, float] = {}
        # What was not finite in this step, where we look; by the worker thread only.
        self._look: set[str] | None = None
        self._fed: dict[int, list[int]] = {}  # microbatch -> the samples that went into its forward
        self._actions = _schedule(plan, config)
        # A tied variable is held several times; its gradient counts once in the norm, at the lowest stage.
        self._uncounted = frozenset(t.variable for t in plan.ties if t.stages[0] != plan.stage.index)

    async def step(self, attempt: Attempt, step: int, *, look: bool = False) -> Ready:
        """Forward and backward of every microbatch of `step`, gradients summed over tie-groups; `look`: and say
        which tensors were not finite. Cancelling it leaves
        gradients and stashes behind, for `TrainingStage.discard`."""
        self.inbox.advance(attempt, step)
        self._codecs.advance(attempt, step)
        self._losses.clear()
        self._fed.clear()
        self._look = set() if look else None
        began, busy, computed = self._clock(), self._busy, self._computed
        gate = asyncio.Semaphore(AHEAD)
        async with _group() as group:
            for action in self._actions:
                work = await self._prepare(action, attempt, step)
                await gate.acquire()
                group.create_task(work()).add_done_callback(lambda _: gate.release())
        if self._pace is not None and self._asks is not None:
            self._pace.saw(self._config.microbatches * self._asks, self._computed - computed)
        if look:
            await self._compute(self._look_at_gradients)
        await self._sum_ties(attempt, step)
        squared_norm = await self._compute(self._plane.squared_norm, self._uncounted)
        losses = [self._losses[m] for m in sorted(self._losses)]
        return Ready(
            attempt,
            step,
            squared_norm=squared_norm,
            loss=sum(losses) / len(losses) if losses else None,
            fed=None
            if self._batches.samples is None
            else fed_digest(self._fed[m] for m in sorted(self._fed)),
            not_finite=tuple(sorted(self._look or ())),
            busy=min(1.0, (self._busy - busy) / max(1e-9, self._clock() - began)),
        )

    def apply(self, learning_rate: float, clip_factor: float) -> Coroutine[Any, Any, None]:
        """The step is committed: what codecs have left out of it is state at once, and the result updates the weights."""
        return self._worker.run(self._codecs.apply(self._plane, learning_rate, clip_factor))

    async def evaluate(self, attempt: Attempt, step: int) -> float | None:
        """Mean loss over the held-out microbatches for the state of `step`; None at a stage that does not make it."""
        self.inbox.advance(attempt, step)
        self._losses.clear()
        gate = asyncio.Semaphore(AHEAD)
        async with _group() as group:
            for batch in range(self._config.evaluate_batches):
                received = await self._receive(step, batch, evaluate=True)
                await gate.acquire()
                inputs = {**await asyncio.to_thread(self._batches.held_out, batch), **received}
                task = group.create_task(self._evaluate(attempt, step, batch, inputs))
                task.add_done_callback(lambda _: gate.release())
        losses = [self._losses[m] for m in sorted(self._losses)]
        return sum(losses) / len(losses) if losses else None

    def answers_for(self, error: Exception) -> bool:
        """Whether a step that raised it failed here. An index beyond its table may be another stage's doing, where we receive
        whole numbers: its owner could have one owner of ours after another say so, and two of them end the job."""
        received = any("int" in edge.type.dtype for edge in self._plan.stage.receives)
        return not (received and isinstance(error, IndexError))

    @property
    def mark(self) -> tuple[int, int]:
        """What changes whenever a step goes on here."""
        return self.inbox.taken, self._called

    @property
    def waits_for(self) -> int | None:
        """The stage whose tensor is waited for, while there is nothing to compute."""
        return None if self._computing else self.inbox.waits_for

    # --- waiting

    async def _prepare(
        self, action: Action, attempt: Attempt, step: int
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Wait for what the action reads; the result runs it."""
        at = action.microbatch
        if action.kind == "forward":
            indices, inputs = await asyncio.to_thread(self._draw, step, at)
            inputs.update(await self._receive(step, at, evaluate=False))
            return partial(self._forward, attempt, step, at, inputs, indices)
        gradients = [
            (edge.name, [await self._gradient(edge, consumer, step, at) for consumer in edge.consumers])
            for edge in self._plan.stage.sends
            if edge.needs_gradient
        ]
        return partial(self._backward, attempt, step, at, gradients)

    def _draw(self, step: int, microbatch: int) -> tuple[list[int], Tensors]:
        """In a thread: a large microbatch takes many hashes, and the disk may be slow."""
        indices = self._batches.indices(step, microbatch)
        return indices, self._batches.read(indices)

    async def _receive(self, step: int, microbatch: int, *, evaluate: bool) -> Tensors:
        return {
            edge.name: await self.inbox.take(
                Key("activation", step, microbatch, edge.name, edge.producer, evaluate)
            )
            for edge in self._plan.stage.receives
        }

    async def _gradient(self, edge: Edge, consumer: int, step: int, microbatch: int) -> torch.Tensor:
        return await self.inbox.take(Key("gradient", step, microbatch, edge.name, consumer))

    # --- computing, then sending while the next action computes

    async def _forward(
        self, attempt: Attempt, step: int, microbatch: int, inputs: Tensors, indices: list[int]
    ) -> None:
        rng = RngKey(self._config.seed, step, microbatch)

        def run() -> tuple[Tensors, float | None]:
            self._see(RECEIVED, (inputs[edge.name] for edge in self._plan.stage.receives))
            sends, loss = _finish(self._plane.forward(microbatch, inputs, rng))
            self._see(SENT, (sends[edge.name] for edge in self._plan.stage.sends))
            self._see(LOSS, () if loss is None else (torch.tensor(loss),))
            return sends, loss

        sends, loss = await self._compute(run)
        self._fed[microbatch] = indices
        if loss is not None:
            self._losses[microbatch] = loss
        await self._send_forward(attempt, step, microbatch, sends, evaluate=False)

    async def _evaluate(self, attempt: Attempt, step: int, batch: int, inputs: Tensors) -> None:
        def run() -> tuple[Tensors, float | None]:
            return _finish(self._plane.evaluate(inputs))

        sends, loss = await self._compute(run)
        if loss is not None:
            self._losses[batch] = loss
        await self._send_forward(attempt, step, batch, sends, evaluate=True)
        if self._room is not None:  # nothing comes back that it waits for: all batches would wait in memory
            await self._room()

    async def _backward(
        self, attempt: Attempt, step: int, microbatch: int, gradients: list[tuple[str, list[torch.Tensor]]]
    ) -> None:
        def run() -> Tensors:
            summed = {name: _sum(parts) for name, parts in gradients}
            self._see(GRADIENTS_RECEIVED, summed.values())
            made = self._plane.backward(microbatch, summed, 1.0 / self._config.microbatches)
            self._see(GRADIENTS_SENT, made.values())
            return {name: tensor.to("cpu").contiguous() for name, tensor in made.items()}

        made = await self._compute(run)
        for edge in self._plan.stage.receives:
            if edge.needs_gradient:
                tensor = made[edge.name]
                sent = await self._codecs.gradient(attempt, step, microbatch, edge.name, tensor)
                self._post(edge.producer, "gradient", attempt, step, microbatch, edge.name, tensor, sent)

    def _see(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """In the worker thread, in a step that we look at. An activation may be infinite (a mask), but not NaN."""
        if self._look is None or what in self._look:
            return
        bad = torch.isnan if what in (RECEIVED, SENT) else lambda tensor: ~torch.isfinite(tensor)
        if any(bool(bad(tensor).any()) for tensor in tensors if tensor.is_floating_point()):
            self._look.add(what)

    def _look_at_gradients(self) -> None:
        """Our own, before those of tied variables come from others."""
        self._see(GRADIENTS, (torch.tensor(self._plane.squared_norm()),))

    async def _sum_ties(self, attempt: Attempt, step: int) -> None:
        """Every member of a tie-group ends with the same sum: added up in stage order, wherever it is added."""
        for group in self._plan.ties:
            own = await self._compute(self._own_gradient, group.variable)
            here = self._plan.stage.index
            others = [member for member in group.stages if member != here]
            sent, read = await self._codecs.tie(group.variable, own)
            for member in others:
                self._post(member, "tie", attempt, step, 0, group.variable, own, sent)
            parts = {here: read}
            for member in others:
                parts[member] = await self.inbox.take(Key("tie", step, 0, group.variable, member))
            ordered = [parts[member] for member in group.stages]
            await self._compute(self._set_gradient, group.variable, ordered, read)

    def _own_gradient(self, variable: str) -> torch.Tensor:
        """Where it lies: a vocabulary's is the largest tensor that there is."""
        return self._plane.gradients([variable])[variable].to("cpu").contiguous()

    def _set_gradient(self, variable: str, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """The sum of the parts in their order, in the memory of one that was received: `own` may be on its way still."""
        total = parts[0]
        for part in parts[1:]:
            total = part.add_(total) if total is own else total.add_(part)  # a + b is b + a, to the bit
        self._plane.set_gradients({variable: total})

    async def _send_forward(
        self, attempt: Attempt, step: int, microbatch: int, sends: Tensors, *, evaluate: bool
    ) -> None:
        for edge in self._plan.stage.sends:
            name, tensor = edge.name, sends[edge.name]
            sent = await self._codecs.activation(attempt, step, microbatch, name, tensor, evaluate=evaluate)
            for consumer in edge.consumers:
                self._post(consumer, "activation", attempt, step, microbatch, name, tensor, sent, evaluate)

    def _post(
        self,
        target: int,
        kind: str,
        attempt: Attempt,
        step: int,
        microbatch: int,
        edge: str,
        tensor: torch.Tensor,
        sent: Sent,
        evaluate: bool = False,
    ) -> None:
        header = {
            "attempt": attempt,
            "step": step,
            "microbatch": microbatch,
            "edge": edge,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": tuple(tensor.shape),
            "codec": sent.spec,
            "masked": sent.masked,
            "evaluate": evaluate,
        }
        self._send(target, kind, header, sent.buffers)

    async def _compute(self, function: Callable[..., Any], *args: Any) -> Any:
        def timed() -> Any:
            began, computed = self._clock(), self._pace.clock() if self._pace else 0.0
            try:
                result = function(*args)
            finally:
                seconds = self._clock() - began
                self._busy += seconds
            if self._pace is not None:
                self._computed += self._pace.clock() - computed
                if self._asks is None:
                    self._asks = self._pace.asks(self._plan.stage, self._plan.sizes)
            self._hold_to_estimate(seconds)
            return result

        self._computing += 1
        try:
            return await self._worker.run(timed)
        finally:
            self._computing -= 1
            self._called += 1

    def _hold_to_estimate(self, seconds: float) -> None:
        """In the worker thread. Raises RuntimeError once calls overrun what the graph promises."""
        if self._flops_per_second <= 0.0:
            return
        if self._overrun is None:
            promised = call_seconds(self._plan.stage, self._plan.sizes, self._flops_per_second)
            self._overrun = Overrun(promised)
        if self._overrun.took(seconds):
            promised = self._overrun.estimate_seconds
            raise RuntimeError(f"calls take {seconds:.1f} s: the graph promises {promised:.3f} s")


def _schedule(plan: StagePlan, config: TrainConfig) -> tuple[Action, ...]:
    stage, stages, microbatches = plan.stage.index, plan.stages, config.microbatches
    if config.schedule == "gpipe":
        return gpipe(stage, stages, microbatches)
    return one_f_one_b(stage, stages, microbatches, config.depth)


@asynccontextmanager
async def _group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises what went wrong first, not a group of it: one action fails, the step is over."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _finish(made: Tensors) -> tuple[Tensors, float | None]:
    """In the worker thread: bring what is sent to the host, and the loss to a number."""
    loss = float(made["result/0"]) if "result/0" in made else None
    return {name: tensor.to("cpu").contiguous() for name, tensor in made.items()}, loss


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
