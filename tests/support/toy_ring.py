"""A ring over the in-memory transport, with a plane whose arithmetic is exact and whose cache is checked.

Every stage sums what it has seen of a session, so a position that is lost, repeated or sent to the wrong session
changes every later token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from fusion.dag.cutting.stage import Edge, Stage
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Ref, TensorType
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.protocol import RING
from fusion.runtime.job.worker import Worker
from fusion.runtime.planes.plane import Piece
from fusion.runtime.serving.drafts.draft_model import DraftModel
from fusion.runtime.serving.requests.header_fields import pack_tokens
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.frames import plan_ring
from fusion.runtime.serving.ring.links import GATEWAY, LinkEnds, RingPosition, accepts_acks, accepts_batches
from fusion.runtime.serving.ring.sampling import sample
from fusion.runtime.serving.ring.session import Hop, Opening, SessionId
from fusion.runtime.serving.ring.stage import RingStage
from fusion.runtime.serving.ring.stage_session import StageRunner
from fusion.swarm.directory.records import JobId
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.streams.queued_stream import hello
from fusion.swarm.transport import Frame, PeerId, Stream

VOCABULARY = 31
JOB = JobId("a" * 64)
GREEDY = Sampling()
HIDDEN = TensorType((symbol("batch"), symbol("sequence"), 3), "float32")


def make_stages(count: int, *, skip: bool = False, ids_at: Sequence[int] = (0,)) -> tuple[Stage, ...]:
    """A chain of stages; with `skip` every stage after the second also reads stage 0's output."""
    edges = [
        Edge(
            f"h{i}/0",
            Ref(f"h{i}"),
            HIDDEN,
            i,
            tuple(range(1, count)) if skip and i == 0 else (i + 1,),
            False,
        )
        for i in range(count - 1)
    ]
    ids = TensorType((symbol("batch"), symbol("sequence")), "int64")
    stages = []
    for i in range(count):
        receives = tuple(e for e in edges if i in e.consumers)
        inputs = [Input("input_ids", ids)] if i in ids_at else []
        inputs += [Input("position_ids", ids)] if i == 0 else []
        inputs += [Input(e.name, e.type) for e in receives]
        sends = tuple(e for e in edges if e.producer == i)
        stages.append(
            Stage(i, Graph(tuple(inputs), (), (), ()), receives, sends, (0,) if i == count - 1 else ())
        )
    return tuple(stages)


def arithmetic(stage: Stage, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stage's output over a whole sequence: position t is a function of positions 0..t, in integers and so exact."""
    x = torch.zeros(1, next(iter(inputs.values())).shape[1], 3)
    for k, name in enumerate(sorted(inputs)):
        value = inputs[name].float()
        x = x + (k + 2) * (value if value.dim() == 3 else torch.stack([value, 2 * value, value + 1], -1))
    y = (3 * x + x.cumsum(1) + stage.index) % 97
    found = {edge.name: y for edge in stage.sends}
    if stage.results:
        score = y.sum(-1, keepdim=True) + 7 * y[..., :1]
        found["result/0"] = ((score + 1) * torch.arange(1, VOCABULARY + 1) ** 2 % 101) / 20
    return found


class ToyPlane:
    batched = chunk_invariant = True
    compiles = False

    def __init__(self, stage: Stage, on_run: Callable[[str, int, int], None] = lambda *_: None) -> None:
        self.stage = stage
        self.has_cache = True
        self.seen: dict[str, dict[str, torch.Tensor]] = {}
        self.retained: dict[int, dict[str, torch.Tensor]] = {}
        self.capacity: dict[str, int] = {}
        self.full = False
        self.most = math.inf  # positions, of all sessions together
        self.broken = False
        self._on_run = on_run

    def open(self, session: str, capacity: int, source: int = 0) -> None:
        kept = sum(map(_positions, self.retained.values()))
        if self.full or capacity + sum(self.capacity[each] for each in self.seen) + kept > self.most:
            raise MemoryError("no room for another session's cache")
        self.seen[session], self.capacity[session] = {}, capacity

    def reserve(self, session: str, positions: int) -> bool:
        return False

    def run(self, pieces: Sequence[Piece]) -> list[dict[str, torch.Tensor]]:
        if self.broken:
            raise RuntimeError("the device is on fire")
        return [self._run(piece) for piece in pieces]

    def _run(self, piece: Piece) -> dict[str, torch.Tensor]:
        session, start, inputs = piece.session, piece.start, piece.inputs
        length = next(iter(inputs.values())).shape[1]
        self._on_run(session, start, length)
        cache = self.seen[session]
        for name, value in inputs.items():
            old = cache.get(name, value[:, :0])
            assert start + length <= self.capacity[session]
            if old.shape[1] < start:
                raise ValueError(
                    f"the cache holds {old.shape[1]} positions: it cannot go on at position {start}"
                )
            cache[name] = torch.cat([old[:, :start], value.clone()], 1)
        whole = self._whole(cache)
        start_of_logits = -piece.logit_positions
        return {
            n: v[:, start_of_logits:] if n.startswith("result") else v[:, start:] for n, v in whole.items()
        }

    def _whole(self, cache: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return arithmetic(self.stage, cache)

    def close(self, session: str) -> None:
        self.seen.pop(session, None)

    def retain(self, session: str, name: int, positions: int) -> tuple[int, int]:
        cache = _cut(self.seen.pop(session, {}), positions)
        if not _positions(cache):
            return 0, 0
        self.retained[name] = cache
        return _positions(cache), _positions(cache)

    def resume(self, session: str, capacity: int, name: int, positions: int) -> int:
        found = self.retained.pop(name, {})
        try:
            self.open(session, capacity)
        except MemoryError:
            self.retained[name] = found
            raise
        self.seen[session] = _cut(found, positions)
        return _positions(self.seen[session])

    def copy(self, source: int | str, session: str, positions: int) -> int:
        found = self.seen.get(source) if isinstance(source, str) else self.retained.get(source)
        self.seen[session] = _cut(found or {}, positions)
        return _positions(self.seen[session])

    def forget(self, name: int) -> None:
        self.retained.pop(name, None)

    def clear(self) -> None:
        self.seen.clear()
        self.retained.clear()

    def used_bytes(self) -> int:
        return len(self.seen)

    def retained_bytes(self) -> int:
        return sum(map(_positions, self.retained.values()))


class WholeModel(ToyPlane):
    """All stages of a ring as one: a draft model that is always right, or with `wrong` never."""

    def __init__(self, stages: Sequence[Stage], *, wrong: bool = False) -> None:
        self.runs = 0
        super().__init__(make_stages(1)[0], self._ran)
        self._stages = stages
        self._wrong = wrong

    def _ran(self, session: str, start: int, length: int) -> None:
        self.runs += 1

    def _whole(self, cache: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values = dict(cache)
        for stage in self._stages:
            values |= arithmetic(stage, {i.name: values[i.name] for i in stage.graph.inputs})
        logits = values["result/0"]
        return {"result/0": logits.roll(1, -1) if self._wrong else logits}


def _cut(cache: Mapping[str, torch.Tensor], positions: int) -> dict[str, torch.Tensor]:
    return {name: value[:, :positions].clone() for name, value in cache.items()}


def _positions(cache: Mapping[str, torch.Tensor]) -> int:
    return min((value.shape[1] for value in cache.values()), default=0)


def reference(
    stages: Sequence[Stage],
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    end: int = -1,
) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        values = {"input_ids": torch.tensor([tokens]), "position_ids": torch.arange(len(tokens))[None]}
        for stage in stages:
            values |= arithmetic(stage, {i.name: values[i.name] for i in stage.graph.inputs})
        tokens.append(sample(values["result/0"][0, -1], sampling, len(tokens)))
        if tokens[-1] == end:
            break
    return tokens[len(prompt) :]


class Ring:
    """Stages on peers p0, p1, ..., and a gateway whose frames the test sends itself."""

    def __init__(self, network: MemoryNetwork, stages: Sequence[Stage], serve: ServeConfig) -> None:
        self.network = network
        self.stages = stages
        self.serve = serve
        self.rings: list[RingStage] = []
        self.planes: list[ToyPlane] = []
        self.route = tuple(Hop(PeerId(f"p{i}"), 5 + i) for i in range(len(stages)))
        self.gateway = MemoryTransport(network, PeerId("gateway"))
        self.tasks: list[asyncio.Task[None]] = []
        self._names = itertools.count()

    async def connect(
        self, transport: MemoryTransport | None = None, said: Mapping[str, Any] | None = None
    ) -> list[Stream]:
        """Open a session. `said`: further fields of its `hello`."""
        streams: list[Stream] = []
        for i, hop in enumerate(self.route):
            stream = await (transport or self.gateway).open(hop.peer, RING.name)
            await stream.send("hello", {**LinkEnds(JOB, GATEWAY, i, hop.peer).to_header(), **(said or {})})
            streams.append(stream)
        return streams

    def opening(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Opening:
        fields: dict[str, Any] = {
            "session": SessionId(f"s{next(self._names)}"),
            "sampling": GREEDY,
            **options,
        }
        return Opening(route=self.route, prompt_length=len(prompt), max_tokens=max_tokens, **fields)

    async def open(
        self, streams: Sequence[Stream], opening: Opening, prompt: Sequence[int] | None = None
    ) -> None:
        for stream in streams:
            payload = [] if prompt is None or stream is not streams[-1] else [pack_tokens(prompt)]
            await stream.send("open", opening.to_header(), payload)
        for stream in streams:
            frame = await stream.receive()
            if frame.kind != "opened":
                raise Refused(frame)

    async def prompt(
        self, streams: Sequence[Stream], opening: Opening, prompt: Sequence[int], guesses: bool = False
    ) -> None:
        said = {"guesses": True} if guesses else {}
        await streams[0].send("prompt", {"session": opening.session, **said}, [pack_tokens(prompt)])

    async def tokens(self, stream: Stream) -> list[int]:
        found = []
        while True:
            frame = await stream.receive()
            if frame.kind != "token":
                raise Refused(frame)
            found.append(frame.header["id"])
            if frame.header["finish"]:
                return found

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, guesses: bool = False, **options: Any
    ) -> list[int]:
        streams = await self.connect()
        opening = self.opening(prompt, max_tokens, **options)
        await self.open(streams, opening, prompt if opening.sampling.penalises else None)
        await self.prompt(streams, opening, prompt, guesses)
        tokens = await self.tokens(streams[-1])
        for stream in streams:
            await stream.send("close", {"session": opening.session})
        return tokens

    async def freed(self) -> None:
        """Wait until no living stage has a session, for 10 s at most."""
        async with asyncio.timeout(10):
            alive = [i for i, hop in enumerate(self.route) if hop.peer in self.network.transports]
            while any(self.rings[i].sessions or self.planes[i].seen for i in alive):
                await asyncio.sleep(0.001)


class Refused(Exception):
    def __init__(self, frame: Frame) -> None:
        super().__init__(f"{frame.kind}: {frame.header.get('message')}")


@asynccontextmanager
async def ring_of(
    stages: Sequence[Stage],
    *,
    on_run: Callable[[int, str, int, int], None] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
    draft: DraftModel | None = None,
    older: Collection[int] = (),
    **serve: Any,
) -> AsyncIterator[Ring]:
    """`older`: stages of a release without frames in batches and acks."""
    settings: dict[str, Any] = {
        "cache": "kv",
        "max_sequence": 64,
        "vocabulary": VOCABULARY,
        "prefill_chunk": 4,
    }
    ring = Ring(MemoryNetwork(), stages, ServeConfig(**{**settings, **serve}))
    workers = []
    for i, hop in enumerate(ring.route):
        transport = MemoryTransport(ring.network, hop.peer)
        plane = ToyPlane(stages[i], lambda *run, i=i: on_run(i, *run))
        position = RingPosition(job=JOB, name="toy", serve=ring.serve, peer=hop.peer, term=hop.term)
        workers.append(Worker())
        plan = plan_ring(stages, i)
        runner = StageRunner(plane, plan, ring.serve.max_sequence, draft=draft if plan.first else None)
        stage = RingStage(transport, workers[-1], runner, plan, position, clock=clock)

        async def handler(stream: Stream, stage: RingStage = stage, old: bool = i in older) -> None:
            said = await hello(stream)
            ends = LinkEnds.from_hello(said, PeerId("us"))
            knows = {"batches": accepts_batches(said), "acks": accepts_acks(said)}
            await stage.attend(stream, ends.sender, **({} if old else knows))

        await transport.serve(RING.name, handler)
        ring.planes.append(plane)
        ring.rings.append(stage)
        ring.tasks.append(asyncio.create_task(stage.run()))
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            yield ring
    finally:
        for task in ring.tasks:
            task.cancel()
        outcomes = await asyncio.gather(*ring.tasks, return_exceptions=True)
        for transport in list(ring.network.transports.values()):
            await transport.aclose()
        for worker in workers:
            await worker.aclose()
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes


SHAPES = {
    "one": make_stages(1),
    "two": make_stages(2),
    "three": make_stages(3),
    "skip": make_stages(4, skip=True),
    "late-ids": make_stages(3, ids_at=(0, 2)),
}
