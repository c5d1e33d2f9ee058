"""Two transports over real p2pd daemons on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.transport import Handler

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@asynccontextmanager
async def two(
    directory: Path, protocol: str, handler: Handler, **settings: Any
) -> AsyncIterator[tuple[P2PTransport, P2PTransport]]:
    """In this process, the first connected to the second, which serves the protocol. The directory's path must leave room
    for UNIX sockets; `settings` are further ones of both."""
    configs = [
        P2PConfig(identity=Identity.generate(), listen=LOOPBACK, runtime_dir=directory, **settings)
        for _ in range(2)
    ]
    async with P2PTransport.start(configs[0]) as one, P2PTransport.start(configs[1]) as other:
        await other.serve(protocol, handler)
        assert await one.connect(other.addresses[0]) == other.peer_id
        yield one, other
