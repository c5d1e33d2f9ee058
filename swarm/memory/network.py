"""A swarm inside one process: the transport and the directory that unit tests run on.

Everything goes through the same frame encoding, caps and signed records as between real peers. A `MemoryNetwork`
can lose what real networks lose: `partition` and `heal` cut and mend links, `kill` takes a peer away without a
goodbye.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from fusion.swarm.directory.api import JOB_KEYS, LINK_KEYS, PEER_KEYS, RECORD_TTL_SECONDS, newest_jobs
from fusion.swarm.directory.records import (
    ClaimRecord,
    Digest,
    JobId,
    JobRecord,
    LinkRecord,
    PeerRecord,
    ProviderRecord,
    Record,
    claims_key,
    jobs_key,
    key_of,
    open_record,
    providers_key,
    seal,
    shard,
    subkey_of,
    unseal,
    unseal_anywhere,
)
from fusion.swarm.errors import PeerUnreachable, RecordError
from fusion.swarm.identity import Identity
from fusion.swarm.streams.frames import DEFAULT_LIMITS, FrameLimits
from fusion.swarm.streams.handlers import Handlers
from fusion.swarm.streams.memory_stream import MemoryStream, stream_pair
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import Handler, PeerId, Traffic

logger = logging.getLogger(__name__)


class ManualClock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


# What one peer holds of the directory: key -> subkey -> (the expiry its author signed, the sealed record).
Replica = dict[str, dict[str, tuple[float, bytes]]]


class MemoryNetwork:
    """What joins the memory transports and directories of one test."""

    def __init__(self) -> None:
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.replicas: dict[PeerId, Replica] = {}  # of the directory, one per peer
        self._cut: set[frozenset[PeerId]] = set()
        self._dead: set[PeerId] = set()
        self._streams: list[tuple[MemoryStream, PeerId, PeerId]] = []

    def reachable(self, one: PeerId, two: PeerId) -> bool:
        return frozenset((one, two)) not in self._cut and not self._dead & {one, two}

    def partition(self, group: Iterable[PeerId], others: Iterable[PeerId]) -> None:
        """Cut every link between the two groups: streams across it break, no new ones open, and records published
        on one side are not seen on the other."""
        others = list(others)
        self._cut |= {frozenset((one, two)) for one in group for two in others if one != two}
        self._drop_streams()

    def heal(self) -> None:
        """Mend every link that `partition` cut. Broken streams stay broken."""
        self._cut.clear()

    def kill(self, peer: PeerId) -> None:
        """The peer vanishes: its streams break at once, its handlers stop and nobody reaches it again."""
        self._dead.add(peer)
        self._drop_streams()
        transport = self.transports.pop(peer, None)
        if transport is not None:
            transport.handlers.cancel()

    def link(self, opener: MemoryTransport, peer: PeerId, protocol: str) -> MemoryStream:
        """A stream from `opener` to `peer`, whose handler starts. Raises PeerUnreachable."""
        target = self.transports.get(peer)
        if target is None or not self.reachable(opener.peer_id, peer):
            raise PeerUnreachable(f"cannot reach {peer}")
        if protocol not in target.handlers:
            raise PeerUnreachable(f"{peer} does not speak {protocol}")
        near, far = stream_pair(
            opener.peer_id, peer, protocol, opener.limits, (opener.counter, target.counter)
        )
        self._streams = [entry for entry in self._streams if not entry[0].ended]
        self._streams.append((near, opener.peer_id, peer))
        target.handlers.accept(far)
        return near

    def store(self, publisher: PeerId, key: str, subkey: str, data: bytes, now: float) -> None:
        """Offer sealed bytes to every replica that `publisher` reaches. Each checks them as a storing node of the
        DHT does: what is not a valid record, or older than what is there, is dropped."""
        try:
            expires_at = unseal(data, key, subkey, now).expires_at
        except RecordError as error:
            logger.debug("dropped a record at %s: %s", key, error)
            return
        for peer, replica in self.replicas.items():
            slots = replica.setdefault(key, {})
            held_until, _ = slots.get(subkey, (0.0, b""))
            if (peer == publisher or self.reachable(publisher, peer)) and held_until <= expires_at:
                slots[subkey] = (expires_at, data)

    def replica(self, peer: PeerId) -> Replica:
        """The peer's replica; a new one starts with what the peers it reaches hold."""
        if peer not in self.replicas:
            ours: Replica = {}
            for other, theirs in self.replicas.items():
                if self.reachable(peer, other):
                    for key, slots in theirs.items():
                        ours.setdefault(key, {}).update(slots)
            self.replicas[peer] = ours
        return self.replicas[peer]

    def _drop_streams(self) -> None:
        for stream, one, two in self._streams:
            if not self.reachable(one, two):
                stream.lose()


class MemoryTransport:
    """Implements `fusion.swarm.transport.Transport` between the peers of one `MemoryNetwork`."""

    def __init__(
        self, network: MemoryNetwork, peer_id: PeerId, *, limits: FrameLimits = DEFAULT_LIMITS
    ) -> None:
        if peer_id in network.transports:
            raise ValueError(f"{peer_id} is on this network already")
        self.peer_id = peer_id
        self.limits = limits
        self.handlers = Handlers()
        self.counter = TrafficCounter()
        self._network = network
        network.transports[peer_id] = self

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.peer_id}/p2p/{self.peer_id}",)

    async def connect(self, address: str) -> PeerId:
        before, separator, peer = address.rpartition("/p2p/")
        if not (separator and before.startswith("/") and peer) or "/" in peer:
            raise ValueError(f"{address!r} is not a multiaddr that ends in /p2p/<peer id>")
        if peer not in self._network.transports or not self._network.reachable(self.peer_id, PeerId(peer)):
            raise PeerUnreachable(f"cannot reach {address}")
        return PeerId(peer)

    async def open(self, peer: PeerId, protocol: str, *, stripes: int = 1) -> MemoryStream:
        return self._network.link(self, peer, protocol)

    async def serve(self, protocol: str, handler: Handler) -> None:
        self.handlers.add(protocol, handler)

    def traffic(self) -> Mapping[PeerId, Traffic]:
        return self.counter.snapshot()

    async def aclose(self) -> None:
        self._network.transports.pop(self.peer_id, None)
        await self.handlers.aclose()

    async def __aenter__(self) -> MemoryTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class MemoryDirectory:
    """Implements `fusion.swarm.directory.api.Directory` for one peer of a `MemoryNetwork`. Records are really signed
    and really checked; `clock` gives unix seconds."""

    def __init__(
        self, network: MemoryNetwork, identity: Identity, clock: Callable[[], float] = time.time
    ) -> None:
        self._network = network
        self._identity = identity
        self._clock = clock
        self._replica = network.replica(identity.peer_id)

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        now = self._clock()
        data = seal(record, self._identity, now + ttl_seconds)
        self._network.store(self._identity.peer_id, key_of(record), subkey_of(record), data, now)

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        return seal(record, self._identity, self._clock() + ttl_seconds)

    def unsealed(self, data: bytes) -> Record:
        return unseal_anywhere(data, self._clock()).record

    async def peers(self) -> tuple[PeerRecord, ...]:
        return tuple(
            record for key in PEER_KEYS for record in self._read(key) if isinstance(record, PeerRecord)
        )

    async def links(self) -> tuple[LinkRecord, ...]:
        return tuple(
            record for key in LINK_KEYS for record in self._read(key) if isinstance(record, LinkRecord)
        )

    async def jobs(self) -> tuple[JobRecord, ...]:
        return newest_jobs(
            record for key in JOB_KEYS for record in self._read(key) if isinstance(record, JobRecord)
        )

    async def job(self, job: JobId) -> JobRecord | None:
        records = [record for record in self._read(jobs_key(shard(job))) if isinstance(record, JobRecord)]
        newest = newest_jobs(record for record in records if record.job == job)
        return newest[0] if newest else None

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        return tuple(
            record for record in self._read(claims_key(job, stage)) if isinstance(record, ClaimRecord)
        )

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]:
        return tuple(
            record for record in self._read(providers_key(digest)) if isinstance(record, ProviderRecord)
        )

    async def aclose(self) -> None:
        self._network.replicas.pop(self._identity.peer_id, None)

    def _read(self, key: str) -> list[Record]:
        """The records at `key` that pass every check now, in the order of their authors."""
        found: list[Record] = []
        for subkey, (_, data) in sorted(self._replica.get(key, {}).items()):
            try:
                found.append(open_record(data, key, subkey, self._clock()))
            except RecordError as error:
                logger.debug("ignored a record at %s: %s", key, error)
        return found
