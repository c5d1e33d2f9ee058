"""A process's place in the swarm's network: its streams, its node of the DHT, its blobs and its claims."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fusion.runtime.job.protocol import ANSWER_BYTES, IDLE_SECONDS
from fusion.runtime.peer.keys import access_of, law_here
from fusion.swarm.blobs.blobs import Blobs
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import Leases
from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.identity import Identity, Signer
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.swarm_key import Authorizer

FILES = 8192  # streams are open files, and the usual limit of 1024 (256 on a Mac) is soon used up


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
    swarm_key: Identity | None = None,
    home: Path | None = None,
    keys: Sequence[Signer] = (),
) -> AsyncIterator[Network]:
    """Open the network of a process; it is closed in the opposite order: claims, blobs, directory, and p2pd last. With the key of a closed
    swarm, streams are opened to and accepted from its members only. `home`: the folder of invites; `keys`: those of the user, besides
    `identity`. Raises TransportError (a taken port)."""
    authorizer = None if swarm_key is None else Authorizer(swarm_key, identity.peer_id)
    config = P2PConfig(
        identity=identity, authorizer=authorizer, idle_seconds=IDLE_SECONDS, answer_bytes=ANSWER_BYTES
    )
    if listen is not None:
        config = replace(config, listen=listen)
    async with (
        P2PTransport.start(config) as transport,
        await HivemindDirectory.start(transport.p2p, identity, dht) as directory,
        Blobs(
            store,
            transport,
            directory,
            blobs,
            access=(access := access_of(identity.peer_id, directory, home, (identity, *keys))),
        ) as offered,
        Leases(identity.peer_id, directory, access=access) as leases,
    ):
        access.look_up = partial(law_here, store)
        yield Network(transport, directory, offered, leases)


def allow_more_files() -> None:
    """Raise this process's limit of open files as far as it may, up to FILES; p2pd, started afterwards, inherits it."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
