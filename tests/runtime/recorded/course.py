"""The job and the answer that are recorded, on one loop of virtual time."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from recorder import Recorder
from safetensors.torch import save
from support import served, training
from support.surroundings import Surroundings
from torch import nn
from worlds.virtual_time import VirtualLoop, settle

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Arg, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.manifest import CompressionConfig, DataConfig, OptimizerConfig
from fusion.runtime.job.worker import Worker
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.swarm.directory.records import Digest
from fusion.swarm.identity import Identity

LIMIT_SECONDS = 600.0  # of virtual time
DRAW = 5  # a job whose gradients are neither zero nor long
P = ParamSpec("P")
T = TypeVar("T")
WIDTH, BATCH, VOCABULARY = 4, symbol("batch"), 16


class Loop(VirtualLoop):
    """What another thread would do is done here, at its turn and in no time."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        self.call_soon(settle, future, func, *args)
        return future


def record() -> str:
    """Every frame of both, as text."""
    torch.set_num_threads(1)
    parts = []
    for number, course in enumerate((trained, answered)):
        torch.manual_seed(DRAW + number)
        with tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(once=("/fusion/blob/1",))
            loop = Loop(random.Random(0), _unhandled)
            _run(loop, course(Path(folder), recorder, _surroundings(number, loop)))
            parts.append(f"# {course.__doc__}\n{recorder.text()}")
    return "\n".join(parts)


class LoopWorker(Worker):
    """Computes on the loop, without a thread."""

    def submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))


class Chances(random.Random):
    """Keys are counted by who draws them: how often others do must not matter."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._drawn: Counter[Any] = Counter()

    def randbytes(self, n: int) -> bytes:
        caller = sys._getframe(1).f_code
        self._drawn[caller] += 1
        return self._drawn[caller].to_bytes(n, "big")


def _surroundings(seed: int, loop: VirtualLoop) -> Surroundings:
    keys = itertools.count()

    def generate() -> Identity:
        key = hashlib.sha256(f"recorded {seed} {next(keys)}".encode()).digest()
        return Identity(Ed25519PrivateKey.from_private_bytes(key), None)

    return Surroundings(clock=loop.clock, random=Chances(seed), identity=generate, worker=LoopWorker)


def _run(loop: VirtualLoop, work: Coroutine[Any, Any, None]) -> None:
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(loop)
    try:
        task = loop.create_task(work, context=loop.world.context)
    finally:
        asyncio._set_running_loop(before)
    ended = loop.run(task.done, LIMIT_SECONDS)
    assert ended, "nothing is left to do, and the course has not ended"
    task.result()
    loop.close()


def _unhandled(lane: Any, text: str) -> None:
    raise AssertionError(text)


# --- training


async def trained(folder: Path, recorder: Recorder, given: Surroundings) -> None:
    """training: two steps of two microbatches; a value that skips a stage, a tied variable, two codecs"""
    graph, weights = _diamond(), {"a": _whole(WIDTH, WIDTH), "b": _whole(WIDTH, WIDTH)}
    # Values stay short enough for float32 to hold them exactly, in whatever order they are summed.
    train = training.config(
        steps=2, microbatches=2, microbatch_size=2, sequence=0, snapshot_every=2, evaluate_every=1, evaluate_batches=1,
        optimizer=OptimizerConfig(kind="sgd", learning_rate=2.0, clip_norm=None),
        data=DataConfig(kind="arrays", train=Digest("")),
        compression=CompressionConfig(kind="adaptive", families=("fp16", "bf16"), live=False),
        codecs=(("relu/0", "fp16", "none"), ("relu_1/0", "none", "bf16")),
    )  # fmt: skip
    data = save({"x": _whole(8, WIDTH), "targets": _whole(8, WIDTH)})
    async with training.swarm(folder, 3, given) as made:
        recorder.listen(made.network, [peer.context.peer_id for peer in made.peers])
        lead = made.peers[0]
        job = training.job(lead, graph, weights, train, 3, data, data, cuts=(2, 4))
        progress = await training.run(made, job, range(3))
        assert progress.state == "done" and progress.step == 2, progress


def _diamond() -> Graph:
    row = TensorType((BATCH, WIDTH), "float32")
    square = TensorType((WIDTH, WIDTH), "float32")
    return _graph(
        [Input("x", row), Input("targets", row)],
        [Variable("a", square), Variable("b", square)],
        [
            ("linear", "aten.linear", (Ref("x"), Ref("a"), None)),
            ("relu", "aten.relu", (Ref("linear"),)),
            ("linear_1", "aten.linear", (Ref("relu"), Ref("b"), None)),
            ("relu_1", "aten.relu", (Ref("linear_1"),)),
            ("linear_2", "aten.linear", (Ref("relu_1"), Ref("a"), None)),
            ("add", "aten.add.Tensor", (Ref("linear_2"), Ref("relu"), 1)),
            ("loss", "aten.mse_loss", (Ref("add"), Ref("targets"), 1)),
        ],
    )


# --- serving


async def answered(folder: Path, recorder: Recorder, given: Surroundings) -> None:
    """serving: a prompt in two chunks, then five tokens, greedy"""
    shapes = {"tokens": (VOCABULARY, WIDTH), "positions": (served.MAX_SEQUENCE, WIDTH), "a": (WIDTH, WIDTH),
              "b": (WIDTH, WIDTH), "head": (VOCABULARY, WIDTH)}  # fmt: skip
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(_whole(*shape)))
    graph = serving_graph(_language(), cache="kv", maximum_sequence=served.MAX_SEQUENCE)
    async with served.swarm_of(4, folder, given=given) as made:
        recorder.listen(made.network, [peer.id for peer in made.peers])
        await made.serve("whole", 3, made=(graph, module), serve={"vocabulary": VOCABULARY})
        prompt = tuple(range(1, 11))
        answer = await made.ask(model="whole", prompt_ids=prompt, max_tokens=5, sampling=Sampling())
        assert len(answer.tokens) == 5, answer
        await made.freed()


def _language() -> Graph:
    length = symbol("sequence")
    ids = TensorType((BATCH, length), "int64")

    def table(rows: int) -> TensorType:
        return TensorType((rows, WIDTH), "float32")

    return _graph(
        [Input("input_ids", ids), Input("position_ids", ids)],
        [
            Variable("tokens", table(VOCABULARY)),
            Variable("positions", table(served.MAX_SEQUENCE)),
            Variable("a", table(WIDTH)),
            Variable("b", table(WIDTH)),
            Variable("head", table(VOCABULARY)),
        ],
        [
            ("embedding", "aten.embedding", (Ref("tokens"), Ref("input_ids"), -1, False)),
            ("embedding_1", "aten.embedding", (Ref("positions"), Ref("position_ids"), -1, False)),
            ("add", "aten.add.Tensor", (Ref("embedding"), Ref("embedding_1"), 1)),
            ("linear", "aten.linear", (Ref("add"), Ref("a"), None)),
            ("relu", "aten.relu", (Ref("linear"),)),
            ("linear_1", "aten.linear", (Ref("relu"), Ref("b"), None)),
            ("relu_1", "aten.relu", (Ref("linear_1"),)),
            ("add_1", "aten.add.Tensor", (Ref("relu_1"), Ref("add"), 1)),
            ("linear_2", "aten.linear", (Ref("add_1"), Ref("head"), None)),
        ],
    )


def _graph(
    inputs: list[Input], variables: list[Variable], nodes: list[tuple[str, str, tuple[Arg, ...]]]
) -> Graph:
    types = {Ref(given.name): given.type for given in (*inputs, *variables)}
    made = []
    for name, op, args in nodes:
        made.append(Node(name, op, args, infer(op, args, types)))
        types[Ref(name)] = made[-1].results[0]
    return Graph(tuple(inputs), tuple(variables), tuple(made), (Ref(made[-1].name),), ("batch", "sequence"))


def _whole(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).float()
