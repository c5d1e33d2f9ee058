"""uvicorn, as it runs in a loop that is not its own: no signals, no log, bounded connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

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
from fusion.runtime.serving.http.guard import MAX_HEAD_BYTES, Guard, head_too_long
from fusion.runtime.serving.http.metrics import Metrics, StageLoads
from fusion.runtime.serving.http.port.app import make_app
from fusion.runtime.serving.http.responses.api import Responses

MAX_CONNECTIONS = 256
MAX_REFUSED = 64  # over these, that are told to come back; further ones are hung up on
REFUSED_SECONDS = 1.0  # for them to read it
NO_HTTP = "what came is no request of HTTP/1.1"
LOOK_SECONDS = 1.0
SILENT_SECONDS = 10.0  # for a connection to send the head of a request
UNREAD_SECONDS = 30.0  # for a client to read a part of its answer, at most 256 KiB
# Between two requests on a connection. More than the 5 for which OpenAI's client and httpx use one again: what they send at that moment
# would meet a connection that ends.
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
    """Until cancelled; within STOP_SECONDS and a little everything has ended then."""
    metrics = Metrics(context.clock.monotonic)
    metrics.add(StageLoads(loads))
    api = Api(context, gateway, metrics)
    embeddings = Embeddings(api, gateway, graphs, context.peer_id)
    server = _Server(
        uvicorn.Config(
            make_app(api, Responses(api), embeddings, Guard(config, port), metrics),
            loop="none",
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # what is ours to tell, `api` tells
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=STOP_SECONDS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
    )
    serving = asyncio.create_task(server.serve([listening]))
    watching = asyncio.create_task(_watch(server))
    try:
        await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        await asyncio.shield(_stop(server, api, serving))
    watching.result()


async def _stop(server: _Server, api: Api, serving: asyncio.Task[None]) -> None:
    await api.aclose()
    server.should_exit = True
    await asyncio.wait([serving], timeout=STOP_SECONDS + 1)
    serving.cancel()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    await asyncio.gather(serving, return_exceptions=True)


async def _watch(server: _Server) -> None:
    """Hang up on who connects and asks nothing, and on who asks and does not read."""
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


class _Connection(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        over = len(self.connections) - MAX_CONNECTIONS
        self._refused = over > 0
        self._read = 0  # times that the client has caught up with its answer
        if over > MAX_REFUSED:
            transport.abort()
        elif self._refused:
            said = f"this peer takes {MAX_CONNECTIONS} connections at once, and has them: ask again later, or ask another peer"
            transport.write(_refusal(Busy(said)))
            self.loop.call_later(REFUSED_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        try:
            super().data_received(data)
        except h11.LocalProtocolError:
            # The rest of a body is no HTTP, and its request is answered: no 400 can follow
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or too long a head. As uvicorn does it, but in OpenAI's form."""
        unread, _ = self.conn.trailing_data
        reads_head = self.cycle is None or self.cycle.response_complete
        too_long = reads_head and len(unread) > MAX_HEAD_BYTES
        error = head_too_long() if too_long else ApiError(400, NO_HTTP)
        body, headers = _written(error)
        answer = h11.Response(status_code=error.status, headers=[*headers.items()], reason=_reason(error))
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read += 1

    def waits_for(self) -> tuple[object, float]:
        """What it waits for, and for how many seconds it may."""
        if self.flow.write_paused:
            return ("read", self._read), UNREAD_SECONDS
        if self.cycle is None or self.cycle.response_complete:
            return ("head", self.cycle), SILENT_SECONDS
        return "answer", float("inf")


def _written(error: ApiError) -> tuple[bytes, dict[str, str]]:
    """Body and headers of what ends a connection."""
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
        """They are the peer's."""
        yield
