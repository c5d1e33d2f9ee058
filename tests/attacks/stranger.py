"""An attacker: a key of its own, p2pd, hivemind's calls, and a quarter of a core."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack
import psutil
from attacks.processor import SHARE, family, spent_by
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2
from support.directory_records import raw_seal

from fusion.swarm.dht.values import key_id
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import JobId, Record
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.streams.peer_ids import to_hivemind
from fusion.swarm.transport import PeerId

CALL_SECONDS = 5.0
CALL_ERRORS = (P2PDaemonError, P2PHandlerError, OSError, EOFError, TimeoutError, ValueError)
ANSWERS = {
    "ping": dht_pb2.PingResponse,
    "find": dht_pb2.FindResponse,
    "store": dht_pb2.StoreResponse,
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Public facts about the attacked peers."""

    addresses: tuple[str, ...]
    training: JobId  # an honest job, stages 0 and 1 at the first two peers
    serving: JobId  # a served model, stages 0 and 1 at the last two
    trainer: PeerId  # the author of both
    route: tuple[tuple[PeerId, int], ...] = ()  # owner and term of each stage of the served model
    training_route: tuple[tuple[PeerId, int], ...] = ()  # the same of the training job
    weights: tuple[str, ...] = ()  # digests of the weights of the model's stages

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scene:
        values = json.loads(text)
        routes = {
            name: tuple((PeerId(peer), term) for peer, term in values.pop(name))
            for name in ("route", "training_route")
        }
        addresses, weights = tuple(values.pop("addresses")), tuple(values.pop("weights"))
        return cls(**values, **routes, addresses=addresses, weights=weights)


@dataclass
class Stranger:
    """One identity of an attacker. `peers` are its targets, in the order of `scene.addresses`."""

    scene: Scene
    identity: Identity
    transport: P2PTransport
    peers: tuple[PeerId, ...]
    seconds: float
    others: list[Stranger] = field(default_factory=list)  # more identities of the same attacker
    began: float = field(default_factory=time.monotonic)
    spent_before: float = 0.0
    processes: list[psutil.Process] = field(default_factory=list)  # the processes of all identities
    calls: int = 0
    refused: int = 0

    @property
    def all_of_us(self) -> list[Stranger]:
        return [self, *self.others]

    def begin(self) -> None:
        """Start the attack's time."""
        processes = family()
        began, spent = time.monotonic(), spent_by(processes)
        for each in self.all_of_us:
            each.began, each.spent_before, each.processes = began, spent, processes

    @property
    def until(self) -> float:
        """The end of the attack's time, of time.monotonic."""
        return self.began + self.seconds

    @property
    def time_left(self) -> bool:
        return time.monotonic() < self.until

    async def call(self, peer: PeerId, method: str, request: Any) -> Any:
        """Call a method of hivemind's DHT, and return the response, or None without one. Waits while over its share of a core."""
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
        owed = (spent_by(self.processes) - self.spent_before) / SHARE - (time.monotonic() - self.began)
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


@asynccontextmanager
async def stranger(scene: Scene, seconds: float, identities: int = 1) -> AsyncIterator[Stranger]:
    """An attacker with so many new identities, each with a p2pd of its own that is connected to every peer of the scene."""
    async with AsyncExitStack() as stack:
        first, *others = [
            await stack.enter_async_context(_identity(scene, seconds)) for _ in range(identities)
        ]
        first.others = others
        yield first


@asynccontextmanager
async def _identity(scene: Scene, seconds: float) -> AsyncIterator[Stranger]:
    identity = Identity.generate()
    config = P2PConfig(identity=identity, listen=("/ip4/127.0.0.1/tcp/0",))
    async with P2PTransport.start(config) as transport:
        peers = tuple([await transport.connect(address) for address in scene.addresses])
        yield Stranger(scene, identity, transport, peers, seconds)
