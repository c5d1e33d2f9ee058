"""A process's place in the swarm's network: its streams, its node of the DHT, its blobs and its claims."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fusion.swarm.blobs.blobs import BlobConfig, Blobs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import Leases
from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PConfig, P2PTransport


@dataclass(frozen=True)
class Network:
    transport: P2PTransport
    directory: HivemindDirectory
    blobs: Blobs
    leases: Leases


@asynccontextmanager
async def open_network(
    identity: Identity,
    store: BlobStore,
    *,
    listen: tuple[str, ...] | None = None,
    dht: DhtConfig | None = None,
    blobs: BlobConfig | None = None,
) -> AsyncIterator[Network]:
    """Closed in the opposite order: claims, blobs, directory, and p2pd last. Raises TransportError (a taken port)."""
    config = P2PConfig(identity=identity) if listen is None else P2PConfig(identity=identity, listen=listen)
    async with (
        P2PTransport.start(config) as transport,
        await HivemindDirectory.start(transport.p2p, identity, dht) as directory,
        Blobs(store, transport, directory, blobs) as offered,
        Leases(identity.peer_id, directory) as leases,
    ):
        yield Network(transport, directory, offered, leases)
