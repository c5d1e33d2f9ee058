"""The arithmetic of a world: a plane whose state is a hash chain.

A step that is skipped, applied twice, applied to another state or computed from other samples changes every later state.

    activation  hash(state of the stage, its inputs, step, microbatch)
    gradient    hash(state of the stage, stored activation, gradients received)
    state       (step, hash(state, the results of backward for all microbatches))

The loss is constant and not checked. A worker runs one call after another, each for some virtual time, like a thread.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgpack
import torch

from fusion.dag.cutting.stage import Edge, Stage
from fusion.dag.ir.graph import Graph, Input, Ref, TensorType, Variable
from fusion.runtime.device.share import Caller
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.planes.plane import RngKey, Tensors
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.data.ledger import Ledger, fed_digest
from fusion.runtime.training.data.samples import sample_indices

VARIABLE = "chain"
STATE = f"variable/{VARIABLE}"
SAMPLES = 24  # in the data; the steps of a world use most of them
ONE = TensorType((1,), "int64")
TWO = TensorType((2,), "int64")


@lru_cache(maxsize=16)
def stages_of(count: int) -> tuple[Stage, ...]:
    """A chain of `count` stages with one int64 on each edge. Of three stages the first also feeds the last one."""
    edges = [Edge(f"v{i}/0", Ref(f"v{i}"), ONE, i, (i + 1,), True) for i in range(count - 1)]
    if count == 3:
        edges[0] = Edge("v0/0", Ref("v0"), ONE, 0, (1, 2), True)
    stages = []
    for index in range(count):
        receives = tuple(edge for edge in edges if index in edge.consumers)
        sends = tuple(edge for edge in edges if edge.producer == index)
        read = ["input_ids"] * (index == 0) + ["targets"] * (index == count - 1)
        inputs = tuple(Input(name, ONE) for name in (*read, *(edge.name for edge in receives)))
        graph = Graph(inputs, (Variable(VARIABLE, TWO),), (), tuple(edge.ref for edge in sends))
        stages.append(Stage(index, graph, receives, sends, (0,) if index == count - 1 else ()))
    return tuple(stages)


def first_state(stage: int) -> tuple[int, int]:
    return 0, mix("initial", stage)


def mix(*parts: Any) -> int:
    """A 64-bit hash. It is the same in every process, since all run with PYTHONHASHSEED=0."""
    return hash(parts)


class ChainPlane:
    """Implements `fusion.runtime.planes.plane.TrainingStage`.

    It calls `applied(plane, before, after)` after every update, and `broken(text)` when a caller breaks the contract of a plane.
    """

    def __init__(
        self,
        stage: Stage,
        weights: Tensors,
        microbatches: int,
        applied: Callable[[ChainPlane, tuple[int, int], tuple[int, int]], None],
        broken: Callable[[str], None],
    ) -> None:
        self.stage = stage
        self.current: tuple[int, int] = _pair(weights[VARIABLE])
        self._microbatches = microbatches
        self._applied = applied
        self._broken = broken
        self._stash: dict[int, int] = {}  # activations, by microbatch
        self._results: dict[int, int] = {}  # of backward, by microbatch

    def forward(self, microbatch: int, inputs: Tensors, rng: RngKey) -> dict[str, torch.Tensor]:
        if rng.step != self.current[0]:
            self._broken(f"runs step {rng.step} on the state of step {self.current[0]}")
        value = mix(self.current, _read(self.stage, inputs), rng.step, microbatch)
        self._stash[microbatch] = value
        return self._outputs(value)

    def backward(self, microbatch: int, gradients: Tensors, loss_scale: float) -> dict[str, torch.Tensor]:
        activation = self._stash.pop(microbatch)
        received = tuple(int(gradients[edge.name]) for edge in self.stage.sends)
        if microbatch in self._results:
            self._broken(f"runs microbatch {microbatch} twice")
        result = self._results[microbatch] = mix(self.current, activation, received)
        return {edge.name: torch.tensor([mix(result, edge.name) >> 8]) for edge in self.stage.receives}

    def evaluate(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        return self._outputs(mix(self.current, _read(self.stage, inputs)))

    def _outputs(self, value: int) -> dict[str, torch.Tensor]:
        outputs = {edge.name: torch.tensor([value]) for edge in self.stage.sends}
        if self.stage.results:
            outputs["result/0"] = torch.tensor(1.0)
        return outputs

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        return {VARIABLE: torch.tensor([0])}

    def set_gradients(self, gradients: Tensors) -> None:
        return

    def squared_norm(self, skip: frozenset[str] = frozenset()) -> float:
        return 1.0

    def apply(self, learning_rate: float, clip_factor: float) -> None:
        if sorted(self._results) != list(range(self._microbatches)) or self._stash:
            self._broken(f"applies step {self.current[0]} with microbatches {sorted(self._results)}")
        before = self.current
        self.current = advanced(before, [self._results[m] for m in sorted(self._results)])
        self._results.clear()
        self._applied(self, before, self.current)

    def discard(self) -> None:
        self._stash.clear()
        self._results.clear()

    def state(self) -> dict[str, torch.Tensor]:
        return {STATE: torch.tensor(self.current)}

    def load_state(self, state: Tensors) -> None:
        self.current = _pair(state[STATE])
        self._stash.clear()
        self._results.clear()


def advanced(before: tuple[int, int], results: Sequence[int]) -> tuple[int, int]:
    """The state after a step, from the state before it and the results of backward in the order of microbatches."""
    return before[0] + 1, mix(before, *results)


def _pair(tensor: torch.Tensor) -> tuple[int, int]:
    step, chain = tensor.tolist()
    return step, chain


def _read(stage: Stage, inputs: Tensors) -> tuple[Any, ...]:
    return tuple(tuple(inputs[i.name].reshape(-1).tolist()) for i in stage.graph.inputs)


def history(config: TrainConfig, count: int) -> list[tuple[tuple[int, int], ...]]:
    """The states of all stages after 0, 1, ... `config.steps` steps, computed in one process without faults."""
    stages = stages_of(count)
    states = [first_state(i) for i in range(count)]
    steps = [tuple(states)]
    for step in range(config.steps):
        results: list[list[int]] = [[] for _ in stages]
        for microbatch in range(config.microbatches):
            samples = tuple(sample_indices(config.seed, step, microbatch, config, SAMPLES))
            activations: list[int] = []
            for stage in stages:
                inputs = tuple(
                    samples
                    if i.name in ("input_ids", "targets")
                    else (activations[_producer(stage, i.name)],)
                    for i in stage.graph.inputs
                )
                activations.append(mix(states[stage.index], inputs, step, microbatch))
            gradients: dict[tuple[str, int], int] = {}  # by edge and consumer
            for stage in reversed(stages):
                received = tuple(
                    wrapped(sum(gradients[edge.name, consumer] for consumer in edge.consumers))
                    for edge in stage.sends
                )
                value = mix(states[stage.index], activations[stage.index], received)
                results[stage.index].append(value)
                for edge in stage.receives:
                    gradients[edge.name, stage.index] = mix(value, edge.name) >> 8
        states = [advanced(states[i], results[i]) for i in range(count)]
        steps.append(tuple(states))
    return steps


def final_ledger(config: TrainConfig) -> Ledger:
    """The ledger at the end of a run without faults."""
    ledger, size = Ledger(), config.microbatches * config.microbatch_size
    for step in range(config.steps):
        fed = (sample_indices(config.seed, step, m, config, SAMPLES) for m in range(config.microbatches))
        ledger = ledger.commit(step, fed_digest(fed), size)
    return ledger


def wrapped(value: int) -> int:
    """`value` as an int64 that wraps around."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _producer(stage: Stage, edge: str) -> int:
    return next(e.producer for e in stage.receives if e.name == edge)


# --- serialised states


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    packed: bytes = msgpack.packb({name: tensor.tolist() for name, tensor in tensors.items()})
    return packed


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in msgpack.unpackb(data).items()}


# --- data and the worker


class WorldBatches(Batches):
    """The real choice of samples, over data in which each sample is its own index."""

    def __init__(self, config: TrainConfig, inputs: Sequence[str], train: Any, held_out: Any) -> None:
        self._config = config
        self._inputs = tuple(inputs)
        self._train = _Rows() if inputs else None  # type: ignore[assignment]
        self._held_out = self._train

    def _positions(self) -> dict[str, torch.Tensor]:
        return {}


class _Rows:
    samples = SAMPLES

    def read(self, indices: Sequence[int], inputs: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(indices) for name in inputs}


class WorldWorker:
    """Stands for `fusion.runtime.job.worker.Worker`.

    Calls run one at a time, in order, each for some virtual time. Cancelling the caller does not stop a call that has begun.
    """

    device = "cpu"
    threads = 1

    def __init__(self, rng: random.Random, seconds: float) -> None:
        self._rng = rng
        self._seconds = seconds  # on average
        self._queue: deque[
            tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
        ] = deque()
        self._busy = False

    def of(self, caller: Caller) -> WorldWorker:
        return self

    async def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._queue.append((future, function, args, kwargs))
        if not self._busy:
            self._next()
        return await future

    def _next(self) -> None:
        while self._queue:
            future, function, args, kwargs = self._queue.popleft()
            if future.cancelled():
                continue
            self._busy = True
            result: Any = None
            error: BaseException | None = None
            try:
                result = function(*args, **kwargs)
            except Exception as raised:
                error = raised
            seconds = self._seconds * 2 * self._rng.random()
            asyncio.get_running_loop().call_later(seconds, self._finish, future, result, error)
            return
        self._busy = False

    def _finish(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        if not future.cancelled():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._next()

    async def aclose(self) -> None:
        return
