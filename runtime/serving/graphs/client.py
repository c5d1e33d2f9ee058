"""Ask any peer for what a model makes of named arrays, and another one where it vanishes, falls silent or has no room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.protocol import RUN
from fusion.runtime.serving.graphs.arrays import Array, described, read_arrays
from fusion.runtime.serving.requests.client import GATEWAY_TRIES, Another, GrantsFor
from fusion.runtime.serving.requests.header_fields import number
from fusion.runtime.serving.requests.silence import listening
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

GONE = (PeerUnreachable, UnknownProtocol, StreamBroken, StreamClosed)  # what another peer may do better


@dataclass(frozen=True)
class Made:
    arrays: tuple[Array, ...]  # by the names that the model gives them
    route: tuple[str, ...]  # the peers that they came through
    seconds: float


class Asking:
    """Runs of models, one after the other, through the peer that was found last to answer. `another`: whom to ask instead;
    `grants`: what we can show of why we may prompt the model of a job that is not for everybody."""

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
        self._shown: tuple[bytes, ...] = ()

    async def run(self, model: str, arrays: Sequence[Array]) -> Made:
        """As `run_model`. PeerUnreachable, UnknownProtocol, StreamBroken or StreamClosed where nobody else is left to ask."""
        gone: frozenset[PeerId] = frozenset()
        while True:
            try:
                return await run_model(self._transport, self._peer, model, arrays, self._shown)
            except NotAdmitted as error:
                shown = () if self._grants is None or self._shown else await self._grants(JobId(error.job))
                if not shown:
                    raise
                self._shown = shown
            except GONE:
                gone |= {self._peer}
                other = None
                if self._another is not None and len(gone) < GATEWAY_TRIES:
                    other = await self._another(gone)
                if other is None:
                    raise
                self._peer = other


async def run_model(
    transport: Transport, peer: PeerId, model: str, arrays: Sequence[Array], grants: Sequence[bytes] = ()
) -> Made:
    """`peer` need not serve the model itself. Raises RemoteError with its one line, SwarmError where it vanished, is silent or
    has no room for so large a question."""
    header = {"model": model, "grants": list(grants), **described(arrays)}
    answer = await ask(transport, peer, "run", header, arrays)
    if answer.kind == "busy":
        raise StreamBroken(f"{friendly_name(peer)} takes in as many large questions as it can")
    if answer.kind != "done":
        raise FrameError(f"gateways send done, not {answer.kind!r:.40}")
    route = answer.header.get("route")
    return Made(
        arrays=tuple(read_arrays(answer.header, answer.payload)),
        route=tuple(str(each)[:128] for each in route) if isinstance(route, list) else (),
        seconds=number(answer.header, "seconds", 0.0),
    )


async def ask(
    transport: Transport, peer: PeerId, kind: str, header: Mapping[str, Any], arrays: Sequence[Array]
) -> Frame:
    """The answer to one frame, which may take its time. Raises RemoteError with the peer's one line, SwarmError where it vanished,
    or neither answers nor says that it is there."""
    stream = await transport.open(peer, RUN.name)
    try:
        async with listening(transport, peer, stream):
            await stream.send(kind, header, [a.data for a in arrays])
            return checked(await stream.receive())
    finally:
        stream.abort()
