from __future__ import annotations

import asyncio
from contextlib import suppress

from fusion.swarm.streams.dial_workaround import forwarded_address
from fusion.swarm.streams.dialer import tcp_target


def test_bytes_go_both_ways_and_the_end_of_the_block_ends_it() -> None:
    errors: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1000):
                writer.write(data)
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(10):
            async with forwarded_address("127.0.0.1", port) as address:
                target = tcp_target(address)
                assert target is not None and target[1] != port
                reader, writer = await asyncio.open_connection(*target)
                writer.write(b"x" * 200_000)
                assert await reader.readexactly(200_000) == b"x" * 200_000
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()
        server.close()
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert errors == []


def test_a_host_that_is_not_there_ends_the_connection() -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        async with asyncio.timeout(10), forwarded_address("127.0.0.1", port) as address:
            target = tcp_target(address)
            assert target is not None
            reader, writer = await asyncio.open_connection(*target)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()

    asyncio.run(scenario())
