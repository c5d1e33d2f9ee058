"""Using the swarm from where there is neither hivemind nor PyTorch: through the first peer that answers, over py-libp2p.

A command uses the identity of its home's peer where there is one, so that other peers see the peer that they invited. While a peer
runs with that home, and where there is none, it uses a new key, to which grants of the home's keys and invites are delegated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from fusion.runtime.job.context import Context
from fusion.runtime.job.protocol import ANSWER_BYTES
from fusion.runtime.peer.client import ClientConfig, join_addresses, no_address_error
from fusion.runtime.peer.client_context import client_context
from fusion.runtime.peer.keys import IDENTITY_FILE, access_of, keys_of
from fusion.runtime.peer.peer_file import running_peer
from fusion.swarm.errors import ClosedSwarm, StreamBroken, SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.swarm_key import NO_MEMBER, Authorizer, find_key
from fusion.swarm.thin.addresses import dialable
from fusion.swarm.thin.remote_directory import RemoteDirectory
from fusion.swarm.thin.transport import ThinConfig, ThinTransport

LOOK_AROUND_SECONDS = 1.0  # after which other peers are looked up, in case our gateway vanishes


@asynccontextmanager
async def open_thin(config: ClientConfig) -> AsyncIterator[Context]:
    """Use the swarm without joining it, until the block ends. Raises as `fusion.runtime.peer.client.open_client`; ValueError for
    an address that only peers can dial."""
    identity, key = _identity(config.home), find_key(config.home, config.swarm_key)
    ways = await asyncio.to_thread(join_addresses, config)
    if not ways:
        raise no_address_error(config.home)
    usable = tuple(way for way in ways if dialable((way,)))
    if not usable:
        raise ValueError(
            f"{ways[0]}: without the peer extra, /ip4, /ip6 and /dns addresses over /tcp are dialled"
        )
    authorizer = None if key is None else Authorizer(key, identity.peer_id)
    transport = ThinTransport(
        ThinConfig(identity=identity, ways=usable, authorizer=authorizer, answer_bytes=ANSWER_BYTES)
    )
    directory = RemoteDirectory(transport, transport.gateway, transport.doubt, transport.learn)
    access = access_of(identity.peer_id, directory, config.home, (identity, *keys_of(config.home)))
    around: asyncio.Task[None] | None = None
    try:
        async with client_context(transport, directory, access, config.home) as context:
            gateway = await transport.gateway()
            around = asyncio.create_task(_look_around(directory))
            try:
                yield context
            except StreamBroken as error:
                if transport.has_received_from(gateway):
                    raise
                raise ClosedSwarm(NO_MEMBER) from error  # its peers close streams of non-members
    finally:
        if around is not None:
            around.cancel()
        await directory.aclose()
        await transport.aclose()


def _identity(home: Path) -> Identity:
    path = home / IDENTITY_FILE
    return Identity.load(path) if path.exists() and running_peer(home) is None else Identity.generate()


async def _look_around(directory: RemoteDirectory) -> None:
    """Learn other peers' addresses, in case our gateway vanishes; not at once, as most commands have ended by then."""
    await asyncio.sleep(LOOK_AROUND_SECONDS)
    with suppress(SwarmError):
        await directory.peers()
