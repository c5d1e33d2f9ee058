"""A workaround for libp2p's dial backoff, its refusal to dial an address that failed a moment ago: the same host under another address.

p2pd also dials lost peers by itself, so a peer that is back may be refused for 6 s and more though it answers. Any connection to
it ends the backoff, also one through a forwarding port of ours, which is then replaced by a direct one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fusion.swarm.cancelling import cancel_all

_PIECE_BYTES = 64 * 1024


@asynccontextmanager
async def forwarded_address(host: str, port: int) -> AsyncIterator[str]:
    """A loopback multiaddr whose connections are forwarded to `host` and `port` for the length of the block."""
    running: set[asyncio.Task[None]] = set()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pipe(reader, far_writer))
                both.create_task(_pipe(far_reader, writer))
        except (OSError, ExceptionGroup):
            pass  # the dialler sees the connection end
        finally:
            for each in writers:
                each.transport.abort()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of ours: asyncio reports one of its own as an error where it is cancelled.
        task = asyncio.create_task(forward(reader, writer), name="forwarded dial")
        running.add(task)
        task.add_done_callback(running.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await cancel_all(running)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    raise ConnectionResetError  # one direction over: both are
