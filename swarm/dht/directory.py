"""The directory over hivemind's Kademlia DHT, run inside our own event loop.

hivemind keeps the routing table, serves other nodes and stores what they send, past the gate of
`fusion.swarm.dht.guard`. Asking is ours (`fusion.swarm.dht.lookup`), because what comes back must be taken record by record: one bad
record must not hide the good ones beside it, and one hostile or dead node must not stop a search.

A store keeps the record that expires last, so publishers keep the expiry of each record rising. Stores keep records
CLOCK_TOLERANCE_SECONDS longer than their authors signed, for clocks that run ahead; readers go by what was signed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgpack
from google.protobuf.message import DecodeError
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import dht_pb2

from fusion.swarm.dht.guard import StoreGuard
from fusion.swarm.dht.holders import Holders
from fusion.swarm.dht.lookup import Found, LookupConfig, Node, NodeReply, ask_all, lookup
from fusion.swarm.dht.values import MAX_SUBKEYS, key_id, parse_values
from fusion.swarm.directory.api import JOB_KEYS, LINK_KEYS, PEER_KEYS, RECORD_TTL_SECONDS
from fusion.swarm.directory.job_order import newest_jobs
from fusion.swarm.directory.keys import claims_key, jobs_key, key_of, providers_key, shard, subkey_of
from fusion.swarm.directory.records import (
    ClaimRecord,
    Digest,
    JobId,
    JobRecord,
    LinkRecord,
    PeerRecord,
    ProviderRecord,
    Record,
)
from fusion.swarm.directory.sealing import (
    CLOCK_TOLERANCE_SECONDS,
    Sealed,
    Signer,
    longest_ttl,
    seal,
    unseal,
    unseal_anywhere,
)
from fusion.swarm.errors import PeerUnreachable, RecordError
from fusion.swarm.identity import verify
from fusion.swarm.streams.peer_ids import from_bytes, to_hivemind
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

R = TypeVar("R", PeerRecord, JobRecord, ClaimRecord, ProviderRecord, LinkRecord)

# What a call to another node can raise, from the daemon's socket to the bytes of the answer.
_CALL_ERRORS = (P2PDaemonError, P2PHandlerError, DecodeError, OSError, EOFError, TimeoutError, ValueError)

MAX_KEYS_STORED = 65_536
GLANCE_ROUNDS = 2  # of asking one node a key, before the key is searched for
GLANCED_KEYS = frozenset((*PEER_KEYS, *JOB_KEYS))  # whose records are remembered until they expire
_BIG_ANSWER_BYTES = 512 * 1024  # hivemind's limit for one answer is 2 MiB
_CLOCK_SAMPLES = 16
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class DhtConfig:
    client: bool = False  # ask and publish, but store nothing for others
    replicas: int = 5  # nodes besides ourselves that keep each of our records
    call_seconds: float = 3.0
    holders_seconds: float = 120.0  # how long the nodes nearest to a key are taken for granted, if all answer
    suspend_seconds: float = (
        2.0  # a node that did not answer is left alone for so long, doubling up to 16 times
    )
    lookup: LookupConfig = LookupConfig()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        for name in ("replicas", "call_seconds", "holders_seconds", "suspend_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


class HivemindDirectory:
    """Implements `fusion.swarm.directory.api.Directory`. Made by `await HivemindDirectory.start(...)`; `join` brings it
    into a swarm; alone it is a swarm of one."""

    def __init__(self, node: Any, p2p: P2P, identity: Signer, config: DhtConfig) -> None:
        self._node = node
        self._protocol = node.protocol
        self._p2p = p2p
        self._identity = identity
        self._config = config
        self._expiries: dict[tuple[str, str], float] = {}  # of our own records
        self._holders = Holders(config.replicas, config.holders_seconds)
        self._seen: dict[str, dict[str, Sealed]] = {}  # of GLANCED_KEYS, by subkey
        self._seen_at: dict[str, float] = {}
        self._glancing = asyncio.Lock()
        self._suspended: dict[PeerId, tuple[float, int]] = {}  # until when, after how many failures in a row
        self._offsets: dict[PeerId, float] = {}  # others' clocks less ours
        self._reads: dict[str, asyncio.Future[list[Record]]] = {}  # waiting for the next lookup
        self._reader: asyncio.Task[None] | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._keys_per_ask = 32

    @classmethod
    async def start(cls, p2p: P2P, identity: Signer, config: DhtConfig | None = None) -> Self:
        """A node on a running `P2P` of this event loop (`P2PTransport.p2p`), whose identity must be `identity`."""
        config = config or DhtConfig()
        made: list[Self] = []  # the guard is needed before there is a directory
        guard = StoreGuard(
            lambda key: {subkey for subkey, _ in made[0]._stored(key)} if made else set(),
            lambda: made[0].now() if made else time.time(),
        )
        node = await DHTNode.create(
            p2p=p2p,
            node_id=DHTID.generate(source=identity.peer_id),
            num_replicas=config.replicas,
            wait_timeout=config.call_seconds,
            cache_size=1024,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            client_mode=config.client,
            record_validator=guard,
        )
        node.protocol.storage.maxsize = MAX_KEYS_STORED
        made.append(cls(node, p2p, identity, config))
        return made[0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for future in self._reads.values():
            future.cancel()
        self._reads.clear()
        if self._node.is_alive:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):  # a daemon that is dead already never answers
                    await self._node.shutdown()
            except _CALL_ERRORS as error:
                logger.debug("DHT node not taken down: %r", error)
                self._node.is_alive = False

    # Membership of the DHT.

    async def join(self, peer: PeerId) -> bool:
        """Make a peer that the transport can reach our neighbour in the DHT. False if it does not answer."""
        try:
            await self._ping(peer)
        except _CALL_ERRORS as error:
            logger.debug("no DHT node at %s: %s", peer, error)
            return False
        self._holders.forget()
        await self.refresh()
        return True

    async def refresh(self) -> int:
        """Look for the nodes around us, so that both sides know each other; the number of neighbours."""
        for node in (await self._lookup([int(self._node.node_id)])).nearest[int(self._node.node_id)]:
            if node.peer not in self._offsets:
                try:
                    await self._ping(node.peer)
                except _CALL_ERRORS as error:
                    logger.debug("no DHT node at %s: %s", node.peer, error)
        return len(self.neighbours())

    def neighbours(self) -> tuple[PeerId, ...]:
        """The peers in our routing table."""
        table = self._protocol.routing_table
        return tuple(
            PeerId(peer.to_base58()) for bucket in table.buckets for peer in bucket.nodes_to_peer_id.values()
        )

    def now(self) -> float:
        """Unix seconds by the middle of our neighbours' clocks and ours: records last seconds, clocks err by more."""
        offset = statistics.median([0.0, *self._offsets.values()])
        return time.time() + (offset if abs(offset) > 1.0 else 0.0)

    # The Directory protocol.

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        """As in `Directory`. A record never ends sooner than an earlier version of it would have.
        Raises PeerUnreachable for a client when no node took the record."""
        key, subkey = key_of(record), subkey_of(record)
        data, expires_at = self._seal(record, ttl_seconds)
        stored_until = expires_at + CLOCK_TOLERANCE_SECONDS
        if not self._config.client:  # what we say about ourselves can always be had from us
            self._protocol.storage.store_subkey(DHTID(key_id(key)), subkey, data, stored_until)
        holders = await self._nearest(key)
        request = dht_pb2.StoreRequest(
            keys=[DHTID(key_id(key)).to_bytes()],
            subkeys=[msgpack.packb(subkey)],
            values=[data],
            expiration_time=[stored_until],
            in_cache=[False],
            peer=self._protocol.node_info,
        )
        taken = await asyncio.gather(*(self._store(node, request) for node in holders))
        if not all(taken):
            self._holders.forget([key_id(key)])
        # A later version that we sent meanwhile may have come first.
        overtaken = self._expiries.get((key, subkey), 0.0) > expires_at
        if self._config.client and not any(taken) and not overtaken:
            raise PeerUnreachable("no peer of the swarm took the record")

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        """As in `Directory`. Whatever we publish later ends later: who stores what was shown to him displaces nothing."""
        return self._seal(record, ttl_seconds)[0]

    def unsealed(self, data: bytes) -> Record:
        return unseal_anywhere(data, self.now()).record

    def _seal(self, record: Record, ttl_seconds: float) -> tuple[bytes, float]:
        if not 0 < ttl_seconds <= longest_ttl(record):
            raise RecordError(
                f"ttl_seconds must lie between 0 and {longest_ttl(record):g}, not {ttl_seconds}"
            )
        slot = key_of(record), subkey_of(record)
        expires_at = max(self.now() + ttl_seconds, self._expiries.get(slot, 0.0) + 0.001)
        data = seal(record, self._identity, expires_at)
        self._remember_expiry(slot, expires_at)
        return data, expires_at

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def verify(self, peer: str, signature: bytes, data: bytes) -> bool:
        return verify(peer, signature, data)

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        return await self._listed(PEER_KEYS, PeerRecord, max_age_seconds)

    async def links(self) -> tuple[LinkRecord, ...]:
        return await self._records(LINK_KEYS, LinkRecord)

    async def jobs(self, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        return newest_jobs(await self._listed(JOB_KEYS, JobRecord, max_age_seconds))

    async def job(self, job: JobId) -> JobRecord | None:
        records = await self._records([jobs_key(shard(job))], JobRecord)
        newest = newest_jobs(record for record in records if record.job == job)
        return newest[0] if newest else None

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        return await self._records([claims_key(job, stage)], ClaimRecord)

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]:
        return await self._records([providers_key(digest)], ProviderRecord)

    # Reading.

    async def _listed(self, keys: Sequence[str], kind: type[R], max_age_seconds: float) -> tuple[R, ...]:
        """Without an age a search for all keys; with one, see `Directory.peers`."""
        if max_age_seconds <= 0:
            return await self._records(keys, kind)
        async with self._glancing:  # whoever comes meanwhile finds it done
            if self._aged(keys, max_age_seconds):
                # Whoever is asked for these is asked for others that will be wanted soon.
                wanted = {*self._aged(keys, max_age_seconds), *self._aged(GLANCED_KEYS, max_age_seconds / 2)}
                for _ in range(GLANCE_ROUNDS):
                    wanted -= await self._glance(wanted)
                if wanted:
                    await self._records(sorted(wanted), kind)
        now = self.now()
        seen = (sealed for key in keys for _, sealed in sorted(self._seen.get(key, {}).items()))
        return tuple(s.record for s in seen if s.expires_at > now and isinstance(s.record, kind))

    def _aged(self, keys: Iterable[str], seconds: float) -> list[str]:
        now = time.monotonic()
        return [key for key in keys if now - self._seen_at.get(key, float("-inf")) >= seconds]

    async def _glance(self, keys: Iterable[str]) -> set[str]:
        """Ask one of the nodes that keep each key; the keys of which one answered."""
        ids, known, now = {key_id(key): key for key in keys}, self._answering(), time.monotonic()
        kept = {key: self._holders.of(key, known, now) for key in ids}
        living = {key: [n for n in nodes if not self._is_suspended(n.peer)] for key, nodes in kept.items()}
        holders = {key: nodes for key, nodes in living.items() if nodes}
        questions = self._holders.questions(holders, random.Random())
        read: set[str] = set()
        for node, answer in (
            await ask_all(questions, self._ask, self._config.lookup.patience_seconds)
        ).items():
            for key in questions[node]:
                values = answer.values.get(key, {})
                self._checked(ids[key], {subkey: (data,) for subkey, data in values.items()})
                read.add(ids[key])
                if not self._holders.of(key, answer.nearest.get(key, ()), now):
                    self._holders.forget([key])  # a nearer node has come: the next glance searches
        return read

    async def _records(self, keys: Sequence[str], kind: type[R]) -> tuple[R, ...]:
        """What the swarm holds under the keys. Reads asked for at the same moment share one lookup."""
        loop = asyncio.get_running_loop()
        futures = [self._reads.setdefault(key, loop.create_future()) for key in keys]
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
            self._readers.add(self._reader)
            self._reader.add_done_callback(self._readers.discard)
        found = await asyncio.gather(*(asyncio.shield(future) for future in futures))
        return tuple(record for records in found for record in records if isinstance(record, kind))

    async def _read(self) -> None:
        await asyncio.sleep(0)  # let everybody who is ready now ask
        reads, self._reads, self._reader = self._reads, {}, None
        try:
            ids = {key: key_id(key) for key in reads}
            found = await self._lookup(ids.values())
            for key, future in reads.items():
                if not future.done():
                    future.set_result(self._checked(key, found.values[ids[key]]))
        finally:
            for future in reads.values():
                future.cancel()

    def _checked(self, key: str, values: Mapping[str, Iterable[bytes]]) -> list[Record]:
        """The records among the values, and among what we hold and remember, that pass every check."""
        now = self.now()
        newest = {s: sealed for s, sealed in self._seen.get(key, {}).items() if sealed.expires_at > now}
        for subkey, data in [*_each(values), *self._stored(key_id(key))]:
            try:
                sealed = unseal(data, key, subkey, now)
            except RecordError as error:
                logger.debug("dropped a record at %s of %.80s: %s", key, subkey, error)
                continue
            if subkey not in newest or sealed.expires_at > newest[subkey].expires_at:
                newest.pop(subkey, None)  # the last ones are those that were met last
                newest[subkey] = sealed
        if key in GLANCED_KEYS:
            self._seen[key] = dict(list(newest.items())[-MAX_SUBKEYS:])
            self._seen_at[key] = time.monotonic()
        return [newest[subkey].record for subkey in sorted(newest)]

    def _stored(self, key: int) -> list[tuple[str, bytes]]:
        """What we hold under the key ourselves."""
        entry = self._protocol.storage.get(DHTID(key))
        if entry is None or not isinstance(entry.value, DictionaryDHTValue):
            return []
        return [(str(subkey), item.value) for subkey, item in entry.value.items()]

    # Calls to other nodes.

    async def _lookup(self, ids: Iterable[int]) -> Found:
        found = await lookup(ids, self._start_nodes, self._ask, self._config.lookup)
        self._holders.found(found.nearest, time.monotonic())
        return found

    async def _nearest(self, key: str) -> tuple[Node, ...]:
        """The nodes that keep our records under `key`."""
        wanted = key_id(key)
        nodes = self._holders.of(wanted, self._answering(), time.monotonic())
        if not nodes:
            nodes = (await self._lookup([wanted])).nearest[wanted][: self._config.replicas]
        return nodes

    def _answering(self) -> list[Node]:
        """The nodes of our routing table, those left out that did not answer lately."""
        buckets = self._protocol.routing_table.buckets
        nodes = (
            Node(int(node_id), from_bytes(peer.to_bytes()))
            for bucket in buckets
            for node_id, peer in bucket.nodes_to_peer_id.items()
        )
        return [node for node in nodes if not self._is_suspended(node.peer)]

    def _start_nodes(self, key: int) -> list[Node]:
        nearest = self._protocol.routing_table.get_nearest_neighbors(
            DHTID(key), self._config.lookup.breadth * 2, exclude=self._node.node_id
        )
        nodes = [Node(int(node_id), PeerId(peer.to_base58())) for node_id, peer in nearest]
        return [node for node in nodes if not self._is_suspended(node.peer)]

    async def _ask(self, node: Node, keys: tuple[int, ...]) -> NodeReply | None:
        values: dict[int, dict[str, bytes]] = {}
        nearest: dict[int, list[Node]] = {}
        try:
            for at in range(0, len(keys), self._keys_per_ask):
                part = keys[at : at + self._keys_per_ask]
                request = dht_pb2.FindRequest(
                    keys=[DHTID(key).to_bytes() for key in part], peer=self._protocol.node_info
                )
                stub = self._protocol.get_stub(to_hivemind(node.peer))
                response = await stub.rpc_find(request, timeout=self._config.call_seconds)
                if response.ByteSize() > _BIG_ANSWER_BYTES:
                    self._keys_per_ask = max(1, self._keys_per_ask // 2)
                for key, result in zip(part, response.results, strict=True):
                    if result.type == dht_pb2.FOUND_DICTIONARY:
                        values[key] = parse_values(result.value)
                    nearest[key] = list(self._nodes_of(result))
        except asyncio.CancelledError:
            self._failed(node.peer)  # the others were so much quicker that nobody waits for it any longer
            raise
        except _CALL_ERRORS as error:
            logger.debug("no answer from %s: %r", node.peer, error)
            await self._lost(node)
            return None
        self._suspended.pop(node.peer, None)
        return NodeReply(values, nearest)

    def _nodes_of(self, result: Any) -> Iterator[Node]:
        for node_id, peer in list(zip(result.nearest_node_ids, result.nearest_peer_ids, strict=False))[:64]:
            if len(node_id) == DHTID.HASH_NBYTES and 0 < len(peer) <= 64:
                node = Node(int.from_bytes(node_id, "big"), from_bytes(peer))
                if node.peer != self._identity.peer_id and not self._is_suspended(node.peer):
                    yield node

    async def _store(self, node: Node, request: Any) -> bool:
        try:
            stub = self._protocol.get_stub(to_hivemind(node.peer))
            response = await stub.rpc_store(request, timeout=self._config.call_seconds)
        except _CALL_ERRORS as error:
            logger.debug("record not stored at %s: %r", node.peer, error)
            await self._lost(node)
            return False
        return list(response.store_ok) == [True]

    async def _ping(self, peer: PeerId) -> None:
        request = dht_pb2.PingRequest(peer=self._protocol.node_info)
        asked_at = time.time()
        stub = self._protocol.get_stub(to_hivemind(peer))
        response = await stub.rpc_ping(request, timeout=self._config.call_seconds)
        answered_at = time.time()
        if len(response.peer.node_id) == DHTID.HASH_NBYTES:
            await self._protocol.update_routing_table(
                DHTID.from_bytes(response.peer.node_id), to_hivemind(peer), responded=True
            )
        self._suspended.pop(peer, None)
        if response.dht_time and answered_at - asked_at < 1.0:
            self._offsets[peer] = response.dht_time - (asked_at + answered_at) / 2
            while len(self._offsets) > _CLOCK_SAMPLES:
                del self._offsets[next(iter(self._offsets))]
            offset = statistics.median([0.0, *self._offsets.values()])
            if abs(offset) > CLOCK_TOLERANCE_SECONDS:
                logger.warning("this machine's clock is %.0f s off the swarm's: set it", -offset)

    # Nodes that fail.

    def _is_suspended(self, peer: PeerId) -> bool:
        until, _ = self._suspended.get(peer, (0.0, 0))
        return time.monotonic() < until

    def _failed(self, peer: PeerId) -> int:
        _, failures = self._suspended.pop(peer, (0.0, 0))
        pause = self._config.suspend_seconds * 2 ** min(failures, 4)
        self._suspended[peer] = (time.monotonic() + pause, failures + 1)
        while len(self._suspended) > MAX_SUBKEYS:
            del self._suspended[next(iter(self._suspended))]
        return failures + 1

    async def _lost(self, node: Node) -> None:
        # One failure is no death: on a busy machine every neighbour may miss a deadline once.
        if self._failed(node.peer) >= 3:
            self._offsets.pop(node.peer, None)
            await self._protocol.update_routing_table(DHTID(node.id), to_hivemind(node.peer), responded=False)

    def _remember_expiry(self, slot: tuple[str, str], expires_at: float) -> None:
        now = self.now()
        if len(self._expiries) > MAX_SUBKEYS:
            self._expiries = {s: expiry for s, expiry in self._expiries.items() if expiry > now}
        self._expiries[slot] = expires_at


def _each(values: Mapping[str, Iterable[bytes]]) -> Iterator[tuple[str, bytes]]:
    for subkey, candidates in values.items():
        for data in candidates:
            yield subkey, data
