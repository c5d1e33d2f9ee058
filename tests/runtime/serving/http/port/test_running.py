"""Connections that are hung up on, and those that are not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from openai import DEFAULT_CONNECTION_LIMITS
from support.instant_loop import run

from fusion.runtime.serving.http.port import running
from fusion.runtime.serving.http.port.running import (
    IDLE_SECONDS,
    SILENT_SECONDS,
    UNREAD_SECONDS,
    _Connection,
    _server,
    _watch,
)

ASK = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


async def reads_all(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers once a request has come whole, with the size of its body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % size})


@asynccontextmanager
async def answering() -> AsyncIterator[int]:
    """The port of one."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = _server(reads_all)
    serving = asyncio.create_task(server.serve([listening]))
    try:
        async with asyncio.timeout(30):
            yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def opened(port: int, said: bytes = b"") -> Opened:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(said)
    return reader, writer


async def status(opened: Opened) -> int:
    """Of the next answer, which is read; 0 where the connection has ended."""
    head = (await opened[0].readline()).split()
    while head and (line := await opened[0].readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length"):
            length = int(line.split()[1])
    if not head:
        return 0
    await opened[0].readexactly(length)
    return int(head[1])


def test_no_connection_ends_while_a_client_may_use_it_again() -> None:
    kept = DEFAULT_CONNECTION_LIMITS.keepalive_expiry
    assert kept is not None and kept + 1 < IDLE_SECONDS < SILENT_SECONDS


@pytest.mark.parametrize("catches_up", [True, False])
def test_who_reads_a_byte_now_and_then_is_hung_up_on_and_who_catches_up_is_not(catches_up: bool) -> None:
    async def main() -> None:
        left, aborted = 1 << 20, asyncio.Event()

        def size() -> int:
            nonlocal left
            left -= 1
            return left

        connection = _Connection.__new__(_Connection)
        flow = SimpleNamespace(write_paused=True, resume_writing=lambda: None)
        transport = SimpleNamespace(get_write_buffer_size=size, abort=aborted.set)
        connection.flow, connection.transport, connection._read = flow, transport, 0  # type: ignore[assignment]
        server: Any = SimpleNamespace(server_state=SimpleNamespace(connections={connection}))
        watching = asyncio.create_task(_watch(server))
        for _ in range(4):
            await asyncio.sleep(UNREAD_SECONDS / 2)
            if catches_up:
                connection.resume_writing()
        assert aborted.is_set() is not catches_up
        watching.cancel()

    run(main())


def test_connections_without_a_request_give_way_to_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_CONNECTIONS", 3)

    async def main() -> None:
        async with answering() as port:
            body = await opened(port, POST)  # under way
            asked = await opened(port, ASK)
            assert await status(asked) == 200
            silent = await opened(port, ASK[:9])  # came last, and never asked anything
            first = await opened(port, ASK)
            assert await status(first) == 200 and await status(silent) == 0
            second = await opened(port, ASK)
            assert await status(second) == 200 and await status(asked) == 0
            body[1].write(b"3\r\nabc\r\n0\r\n\r\n")
            assert await status(body) == 200
            for _, writer in (body, asked, silent, first, second):
                writer.close()

    asyncio.run(main())


def test_where_all_have_requests_under_way_who_comes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_CONNECTIONS", 2)

    async def main() -> None:
        async with answering() as port:
            under_way = [await opened(port, POST) for _ in range(2)]
            refused = await opened(port, ASK)
            assert await status(refused) == 429
            for _, writer in (*under_way, refused):
                writer.close()

    asyncio.run(main())


@pytest.mark.parametrize(("parts", "said"), [(100, 200), (101, 413)])
def test_a_body_comes_in_so_many_parts(parts: int, said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "MAX_PARTS", 100)

    async def main() -> None:
        async with answering() as port:
            one = await opened(port, POST + b"1\r\n \r\n" * parts + b"0\r\n\r\n")
            assert await status(one) == said
            one[1].close()

    asyncio.run(main())
