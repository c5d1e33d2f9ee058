"""Two transports over real p2pd daemons on loopback."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.transport import Handler, Stream

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@asynccontextmanager
async def two(
    directory: Path, protocol: str, handler: Handler, **settings: Any
) -> AsyncIterator[tuple[P2PTransport, P2PTransport]]:
    """Two transports in this process, the first connected to the second, which serves the protocol. The directory's path must
    be short enough for UNIX sockets; both get `settings`."""
    configs = [
        P2PConfig(identity=Identity.generate(), listen=LOOPBACK, runtime_dir=directory, **settings)
        for _ in range(2)
    ]
    async with P2PTransport.start(configs[0]) as one, P2PTransport.start(configs[1]) as other:
        await other.serve(protocol, handler)
        assert await one.connect(other.addresses[0]) == other.peer_id
        yield one, other


@contextmanager
def opened() -> Iterator[Ends]:
    """Two peers, the first connected to the second, for tests that end neither."""

    async def nothing(stream: Stream) -> None:
        raise AssertionError(f"nobody speaks {stream.protocol}")

    with (
        tempfile.TemporaryDirectory(prefix="p2p-") as path,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        stack = AsyncExitStack()
        yield Ends(runner, *runner.run(stack.enter_async_context(two(Path(path), "/fusion/none/1", nothing))))
        runner.run(stack.aclose())


@dataclass
class Ends:
    """Two peers and their loop, shared by the tests of a module, since a p2pd takes most of a second of a core to start."""

    runner: asyncio.Runner
    one: P2PTransport
    other: P2PTransport
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def over(self, handler: Handler, work: Callable[[Stream], Awaitable[None]], count: int = 4) -> None:
        """Run `work` on a stream of so many lanes to the other peer, which handles it with `handler`."""

        async def main(protocol: str) -> None:
            stream = await self.one.open(self.other.peer_id, protocol, stripes=count)
            assert stream.protocol == protocol
            await work(stream)

        self.with_handler(handler, main)

    def with_handler(self, handler: Handler, main: Callable[[str], Awaitable[None]]) -> None:
        """Run `main` with the name of a protocol that the other peer handles with `handler`."""

        async def run() -> None:
            async with asyncio.timeout(60):
                protocol = f"/fusion/test/{next(self.numbers)}"
                await self.other.serve(protocol, handler)
                await main(protocol)

        self.runner.run(run())
