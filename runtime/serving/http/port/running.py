"""uvicorn inside the peer's own event loop: no signal handlers, no log, bounded connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fusion.runtime.job.context import Context
from fusion.runtime.job.progress import StageLoad
from fusion.runtime.serving.answers.gateway import Gateway
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.runtime.serving.http.api import Api
from fusion.runtime.serving.http.config import HttpConfig
from fusion.runtime.serving.http.embedding import Embeddings
from fusion.runtime.serving.http.errors import ApiError, Busy
from fusion.runtime.serving.http.guard import MAX_HEAD_BYTES, Guard, head_too_long, tenant_of
from fusion.runtime.serving.http.metrics import Metrics, StageLoads
from fusion.runtime.serving.http.port.app import make_app
from fusion.runtime.serving.http.responses.api import Responses

MAX_CONNECTIONS = 256
MAX_REFUSED = 64  # connections over that limit that get a 429; further ones are aborted
REFUSED_SECONDS = 1.0  # for them to read the 429
# Parts of a body, at most: each costs the event loop as much as a hundred bytes of a large one, and a chunk may be one byte.
MAX_PARTS = 1 << 14
NO_HTTP = "what came is no request of HTTP/1.1"
LOOK_SECONDS = 1.0
SILENT_SECONDS = 10.0  # for a connection to send the head of a request
UNREAD_SECONDS = 30.0  # for a client to read a part of its response, at most 256 KiB
# Keep-alive. More than the 5 s for which OpenAI's client and httpx reuse a connection: a request that they send at that moment would
# meet a connection that is being closed.
IDLE_SECONDS = 8
STOP_SECONDS = 1


async def run(
    listening: socket.socket,
    port: int,
    config: HttpConfig,
    context: Context,
    gateway: Gateway,
    graphs: GraphGateway,
    loads: Callable[[], Iterable[StageLoad]],
) -> None:
    """Serve until cancelled; then everything ends within STOP_SECONDS and a little."""
    metrics = Metrics(context.clock.monotonic)
    metrics.add(StageLoads(loads))
    api = Api(context, gateway, metrics)
    embeddings = Embeddings(api, gateway, graphs, context.peer_id)
    server = _server(make_app(api, Responses(api), embeddings, Guard(config, port), metrics))
    serving = asyncio.create_task(server.serve([listening]))
    watching = asyncio.create_task(_watch(server))
    try:
        await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        await asyncio.shield(_stop(server, api, serving))
    watching.result()


def _server(app: Any) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            loop="none",
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # `api` logs what is ours
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
    )


async def _stop(server: _Server, api: Api, serving: asyncio.Task[None]) -> None:
    await api.aclose()
    server.should_exit = True
    await asyncio.wait([serving], timeout=STOP_SECONDS + 1)
    serving.cancel()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.gather(serving, return_exceptions=True)


async def _watch(server: _Server) -> None:
    """Abort connections that send no request, and those that do not read the response."""
    now = asyncio.get_running_loop().time
    seen: dict[object, tuple[object, float]] = {}
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        connections = [each for each in server.server_state.connections if isinstance(each, _Connection)]
        seen = {each: seen[each] for each in connections if each in seen}
        for connection in connections:
            state, patience = connection.waits_for()
            known, since = seen.get(connection, (None, 0.0))
            if known != state:
                seen[connection] = state, now()
            elif now() - since > patience:
                connection.transport.abort()


class _Parser(h11.Connection):
    """h11's connection, which refuses bodies of more than MAX_PARTS parts."""

    parts = 0  # of the body that is being read

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.parts = 0
        elif isinstance(event, h11.Data):
            self.parts += 1
            if self.parts > MAX_PARTS:
                raise h11.RemoteProtocolError("too many parts")
        return event


class _Connection(H11Protocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn: _Parser = _Parser(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._made_at = self.loop.time()
        over = len(self.connections) - MAX_CONNECTIONS
        if over > 0 and (other := self._least_missed()) is not None:
            other.transport.abort()
            self.connections.discard(other)  # others may connect before it has ended
            over -= 1
        self._refused = over > 0
        self._read = 0  # how often the client has caught up with its response
        if over > MAX_REFUSED:
            transport.abort()
        elif self._refused:
            message = f"this peer takes {MAX_CONNECTIONS} connections at once, and has them: ask again later, or ask another peer"
            transport.write(_refusal(Busy(message)))
            self.loop.call_later(REFUSED_SECONDS, transport.abort)

    def _least_missed(self) -> _Connection | None:
        """The idle connection to close for a new one: of the address with most of them, first one that never sent a request, last one
        that has yet to read its response."""
        others = [each for each in self.connections if isinstance(each, _Connection) and each is not self]
        idle = [each for each in others if each.is_idle]
        of = Counter(each.tenant for each in idle)

        def missed(each: _Connection) -> tuple[int, bool, bool, float]:
            unread = each.transport.get_write_buffer_size() > 0
            return -of[each.tenant], unread, each.cycle is not None, each._made_at

        return min(idle, key=missed, default=None)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being handled."""
        return not self._refused and (self.cycle is None or self.cycle.response_complete)

    @property
    def tenant(self) -> str:
        """The tenant of its address."""
        return tenant_of(self.client[0] if self.client else "")

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        try:
            super().data_received(data)
        except h11.LocalProtocolError:
            # The rest of a body whose request has been answered already: no 400 can be sent
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Respond to bytes that are not HTTP, or to too long a head, as uvicorn does, but in OpenAI's form."""
        unread, _ = self.conn.trailing_data
        reads_head = self.cycle is None or self.cycle.response_complete
        too_long = reads_head and len(unread) > MAX_HEAD_BYTES
        error = head_too_long() if too_long else ApiError(400, NO_HTTP)
        if self.conn.parts > MAX_PARTS and not reads_head:
            error = ApiError(413, f"a request comes in at most {MAX_PARTS} parts", code="request_too_large")
        body, headers = _written(error)
        answer = h11.Response(status_code=error.status, headers=[*headers.items()], reason=_reason(error))
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read += 1

    def waits_for(self) -> tuple[object, float]:
        """What the connection waits for, and its timeout in seconds."""
        if self.flow.write_paused:
            return ("read", self._read), UNREAD_SECONDS
        if self.is_idle:
            return ("head", self.cycle), SILENT_SECONDS
        return "answer", float("inf")


def _written(error: ApiError) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an error response that ends the connection."""
    body = json.dumps(error.body).encode()
    return body, {
        **error.headers, "Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close",
    }  # fmt: skip


def _reason(error: ApiError) -> str:
    return HTTPStatus(error.status).phrase


def _refusal(error: Busy) -> bytes:
    body, headers = _written(error)
    lines = (
        f"HTTP/1.1 {error.status} {_reason(error)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    )
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """The peer handles them."""
        yield
