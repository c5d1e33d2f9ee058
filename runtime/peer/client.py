"""Using the swarm without lending anything: through the peer that runs with this home where there is one
(`open_attached`), else by joining it for as long as the command runs (`open_client`). Neither loads torch of its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fusion.runtime.job.context import Context
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.peer.keys import access_of, keys_of
from fusion.runtime.peer.peer_file import running_peer
from fusion.swarm.blobs.blobs import BlobConfig, Blobs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import Leases
from fusion.swarm.control.client import ControlDirectory, ControlTransport, Elsewhere
from fusion.swarm.errors import ClosedSwarm, PeerUnreachable
from fusion.swarm.identity import Identity
from fusion.swarm.swarm_key import NO_MEMBER, find_key

CACHED_PEERS_FILE = "peers.txt"  # in a home: whom the peer has met
BLOB_QUOTA_BYTES = 50 << 30
NO_WAY = "no peer to join through; name one with --peer or --bootstrap, or run: fusion-peer start"


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    home: Path
    bootstrap: tuple[str, ...] = ()
    peer: str | None = (
        None  # the only peer to join through; default: the one that runs with this home, and bootstrap
    )
    swarm_key: Path | None = None  # default: that in the home, where there is one
    join_seconds: float = 15.0


@asynccontextmanager
async def open_attached(home: Path, elsewhere: Elsewhere | None = None) -> AsyncIterator[Context]:
    """Use the swarm through the peer that runs with this home; blobs that are fetched are not offered to others. Where
    that peer ends meanwhile, `elsewhere` opens another way. Raises PeerUnreachable at once if no such peer runs."""
    here = running_peer(home)
    if here is None or not here.control:
        raise PeerUnreachable("no peer runs with this home")
    transport = await ControlTransport.attach(Path(here.control), elsewhere)
    directory = ControlDirectory(transport)
    blobs: Blobs | None = None
    try:
        async with own_store(home / "clients") as store:
            access = access_of(transport.through, directory, home, keys_of(home))
            blobs = Blobs(store, transport, directory, BlobConfig(offer=False), access=access)
            yield Context(
                peer_id=transport.peer_id,
                transport=transport,
                directory=directory,
                blobs=blobs,
                leases=Leases(transport.peer_id, directory, access=access),
                worker=None,
                memory=MemoryBudget(0),
                home=home,
            )
    finally:
        if blobs is not None:
            await blobs.aclose()
        await transport.aclose()


@asynccontextmanager
async def open_client(config: ClientConfig) -> AsyncIterator[Context]:
    """Join the swarm without lending anything: launch, ask, watch. The identity lasts as long as the block.

    Raises PeerUnreachable, in one line, if no peer of the swarm answers within `join_seconds`; ClosedSwarm at once if
    those that do are of another swarm, or of a closed one whose key we have not; SwarmKeyError.
    """
    from fusion.runtime.peer.network import open_network
    from fusion.swarm.dht.directory import DhtConfig
    from fusion.swarm.directory.membership import Membership, MembershipConfig

    identity, key = Identity.generate(), find_key(config.home, config.swarm_key)
    here = running_peer(config.home)
    ways = (config.peer,) if config.peer else (*(here.addresses if here else ()), *config.bootstrap)
    if not ways:
        raise PeerUnreachable(NO_WAY)
    async with (
        own_store(config.home / "clients") as store,
        open_network(
            identity,
            store,
            dht=DhtConfig(client=True),
            swarm_key=key,
            home=config.home,
            keys=keys_of(config.home),
        ) as network,
    ):
        transport, directory = network.transport, network.directory
        context = Context(
            peer_id=identity.peer_id,
            transport=transport,
            directory=directory,
            blobs=network.blobs,
            leases=network.leases,
            worker=None,
            memory=MemoryBudget(0),
            home=config.home,
        )
        membership = Membership(
            transport, directory, directory, None, MembershipConfig(bootstrap=ways), transport.learn
        )
        async with membership:
            try:
                async with asyncio.timeout(config.join_seconds):
                    await either(membership.joined, membership.refused)
            except TimeoutError:
                tried = ", ".join(ways[:3])
                raise PeerUnreachable(
                    f"no peer answers at {tried} (waited {config.join_seconds:.0f} s)"
                ) from None
            if not membership.joined.is_set():
                raise ClosedSwarm(NO_MEMBER)
            yield context


async def either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Wait until one of the two is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def keep_torch_cache(folder: Path) -> None:
    """Torch makes a folder for its caches, used or not, which would stay behind in the system's temporary one."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))


@asynccontextmanager
async def own_store(folder: Path) -> AsyncIterator[BlobStore]:
    """A blob store for this process alone, removed afterwards with the folders that were made for it, unless others use
    them by now; the stores of clients that were killed go as well."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.iterdir():
        import psutil  # only now: most find nothing

        if not (left.name.isdecimal() and psutil.pid_exists(int(left.name))):
            shutil.rmtree(left, ignore_errors=True)
    own = folder / str(os.getpid())
    keep_torch_cache(own)
    try:
        yield BlobStore(own, BLOB_QUOTA_BYTES)
    finally:
        shutil.rmtree(own, ignore_errors=True)
        with suppress(OSError):
            for path in made:
                path.rmdir()
