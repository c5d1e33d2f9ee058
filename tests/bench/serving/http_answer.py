"""One streamed answer over a peer's HTTP API, with asyncio alone: hundreds of clients must cost less than the peers that they load."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

HEAD_BYTES = 64 << 10
_TOKEN = re.compile(r"token_id:([0-9]+)")


class Busy(Exception):
    """Status 429. `retry_seconds`: from the response; None if it has none."""

    def __init__(self, retry_seconds: float | None) -> None:
        super().__init__("busy")
        self.retry_seconds = retry_seconds


class Refused(Exception):
    """Any other status, an error in the stream, or a stream that ended early; one line."""


class HttpAnswer:
    """The ids of the answer's tokens, as they arrive. `abort` does what a client that is switched off does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def abort(self) -> None:
        self._writer.transport.abort()

    async def tokens(self) -> AsyncIterator[int]:
        """The next tokens. Raises Busy, Refused, OSError."""
        await self._head()
        async for line in self._lines():
            if line == b"data: [DONE]":
                return
            if not line.startswith(b"data: "):
                continue
            said = json.loads(line[6:])
            if "error" in said:
                raise Refused(str(said["error"]["message"]))
            for choice in said["choices"]:
                for token in (choice["logprobs"] or {}).get("tokens", ()):
                    found = _TOKEN.fullmatch(token)
                    if found is None:
                        raise Refused(f"a token that is none: {token!r:.40}")
                    yield int(found[1])
        raise Refused("the stream ended before its end")

    async def _head(self) -> None:
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            raise Refused("the connection ended before a status") from None
        first, *rest = head.split("\r\n")
        status = int(first.split()[1])
        headers = dict(line.lower().split(": ", 1) for line in rest if line)
        if status == 429:
            given = headers.get("retry-after", "")
            raise Busy(float(given) if given.isdigit() else None)
        if status != 200:
            body = await self._reader.read(HEAD_BYTES)
            raise Refused(f"{status}: {body[:200]!r}")

    async def _lines(self) -> AsyncIterator[bytes]:
        """The events of the chunked body; an event may span chunks."""
        rest = b""
        while True:
            try:
                size = int(await self._reader.readuntil(b"\r\n"), 16)
                data = await self._reader.readexactly(size + 2)
            except asyncio.IncompleteReadError:
                raise Refused("the connection ended within the stream") from None
            if not size:
                return
            *lines, rest = (rest + data[:-2]).split(b"\n")
            for line in lines:
                if line:
                    yield line


@asynccontextmanager
async def asking(
    url: str, model: str, prompt: Sequence[int], tokens: int, source: str, *, unread: bool = False
) -> AsyncIterator[HttpAnswer]:
    """Request a greedy answer from the address `source` of this machine, by which peers distinguish clients. `unread`: give the
    socket the smallest receive buffer. Raises OSError."""
    parts = urlsplit(url)
    body = json.dumps(
        {"model": model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "stream": True, "logprobs": 0}
    ).encode()  # fmt: skip
    head = (
        f"POST {parts.path}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port, limit=1024 if unread else HEAD_BYTES, local_addr=(source, 0)
    )
    try:
        writer.write(head.encode() + body)
        yield HttpAnswer(reader, writer)
    finally:
        writer.transport.abort()


async def read_metrics(url: str) -> dict[str, float]:
    """A peer's /metrics: a number for each name, summed over labels. Raises OSError, Refused."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET /metrics HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        head, _, text = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.transport.abort()
    if not head.startswith(b"HTTP/1.1 200"):
        raise Refused(f"/metrics: {head[:60]!r}")
    found: dict[str, float] = {}
    for line in text.decode().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found
