"""Peers that host one stage each over the memory network, with nothing that computes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from fusion.runtime.job.context import Context
from fusion.runtime.job.fields import build, plain
from fusion.runtime.job.protocol import STAGE
from fusion.runtime.training.step.messages import Hello
from fusion.runtime.training.streams.partner import Held
from fusion.runtime.training.streams.partners import Partners
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import FrameError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import Frame, PeerId, Stream

JOB = JobId("a" * 64)


class Counted(MemoryDirectory):
    """A directory that counts reads of claims."""

    reads = 0

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        self.reads += 1
        return await super().claims(job, stage)


@dataclass
class Successors:
    """Answers reports of owners that are gone: with a claim of `successor`, or not at all."""

    asked: list[tuple[int, PeerId, int]] = field(default_factory=list)
    successor: Callable[[int, int], Any] | None = None
    cancelled: int = 0

    async def suspect(self, job: JobId, stage: int, peer: PeerId, term: int) -> ClaimRecord | None:
        self.asked.append((stage, peer, term))
        try:
            return None if self.successor is None else cast("ClaimRecord", await self.successor(stage, term))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@dataclass
class Node:
    """A peer that hosts at most one stage."""

    context: Context
    directory: Counted
    successors: Successors
    neighbours: Partners | None = None
    task: asyncio.Task[None] | None = None
    linked: list[tuple[float, bool]] = field(default_factory=list)
    got: list[tuple[int, Frame]] = field(default_factory=list)
    refuse: str = ""  # a local mistake in whatever is delivered
    ghost: bool = False  # it welcomes everybody, and says no hello of its own
    frozen: asyncio.Event = field(default_factory=asyncio.Event)  # clear: it answers nobody
    greeted: list[PeerId] = field(default_factory=list)  # by whom

    @property
    def peer(self) -> PeerId:
        return self.context.peer_id

    @property
    def now_linked(self) -> bool:
        return bool(self.linked) and self.linked[-1][1]

    async def host(
        self, stage: int, partners: Sequence[int], over: int = 0, memory: Sequence[int] = ()
    ) -> int:
        claim = await self.context.leases.claim(JOB, stage, 0.5, over=over, confirm=not over)
        assert claim is not None
        self.neighbours = Partners(
            self.context, Held(job=JOB, stage=stage, term=claim.term, memory_bytes=tuple(memory)), partners,
            self._deliver, lambda *_: None, self._changed, largest_bytes=1 << 20,
        )  # fmt: skip
        self.task = asyncio.create_task(self.neighbours.run())
        return claim.term

    def _deliver(self, source: int, frame: Frame) -> None:
        if self.refuse:
            raise FrameError(self.refuse)
        self.got.append((source, frame))

    def _changed(self, linked: bool) -> None:
        self.linked.append((asyncio.get_running_loop().time(), linked))

    async def serve(self, stream: Stream) -> None:
        frame = await stream.receive()
        hello = build(Hello, frame.header, "hello")
        self.greeted.append(stream.remote)
        await self.frozen.wait()
        if self.ghost:
            await stream.send("welcome", {"term": hello.target_term})
            await stream.receive()
        if self.neighbours is None or self.neighbours.stage != hello.target:
            await stream.send("later", {"message": "not here"})
            return
        await self.neighbours.accept(stream, hello)

    async def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        self.neighbours = self.task = None


@dataclass
class Swarm:
    network: MemoryNetwork
    clock: ManualClock
    nodes: list[Node] = field(default_factory=list)

    async def kill(self, node: Node) -> None:
        self.network.kill(node.peer)
        await node.end()
        self.nodes.remove(node)

    def cut(self, one: Node, two: Node) -> None:
        """Break every stream between the two peers; new ones can be opened at once."""
        self.network.partition([one.peer], [two.peer])
        self.network.heal()


@asynccontextmanager
async def swarm(count: int) -> AsyncIterator[Swarm]:
    made = Swarm(MemoryNetwork(), ManualClock())
    for _ in range(count):
        identity = Identity.generate()
        transport = MemoryTransport(made.network, identity.peer_id)
        directory = Counted(made.network, identity, made.clock)
        leases = Leases(identity.peer_id, directory, LeaseConfig(confirm_seconds=0.0))
        successors = Successors()
        context = Context(
            peer_id=identity.peer_id, transport=transport, directory=directory, leases=leases, worker=None,
            blobs=cast("Any", None), takeover=successors,
        )  # fmt: skip
        node = Node(context, directory, successors)
        node.frozen.set()
        await transport.serve(STAGE.name, node.serve)
        made.nodes.append(node)
    try:
        yield made
    finally:
        for node in made.nodes:
            await node.end()
            await cast("MemoryTransport", node.context.transport).aclose()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def now() -> float:
    return asyncio.get_running_loop().time()


async def linked(*nodes: Node, for_seconds: float = 0.0) -> None:
    await until(lambda: all(node.now_linked for node in nodes))
    await asyncio.sleep(for_seconds)


async def say_hello(node: Node, to: Node, **changes: Any) -> str:
    """The reply of `to`, which hosts stage 0, to a `hello` of `node` for stage 1."""
    sealed = node.context.leases.sealed(JOB, 1) or b""
    hello = {**plain(Hello(job=JOB, source=1, target=0, term=1, target_term=1, claim=sealed)), **changes}
    stream = await node.context.transport.open(to.peer, STAGE.name)
    await stream.send("hello", hello)
    reply = await stream.receive()
    stream.abort()
    return f"{reply.kind}: {reply.header.get('message', reply.header.get('term'))}"


@asynccontextmanager
async def linked_pair(*, for_seconds: float = 0.0) -> AsyncIterator[tuple[Swarm, Node, Node]]:
    """The owners of stages 0 and 1, once they have been linked for `for_seconds`."""
    async with swarm(2) as made:
        one, two = made.nodes
        await one.host(0, [1])
        await two.host(1, [0])
        await linked(one, two, for_seconds=for_seconds)
        yield made, one, two
