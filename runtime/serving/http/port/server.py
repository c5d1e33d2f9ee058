"""The HTTP server of a peer, in the peer's own event loop. The port is open from the start; FastAPI and the handlers are loaded on the
first connection, so that a peer without HTTP clients pays nothing for them."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import StageLoad
from fusion.runtime.serving.answers.gateway import Gateway
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.runtime.serving.http.config import HttpConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpServer:
    config: HttpConfig
    port: int  # that it listens on

    @property
    def url(self) -> str:
        """The URL of the API, as clients use it."""
        return self.config.url(self.port)


@asynccontextmanager
async def open_http(
    config: HttpConfig,
    context: Context,
    gateway: Gateway,
    graphs: GraphGateway,
    loads: Callable[[], Iterable[StageLoad]] = tuple,
) -> AsyncIterator[HttpServer]:
    """Serve until the block ends; then every response ends too. OSError, in one line, where the port is not available. `loads`:
    of the stages that run here, for `/metrics`."""
    listening = config.listen()
    port = int(listening.getsockname()[1])
    serving = asyncio.create_task(
        _serve(listening, port, config, context, gateway, graphs, loads), name="http"
    )
    serving.add_done_callback(_log_end)
    try:
        yield HttpServer(config, port)
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        listening.close()  # if the task had not started


async def _serve(
    listening: socket.socket,
    port: int,
    config: HttpConfig,
    context: Context,
    gateway: Gateway,
    graphs: GraphGateway,
    loads: Callable[[], Iterable[StageLoad]],
) -> None:
    with closing(listening):  # else clients that connect after a failure here would wait for ever
        await _readable(listening)
        await asyncio.to_thread(_load)
        from fusion.runtime.serving.http.port.running import run

        await run(listening, port, config, context, gateway, graphs, loads)


async def _readable(listening: socket.socket) -> None:
    """Wait for the first connection."""
    loop, connected = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listening, connected.set)
    try:
        await connected.wait()
    finally:
        loop.remove_reader(listening)


def _load() -> None:
    import fusion.runtime.serving.http.port.running  # noqa: F401


def _log_end(serving: asyncio.Task[None]) -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        log.error("the HTTP API has ended: %r", error)
