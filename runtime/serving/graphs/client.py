"""Run a model on named arrays through any peer, with failover to another where it vanishes, is silent or has no capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.protocol import RUN
from fusion.runtime.serving.graphs.arrays import Array, described, read_arrays
from fusion.runtime.serving.requests.client import GATEWAY_TRIES, Another, GrantsFor
from fusion.runtime.serving.requests.header_fields import number
from fusion.runtime.serving.requests.silence import watching_liveness
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import (
    FrameError,
    NotAdmitted,
    PeerUnreachable,
    StreamBroken,
    StreamClosed,
    UnknownProtocol,
)
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import Frame, PeerId, Transport, checked

GONE = (
    PeerUnreachable,
    UnknownProtocol,
    StreamBroken,
    StreamClosed,
)  # errors after which to try another peer


@dataclass(frozen=True)
class RunResult:
    arrays: tuple[Array, ...]  # by the model's names
    route: tuple[str, ...]  # the peers of its stages
    seconds: float


class ModelRuns:
    """Runs models, one request after the other, through the peer that replied last. `another` finds a gateway to fail over to; `grants`
    fetches the grants with which we may prompt a job that is not open to all."""

    def __init__(
        self,
        transport: Transport,
        peer: PeerId,
        another: Another | None = None,
        grants: GrantsFor | None = None,
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._another = another
        self._grants = grants
        self._presented_grants: tuple[bytes, ...] = ()

    async def run(self, model: str, arrays: Sequence[Array]) -> RunResult:
        """As `run_model`. PeerUnreachable, UnknownProtocol, StreamBroken or StreamClosed where no other gateway is left."""
        excluded: frozenset[PeerId] = frozenset()
        while True:
            try:
                return await run_model(self._transport, self._peer, model, arrays, self._presented_grants)
            except NotAdmitted as error:
                shown = (
                    ()
                    if self._grants is None or self._presented_grants
                    else await self._grants(JobId(error.job))
                )
                if not shown:
                    raise
                self._presented_grants = shown
            except GONE:
                excluded |= {self._peer}
                other = None
                if self._another is not None and len(excluded) < GATEWAY_TRIES:
                    other = await self._another(excluded)
                if other is None:
                    raise
                self._peer = other


async def run_model(
    transport: Transport, peer: PeerId, model: str, arrays: Sequence[Array], grants: Sequence[bytes] = ()
) -> RunResult:
    """Run a model through one gateway, which need not serve it itself. Raises RemoteError with its one line, SwarmError where it vanished,
    is silent or has no capacity for so large a request."""
    header = {"model": model, "grants": list(grants), **described(arrays)}
    reply = await request_reply(transport, peer, "run", header, arrays)
    if reply.kind == "busy":
        raise StreamBroken(f"{friendly_name(peer)} takes in as many large questions as it can")
    if reply.kind != "done":
        raise FrameError(f"gateways send done, not {reply.kind!r:.40}")
    route = reply.header.get("route")
    return RunResult(
        arrays=tuple(read_arrays(reply.header, reply.payload)),
        route=tuple(str(each)[:128] for each in route) if isinstance(route, list) else (),
        seconds=number(reply.header, "seconds", 0.0),
    )


async def request_reply(
    transport: Transport, peer: PeerId, kind: str, header: Mapping[str, Any], arrays: Sequence[Array]
) -> Frame:
    """The reply to one frame, without a time limit while the peer is alive. Raises RemoteError with the peer's one line, SwarmError where
    it vanished, or answers neither the request nor pings."""
    stream = await transport.open(peer, RUN.name)
    try:
        async with watching_liveness(transport, peer, stream):
            await stream.send(kind, header, [a.data for a in arrays])
            return checked(await stream.receive())
    finally:
        stream.abort()
