"""Using the swarm without lending anything: through the peer that runs with this home where there is one (`open_attached`), else by
joining it for as long as the command runs (`open_client`). Neither loads torch itself.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fusion.runtime.job.context import Context
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.peer.client_context import client_context, own_store
from fusion.runtime.peer.keys import access_of, keys_of
from fusion.runtime.peer.peer_file import RunningPeer, running_peer
from fusion.swarm.control.client import ControlTransport, Elsewhere
from fusion.swarm.control.directory import ControlDirectory
from fusion.swarm.directory.bootstrap import load_cached
from fusion.swarm.errors import ClosedSwarm, PeerUnreachable
from fusion.swarm.identity import Identity
from fusion.swarm.swarm_key import NO_MEMBER, find_key
from fusion.swarm.thin.addresses import Target, dialable

CACHED_PEERS_FILE = "peers.txt"  # in a home: peers that its peer has met
NO_ADDRESS = "no peer to join through; name one with --peer or --bootstrap, or run: fusion-peer start"
KILLED = "the peer of this home was killed; start it with: fusion-peer start"
DIAL_SECONDS = 0.5  # for a peer of this home that may run on another machine, which shares the home with us


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
    """Join the swarm without lending anything: to launch, prompt and watch. The identity lasts as long as the block.

    Raises PeerUnreachable, in one line, if no peer of the swarm answers within `join_seconds`, at once if there is no address;
    ClosedSwarm at once if those that do are of another swarm, or of a closed one whose key we do not have; SwarmKeyError.
    """
    from fusion.runtime.peer.network import open_network
    from fusion.swarm.dht.directory import DhtConfig
    from fusion.swarm.directory.membership import Membership, MembershipConfig

    identity, key = Identity.generate(), find_key(config.home, config.swarm_key)
    addresses = await asyncio.to_thread(join_addresses, config)
    if not addresses:
        raise no_address_error(config.home)
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
            *(transport, directory, directory, None, MembershipConfig(bootstrap=addresses)),
            learn=lambda peer, addresses, _: transport.learn(peer, addresses),
        )
        async with membership:
            await _joined(membership.joined, membership.refused, addresses, config.join_seconds)
            yield context


async def _joined(
    joined: asyncio.Event, refused: asyncio.Event, addresses: Sequence[str], patience_seconds: float
) -> None:
    """Wait until a peer at one of `addresses` has taken us in. Raises PeerUnreachable, ClosedSwarm."""
    try:
        async with asyncio.timeout(patience_seconds):
            await wait_for_either(joined, refused)
    except TimeoutError:
        tried = ", ".join(addresses[:3])
        raise PeerUnreachable(f"no peer answers at {tried} (waited {patience_seconds:.0f} s)") from None
    if not joined.is_set():
        raise ClosedSwarm(NO_MEMBER)


def join_addresses(config: ClientConfig) -> tuple[str, ...]:
    """The addresses to join through; may dial, for DIAL_SECONDS. The peer file may be left over from a peer that was killed: then they
    are the bootstrap addresses and those of peers that it had met."""
    if config.peer:
        return (config.peer,)
    here = running_peer(config.home)
    if here is None and config.bootstrap:
        return config.bootstrap
    met = load_cached(config.home / CACHED_PEERS_FILE)
    if here is None:
        return met
    if accepts_connections(here):
        return tuple(dict.fromkeys((*here.addresses, *config.bootstrap, *met)))
    others = dict.fromkeys((*config.bootstrap, *met))
    return tuple(address for address in others if address.rpartition("/p2p/")[2] != here.peer_id)


def no_address_error(home: Path) -> PeerUnreachable:
    """The error where `join_addresses` finds none."""
    return PeerUnreachable(NO_ADDRESS if running_peer(home) is None else KILLED)


def accepts_connections(peer: RunningPeer) -> bool:
    """Whether the addresses in a home's peer file accept connections. Its pid does not show that the peer runs: it may be of another
    container, or of another machine that shares the home, where its control socket cannot be reached either."""
    if peer.control and hasattr(socket, "AF_UNIX"):
        with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as control:
            control.settimeout(DIAL_SECONDS)
            control.connect(peer.control)
            return True
    targets = dialable(peer.addresses)
    if not targets:
        return False
    with ThreadPoolExecutor(len(targets)) as threads:
        return any(threads.map(_listens, targets))


def _listens(target: Target) -> bool:
    try:
        socket.create_connection((target.host, target.port), DIAL_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


async def wait_for_either(one: asyncio.Event, other: asyncio.Event) -> None:
    """Wait until one of the two is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
