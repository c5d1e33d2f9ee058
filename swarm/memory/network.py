"""The network between peers of one process: streams between their transports, replicas of their directory.

Everything goes through the same frame encoding, caps and signed records as between real peers. A `MemoryNetwork`
fails as real networks do: `partition` and `heal` cut and restore links, `kill` removes a peer without a goodbye.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from fusion.swarm.directory.sealing import unseal
from fusion.swarm.errors import PeerUnreachable, RecordError, UnknownProtocol
from fusion.swarm.streams.frames import FrameLimits
from fusion.swarm.streams.handlers import Handlers
from fusion.swarm.streams.memory_stream import MemoryStream, stream_pair
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)


# What one peer holds of the directory: key -> subkey -> (the expiry its author signed, the sealed record).
Replica = dict[str, dict[str, tuple[float, bytes]]]


class Endpoint(Protocol):
    """What the network needs of a transport: `fusion.swarm.memory.transport.MemoryTransport`."""

    peer_id: PeerId
    limits: FrameLimits
    handlers: Handlers
    counter: TrafficCounter


class MemoryNetwork:
    """The network between the memory transports and directories of one test."""

    def __init__(self) -> None:
        self.transports: dict[PeerId, Endpoint] = {}
        self.replicas: dict[PeerId, Replica] = {}  # of the directory, one per peer
        self._cut: set[frozenset[PeerId]] = set()
        self._dead: set[PeerId] = set()
        self._streams: list[tuple[MemoryStream, PeerId, PeerId]] = []

    def reachable(self, one: PeerId, two: PeerId) -> bool:
        return frozenset((one, two)) not in self._cut and not self._dead & {one, two}

    def partition(self, group: Iterable[PeerId], others: Iterable[PeerId]) -> None:
        """Cut every link between the two groups: streams across it break, no new ones open, and records published
        on one side are not seen on the other."""
        others = list(others)
        self._cut |= {frozenset((one, two)) for one in group for two in others if one != two}
        self._drop_streams()

    def heal(self) -> None:
        """Mend every link that `partition` cut. Broken streams stay broken."""
        self._cut.clear()

    def kill(self, peer: PeerId) -> None:
        """The peer vanishes: its streams break at once, its handlers stop and nobody reaches it again."""
        self._dead.add(peer)
        self._drop_streams()
        transport = self.transports.pop(peer, None)
        if transport is not None:
            transport.handlers.cancel()

    def link(self, opener: Endpoint, peer: PeerId, protocol: str) -> MemoryStream:
        """A stream from `opener` to `peer`, whose handler starts. Raises PeerUnreachable."""
        target = self.transports.get(peer)
        if target is None or not self.reachable(opener.peer_id, peer):
            raise PeerUnreachable(f"cannot reach {peer}")
        if protocol not in target.handlers:
            raise UnknownProtocol(f"{peer} does not speak {protocol}")
        near, far = stream_pair(
            opener.peer_id, peer, protocol, opener.limits, (opener.counter, target.counter)
        )
        self._streams = [entry for entry in self._streams if not entry[0].ended]
        self._streams.append((near, opener.peer_id, peer))
        target.handlers.accept(far)
        return near

    def store(self, publisher: PeerId, key: str, subkey: str, data: bytes, now: float) -> None:
        """Offer sealed bytes to every replica that `publisher` reaches. Each checks them as a storing node of the DHT: an
        invalid record, or one older than the stored one, is dropped."""
        try:
            expires_at = unseal(data, key, subkey, now).expires_at
        except RecordError as error:
            logger.debug("dropped a record at %s: %s", key, error)
            return
        for peer, replica in self.replicas.items():
            slots = replica.setdefault(key, {})
            held_until, _ = slots.get(subkey, (0.0, b""))
            if (peer == publisher or self.reachable(publisher, peer)) and held_until <= expires_at:
                slots[subkey] = (expires_at, data)

    def replica(self, peer: PeerId) -> Replica:
        """The peer's replica; a new one starts with the records of the peers that it reaches."""
        if peer not in self.replicas:
            merged: Replica = {}
            for other, replica in self.replicas.items():
                if self.reachable(peer, other):
                    for key, slots in replica.items():
                        merged.setdefault(key, {}).update(slots)
            self.replicas[peer] = merged
        return self.replicas[peer]

    def _drop_streams(self) -> None:
        for stream, one, two in self._streams:
            if not self.reachable(one, two):
                stream.lose()
