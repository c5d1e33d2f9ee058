"""Using the swarm without lending anything: through the peer that runs with this home where there is one
(`open_attached`), else by joining it for as long as the command runs (`open_client`). Neither loads torch of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fusion.runtime.job.context import Context
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.peer.client_context import client_context, own_store
from fusion.runtime.peer.keys import access_of, keys_of
from fusion.runtime.peer.peer_file import running_peer
from fusion.swarm.control.client import ControlDirectory, ControlTransport, Elsewhere
from fusion.swarm.directory.bootstrap import load_cached
from fusion.swarm.errors import ClosedSwarm, PeerUnreachable
from fusion.swarm.identity import Identity
from fusion.swarm.swarm_key import NO_MEMBER, find_key

CACHED_PEERS_FILE = "peers.txt"  # in a home: whom the peer has met
NO_WAY = "no peer to join through; name one with --peer or --bootstrap, or run: fusion-peer start"


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    home: Path
    bootstrap: tuple[str, ...] = ()
    # The only peer to join through; default: the one that runs with this home, those that it has met, and bootstrap.
    peer: str | None = None
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
    access = access_of(transport.through, directory, home, keys_of(home))
    try:
        async with client_context(transport, directory, access, home) as context:
            yield context
    finally:
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
    ways = await asyncio.to_thread(ways_in, config)
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
            *(transport, directory, directory, None, MembershipConfig(bootstrap=ways)),
            learn=lambda peer, addresses, _: transport.learn(peer, addresses),
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


def ways_in(config: ClientConfig) -> tuple[str, ...]:
    """The addresses to join through. Of a peer that was killed the home still says where it was: with it go those whom it had
    met, as they do where nobody is named."""
    if config.peer:
        return (config.peer,)
    here = running_peer(config.home)
    if here is None and config.bootstrap:
        return config.bootstrap
    met = load_cached(config.home / CACHED_PEERS_FILE)
    if here is None:
        return met
    return tuple(dict.fromkeys((*here.addresses, *config.bootstrap, *met)))


async def either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Wait until one of the two is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
