"""What a stranger has: a key of its own, p2pd, hivemind's calls, and a quarter of a core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import psutil
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from support.directory_records import raw_seal

from fusion.swarm.dht.values import key_id
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import Record
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PConfig, P2PTransport
from fusion.swarm.streams.peer_ids import to_hivemind
from fusion.swarm.transport import PeerId

SHARE = 0.25  # of a core, p2pd included
CALL_SECONDS = 5.0
CALL_ERRORS = (P2PDaemonError, P2PHandlerError, OSError, EOFError, TimeoutError, ValueError)
ANSWERS = {
    "ping": dht_pb2.PingResponse,
    "find": dht_pb2.FindResponse,
    "store": dht_pb2.StoreResponse,
}


@dataclass
class Stranger:
    """One attacking identity. `peers`: those that it attacks."""

    identity: Identity
    transport: P2PTransport
    peers: tuple[PeerId, ...]
    addresses: tuple[str, ...]
    until: float  # of time.monotonic
    began: float = field(default_factory=time.monotonic)
    spent_before: float = field(default_factory=lambda: spent_seconds())
    calls: int = 0
    refused: int = 0

    @property
    def time_left(self) -> bool:
        return time.monotonic() < self.until

    async def call(self, peer: PeerId, method: str, request: Any) -> Any:
        """hivemind's call; None where no answer came. Waits as long as the quarter of a core makes necessary."""
        await self.pace()
        self.calls += 1
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return await self.transport.p2p.call_protobuf_handler(
                    to_hivemind(peer), f"DHTProtocol.rpc_{method}", request, ANSWERS[method]
                )
        except CALL_ERRORS:
            self.refused += 1
            return None

    async def everywhere(self, method: str, request: Any) -> None:
        await asyncio.gather(*(self.call(peer, method, request) for peer in self.peers))

    async def pace(self) -> None:
        owed = (spent_seconds() - self.spent_before) / SHARE - (time.monotonic() - self.began)
        await asyncio.sleep(max(0.0, owed))

    def sealed(self, record: Record, ttl_seconds: float, identity: Identity | None = None) -> Offer:
        until = time.time() + ttl_seconds
        data = raw_seal(record, identity or self.identity, until)
        return Offer(key_id(key_of(record)), subkey_of(record), data, until + CLOCK_TOLERANCE_SECONDS)

    @property
    def node_info(self) -> Any:
        return dht_pb2.NodeInfo(node_id=key_id(self.identity.peer_id).to_bytes(20, "big"))


@dataclass(frozen=True)
class Offer:
    key: int
    subkey: str
    data: bytes
    until: float


def store_request(offers: Sequence[Offer], *, in_cache: bool = False) -> Any:
    return dht_pb2.StoreRequest(
        keys=[offer.key.to_bytes(20, "big") for offer in offers],
        subkeys=[msgpack.packb(offer.subkey) for offer in offers],
        values=[offer.data for offer in offers],
        expiration_time=[offer.until for offer in offers],
        in_cache=[in_cache] * len(offers),
    )


def spent_seconds() -> float:
    """Processor time of this process and of those below it."""
    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


@asynccontextmanager
async def stranger(addresses: Sequence[str], seconds: float) -> AsyncIterator[Stranger]:
    identity = Identity.generate()
    config = P2PConfig(identity=identity, listen=("/ip4/127.0.0.1/tcp/0",))
    async with P2PTransport.start(config) as transport:
        peers = tuple([await transport.connect(address) for address in addresses])
        yield Stranger(identity, transport, peers, tuple(addresses), time.monotonic() + seconds)
