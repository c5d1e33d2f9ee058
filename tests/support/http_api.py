"""A served model behind a real HTTP port, and clients for it."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient
from support.served import Peer, Swarm, captured, swarm_of

from fusion.runtime.job.context import Context
from fusion.runtime.job.model_files import CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.planes.torch_plane import TorchPlane
from fusion.runtime.serving.answers.gateway import Gateway
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.runtime.serving.graphs.stages import GraphStages
from fusion.runtime.serving.http.config import HttpConfig
from fusion.runtime.serving.http.port.server import HttpServer, open_http
from fusion.runtime.serving.stage_loader import StageLoader

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@asynccontextmanager
async def served_over_http(
    home: Path,
    *,
    config: HttpConfig | None = None,
    template: str | None = None,
    seconds: float = 60,
    **options: Any,
) -> AsyncIterator[tuple[Swarm, HttpServer]]:
    """A byte-level llama on peer 0, with the API on peer 1."""
    captured("llama", "kv")  # before the time limit begins; done once in a process
    async with swarm_of(2, home, seconds=seconds) as swarm:
        files = []
        if template is not None:
            put = swarm.peers[-1].context.blobs.put
            files = [
                (CHAT_TEMPLATE_FILE, await put(template.encode())),
                (SPECIAL_TOKENS_FILE, await put(json.dumps({"bos_token": "<s>"}).encode())),
            ]
        await swarm.serve("llama", 1, **{"byte_level": True, "files": tuple(files), **options})
        peer = swarm.peers[1]
        async with open_http(config or HttpConfig(), *behind(peer)) as http:
            yield swarm, http


def behind(peer: Peer) -> tuple[Context, Gateway, GraphGateway]:
    """The handlers of a peer's API."""
    gateway, graphs = peer.service.gateway, StageGraphs(peer.context)
    stages = GraphStages(
        peer.context, TorchPlane("cpu"), graphs, StageLoader(peer.context, TorchPlane(), graphs).fetch
    )
    return peer.context, gateway, GraphGateway(peer.context, stages, graphs, gateway.catalog)


async def go_away(
    swarm: Swarm, stream: AsyncStream[Any], count: int, asked: Coroutine[Any, Any, Any]
) -> None:
    """Check that all is freed when a client closes a stream of `count` answers, and when it leaves one that waits for the device."""
    places = swarm.peers[1].service.gateway._answers
    async for _ in stream:
        break
    assert len(places) == count
    await stream.close()
    await swarm.freed()
    go = threading.Event()
    blocked = asyncio.create_task(swarm.peers[0].context.compute.run(go.wait, 20))
    waiting = asyncio.create_task(asked)
    await until(lambda: bool(places))
    waiting.cancel()
    await until(lambda: not places)
    go.set()
    await blocked
    await swarm.freed()


async def until(happened: Callable[[], bool], seconds: float = 10) -> None:
    """Raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not happened():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def client_of(http: HttpServer, key: str = "none") -> AsyncIterator[AsyncOpenAI]:
    plain = DefaultAsyncHttpxClient(verify=_tls())
    async with AsyncOpenAI(
        base_url=http.url, api_key=key, max_retries=0, timeout=30.0, http_client=plain
    ) as client:
        yield client


@functools.cache
def _tls() -> ssl.SSLContext:
    """Nothing here is over TLS, and a client of its own for each test would read all authorities anew."""
    return ssl.create_default_context()


async def ask(
    http: HttpServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send one request, and return the status, headers and body of the response."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Host": f"localhost:{http.port}", "Connection": "close", "Content-Length": str(len(data))}
    if body is not None:
        sent["Content-Type"] = "application/json"
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name}: {value}" for name, value in sent.items() if value),
        "",
        "",
    ]
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    try:
        writer.write("\r\n".join(lines).encode("latin-1") + data)
        async with asyncio.timeout(30):
            status, *found = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            names = dict(line.lower().split(": ", 1) for line in found if line)
            length = names.get("content-length")
            answer = await (reader.read() if length is None else reader.readexactly(int(length)))
    finally:
        writer.close()
    if names.get("transfer-encoding") == "chunked":
        answer = _unchunked(answer)
    return int(status.split()[1]), names, answer


def _unchunked(data: bytes) -> bytes:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(data[:length])
        data = data[length + 2 :]
    return b"".join(parts)
