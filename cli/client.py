"""How a command reaches the swarm: through the peer that runs here, or by joining; who works in it, whom to ask."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusion.cli.terminal import options
from fusion.cli.terminal.extras import has_peer_extra
from fusion.cli.terminal.fast_imports import lean_imports
from fusion.cli.terminal.options import home_folder
from fusion.swarm.directory.api import RECORD_TTL_SECONDS
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.errors import PeerUnreachable, SwarmError
from fusion.swarm.transport import Guided, PeerId

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.swarm.directory.api import Directory
    from fusion.swarm.transport import Transport

RETRY_SECONDS = 0.5
# A day covers clocks in the wrong time zone; a single peer must not be able to shift the validity of grants by years.
MOST_WRONG_SECONDS = 86_400.0


@dataclass(frozen=True)
class JoinOptions:
    """How a command is to come into the swarm: the options that say so."""

    peer: options.PeerAddress = None
    swarm_key: options.SwarmKey = None
    bootstrap: options.Bootstrap = None
    home: options.Home = options.DEFAULT_HOME

    def checked(self) -> tuple[Path, tuple[str, ...]]:
        """The home folder and the addresses to join through. ValueError names the option that is wrong."""
        from fusion.swarm.swarm_key import find_key

        folder = home_folder(self.home)
        options.checked_peer(self.peer)
        key = find_key(folder, self.swarm_key)
        return folder, options.bootstrap_addresses(self.bootstrap, closed=key is not None)


def has_way(way: JoinOptions) -> bool:
    """Whether there is any peer to join through. Loads nothing slow. ValueError as `JoinOptions.checked`."""
    from fusion.runtime.peer.client import ClientConfig, join_addresses

    folder, addresses = way.checked()
    return bool(join_addresses(ClientConfig(home=folder, bootstrap=addresses, peer=way.peer)))


def need_way(way: JoinOptions) -> None:
    """PeerUnreachable where there is no peer to join through: for commands that load what takes seconds before they join."""
    from fusion.runtime.peer.client import no_address_error

    if not has_way(way):
        raise no_address_error(home_folder(way.home))


@asynccontextmanager
async def connect(way: JoinOptions) -> AsyncIterator[Context]:
    """Use the swarm through the peer that runs with this home, unless `way.peer` is another; else join it for as long as
    the block lasts, or ask one of its peers where hivemind is not installed. Where that peer ends meanwhile, the command
    goes on through those whom it knew."""
    from fusion.runtime.peer.client import CACHED_PEERS_FILE, open_attached
    from fusion.runtime.peer.peer_file import running_peer

    (folder, addresses), peer = way.checked(), way.peer
    here = running_peer(folder) if hasattr(socket, "AF_UNIX") else None
    if here is not None and (peer is None or peer.rpartition("/p2p/")[2] == here.peer_id):
        async with AsyncExitStack() as stack:

            async def elsewhere() -> tuple[Transport, Directory]:
                from fusion.swarm.directory.bootstrap import load_cached

                met = await asyncio.to_thread(load_cached, folder / CACHED_PEERS_FILE)
                context = await stack.enter_async_context(
                    _join(folder, (*addresses, *met), None, way.swarm_key)
                )
                return context.transport, context.directory

            try:
                context = await stack.enter_async_context(open_attached(folder, elsewhere))
            except PeerUnreachable:
                pass  # it was killed, or is just stopping
            else:
                yield context
                return
    async with _join(folder, addresses, peer, way.swarm_key) as context:
        yield context


@asynccontextmanager
async def join(way: JoinOptions) -> AsyncIterator[Context]:
    """Join the swarm to hand something to it: through `way.peer`, else the peer that runs with this home, else the
    bootstrap peers."""
    folder, addresses = way.checked()
    async with _join(folder, addresses, way.peer, way.swarm_key) as context:
        yield context


@asynccontextmanager
async def _join(
    home: Path, addresses: tuple[str, ...], peer: str | None, swarm_key: Path | None
) -> AsyncIterator[Context]:
    from fusion.runtime.peer.client import ClientConfig, join_addresses, no_address_error, open_client

    config = ClientConfig(home=home, bootstrap=addresses, peer=peer, swarm_key=swarm_key)
    if not join_addresses(config):  # only then is anything slow loaded
        raise no_address_error(home)
    if not has_peer_extra():
        with lean_imports():
            from fusion.runtime.peer.thin_client import open_thin

        async with open_thin(config) as context:
            yield context
        return
    with lean_imports():  # only now: bad input should cost nothing
        import fusion.runtime.peer.network  # noqa: F401 - which `open_client` needs
    async with open_client(config) as context:
        yield context


def is_attached(context: Context) -> bool:
    """Whether it speaks through a peer that runs here."""
    from fusion.swarm.control.client import ControlTransport

    return isinstance(context.transport, ControlTransport)


def knows_the_swarm(context: Context) -> bool:
    """Whether what it finds is what a peer tells it that has known the swarm for a while."""
    return isinstance(context.transport, Guided)


def swarm_clock(context: Context) -> Callable[[], float]:
    """Unix seconds as the swarm has them, where our own clock is wrong by up to MOST_WRONG_SECONDS: of jobs of one name the newest is
    meant, and grants begin when they are given. For any thread."""
    ahead = context.directory.now() - time.time()
    ahead = max(-MOST_WRONG_SECONDS, min(ahead, MOST_WRONG_SECONDS))
    return lambda: time.time() + ahead


def http_url(context: Context, way: JoinOptions) -> str | None:
    """Where the HTTP API of the peer is through which this command speaks; None where it has none, or joined by itself."""
    from fusion.runtime.peer.peer_file import running_peer

    here = running_peer(home_folder(way.home)) if is_attached(context) else None
    return (here.http or None) if here is not None else None


async def working_peers(
    context: Context, wanted: Sequence[str] = (), wait_seconds: float = 2 * RECORD_TTL_SECONDS
) -> tuple[PeerRecord, ...]:
    """The peers that take work, once two looks agree (or a running peer says so) and those `wanted` (ids or names) are
    among them, or the time is up: one who has just joined does not see everybody at once. SwarmError if there is none."""
    until = time.monotonic() + wait_seconds
    last: set[str] = set()
    while True:
        found = tuple(peer for peer in await context.directory.peers() if peer.role == "peer")
        seen = {peer.peer for peer in found}
        late = time.monotonic() > until
        known = seen == last or (knows_the_swarm(context) and len(seen) > 1)
        if found and (late or (known and set(wanted) <= seen | {peer.name for peer in found})):
            return found
        if late:
            raise SwarmError("no peer answers; start one with: fusion-peer start")
        last = set(seen)
        await asyncio.sleep(RETRY_SECONDS)


async def gateway(context: Context, address: str | None) -> PeerId:
    """The peer to ask for text: the one at `address`, else the one that runs with this home, else any: not the first, or who
    has the lowest id of all would be asked by everybody."""
    if isinstance(context.transport, Guided):
        return await context.transport.gateway()
    if address is not None:
        return await context.transport.connect(address)
    return random.choice(await working_peers(context)).peer
