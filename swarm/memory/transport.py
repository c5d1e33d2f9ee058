"""The transport between peers of one process, with the frames, caps and handlers of real ones."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.swarm.errors import PeerUnreachable
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.streams.frames import DEFAULT_LIMITS, FrameLimits
from fusion.swarm.streams.handlers import Handlers
from fusion.swarm.streams.memory_stream import MemoryStream
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import Handler, PeerId, Traffic


class MemoryTransport:
    """Implements `fusion.swarm.transport.Transport` between the peers of one `MemoryNetwork`."""

    def __init__(
        self, network: MemoryNetwork, peer_id: PeerId, *, limits: FrameLimits = DEFAULT_LIMITS
    ) -> None:
        if peer_id in network.transports:
            raise ValueError(f"{peer_id} is on this network already")
        self.peer_id = peer_id
        self.limits = limits
        self.handlers = Handlers()
        self.counter = TrafficCounter()
        self._network = network
        network.transports[peer_id] = self

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.peer_id}/p2p/{self.peer_id}",)

    async def connect(self, address: str) -> PeerId:
        before, separator, peer = address.rpartition("/p2p/")
        if not (separator and before.startswith("/") and peer) or "/" in peer:
            raise ValueError(f"{address!r} is not a multiaddr that ends in /p2p/<peer id>")
        if peer not in self._network.transports or not self._network.reachable(self.peer_id, PeerId(peer)):
            raise PeerUnreachable(f"cannot reach {address}")
        return PeerId(peer)

    async def open(self, peer: PeerId, protocol: str, *, stripes: int = 1) -> MemoryStream:
        return self._network.link(self, peer, protocol)

    async def serve(self, protocol: str, handler: Handler) -> None:
        self.handlers.add(protocol, handler)

    def traffic(self) -> Mapping[PeerId, Traffic]:
        return self.counter.snapshot()

    async def aclose(self) -> None:
        self._network.transports.pop(self.peer_id, None)
        await self.handlers.aclose()

    async def __aenter__(self) -> MemoryTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
