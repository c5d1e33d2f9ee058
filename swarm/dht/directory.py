"""The directory over a Kademlia DHT of hivemind's form, run inside our own event loop.

`service` answers others' calls; ours go through `calls` and `lookup`. Records are checked one by one, because one bad record must
not hide valid ones beside it, and one hostile or dead node must not stop a search.

A store keeps the record that expires last, so publishers keep the expiry of each record rising. Stores keep records
CLOCK_TOLERANCE_SECONDS longer than their authors signed, for clocks that run ahead; readers go by the signed expiry.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fusion.swarm.dht.calls import Calls, offer_of
from fusion.swarm.dht.holders import Holders
from fusion.swarm.dht.lookup import KEYS_AT_ONCE, Found, LookupConfig, Node, lookup, query_all
from fusion.swarm.dht.remembered import Remembered
from fusion.swarm.dht.service import DhtService
from fusion.swarm.dht.values import MAX_SUBKEYS, key_id, node_id
from fusion.swarm.dht.wire import CALL_ERRORS, P2P, NotOfThisSwarm, Wire
from fusion.swarm.directory.api import JOB_KEYS, PEER_KEYS, RECORD_TTL_SECONDS
from fusion.swarm.directory.by_key import DirectoryByKey, R
from fusion.swarm.directory.keys import key_of, subject_of, subkey_of
from fusion.swarm.directory.records import Record
from fusion.swarm.directory.sealing import (
    CLOCK_TOLERANCE_SECONDS,
    Sealed,
    latest_expiry,
    longest_ttl,
    seal,
    unseal,
)
from fusion.swarm.errors import ClosedSwarm, PeerUnreachable, RecordError, TransportError
from fusion.swarm.identity import Signer
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

GLANCE_ROUNDS = 2  # of querying one holder of a key, before the key is searched for
GLANCED_KEYS = frozenset((*PEER_KEYS, *JOB_KEYS))  # whose records are cached until they expire
CLIENT_AGE_SECONDS = 0.5  # of the peers and jobs that clients are sent
_CHECKED_AT_ONCE = 128  # signatures, before the event loop runs others: ten milliseconds
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class DhtConfig:
    client: bool = False  # query and publish, but store nothing for others
    replicas: int = 5  # nodes besides ourselves that keep each of our records
    call_seconds: float = 3.0
    holders_seconds: float = 120.0  # for which a key's nearest nodes are used without a search, if all answer
    # For which a node that did not answer is not called, doubling up to 16 times.
    suspend_seconds: float = 2.0
    lookup: LookupConfig = LookupConfig()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        for name in ("replicas", "call_seconds", "holders_seconds", "suspend_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


class HivemindDirectory(DirectoryByKey):
    """Implements `fusion.swarm.directory.api.Directory`. Made by `await HivemindDirectory.start(...)`; a swarm of one until it
    `join`s another."""

    def __init__(self, p2p: P2P, identity: Signer, config: DhtConfig) -> None:
        self._identity = identity
        self._config = config
        self._wire = Wire(p2p, identity.peer_id, config.client)
        self._service = DhtService(
            identity.peer_id,
            self.now,
            self._wire.subnets,
            lambda node, offers: self._calls.store(node, offers),
            self._is_alive,
            replicas=config.replicas,
        )
        self._calls = Calls(
            self._wire,
            call_seconds=config.call_seconds,
            suspend_seconds=config.suspend_seconds,
            admit=self._service.admit,
            gone=self._service.table.remove,
        )
        self._query = self._calls.query
        self._expiries: dict[tuple[str, str], float] = {}  # of our own records
        self._holders = Holders(config.replicas, config.holders_seconds)
        self._cached: dict[str, Remembered] = {}  # of GLANCED_KEYS
        self._cached_at: dict[str, float] = {}
        self._glancing = asyncio.Lock()
        self._reads: dict[
            str, dict[str, asyncio.Future[list[Sealed]]]
        ] = {}  # by subject, waiting for its next lookup
        self._readers: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        p2p: P2P,
        identity: Signer,
        config: DhtConfig | None = None,
    ) -> Self:
        """A node on a running `P2P` of this event loop (`P2PTransport.p2p`), whose identity must be `identity`."""
        made = cls(p2p, identity, config or DhtConfig())
        await made._wire.serve(made._service)
        return made

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for reads in self._reads.values():
            for future in reads.values():
                future.cancel()
        self._reads.clear()
        await self._calls.aclose()
        await self._service.aclose()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):  # a dead daemon never answers
                await self._wire.aclose()
        except (*CALL_ERRORS, TransportError) as error:
            logger.debug("DHT node not taken down: %r", error)

    # Membership of the DHT.

    async def join(self, peer: PeerId) -> bool:
        """Make a peer that the transport can reach our neighbour in the DHT. False if it does not answer. Raises ClosedSwarm if
        one of the two is a member of a closed swarm and the other is not."""
        try:
            await self._calls.ping(peer)
        except NotOfThisSwarm as error:
            raise ClosedSwarm(str(error)) from error
        except CALL_ERRORS as error:
            logger.debug("no DHT node at %s: %s", peer, error)
            return False
        self._holders.forget()
        await self.refresh()
        return True

    async def refresh(self) -> int:
        """Search for the nodes around us, so that both sides know each other; returns the number of neighbours."""
        own = node_id(self._identity.peer_id)
        for node in (await self._lookup([own])).nearest[own]:
            if not self._calls.knows_clock_of(node.peer):
                try:
                    await self._calls.ping(node.peer)
                except CALL_ERRORS as error:
                    logger.debug("no DHT node at %s: %s", node.peer, error)
        await self._calls.refresh_clocks()
        return len(self.neighbours())

    def neighbours(self) -> tuple[PeerId, ...]:
        """The peers in our routing table."""
        return tuple(node.peer for node in self._service.table)

    def now(self) -> float:
        """Unix seconds by our clock, corrected by the neighbours' (`fusion.swarm.dht.clock`)."""
        return self._calls.now()

    # For `fusion.swarm.dht.service`.

    async def _is_alive(self, node: Node) -> bool:
        try:
            await self._calls.ping(node.peer)
        except CALL_ERRORS:
            return False
        return True

    # The Directory protocol.

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        """As in `Directory`. A record never expires sooner than an earlier version of it, unless our clock was set back so far that
        nobody would accept that expiry.
        Raises PeerUnreachable for a client when no node stored the record."""
        key, subkey = key_of(record), subkey_of(record)
        data, expires_at = self._seal(record, ttl_seconds)
        stored_until = expires_at + CLOCK_TOLERANCE_SECONDS
        place = key_id(key)
        if not self._config.client:  # our own records can always be read from us
            self._service.keep_own(place, subkey, data, stored_until)
        offer = offer_of(place, subkey, data, stored_until)
        holders = await self._nearest(key)
        taken = await asyncio.gather(*(self._calls.store_one(node, offer) for node in holders))
        if not all(taken):
            self._holders.forget([place])
        # A later version, published meanwhile, may have been stored first.
        overtaken = self._expiries.get((key, subkey), 0.0) > expires_at
        if self._config.client and not any(taken) and not overtaken:
            raise PeerUnreachable("no peer of the swarm took the record")

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        """As in `Directory`. Records that we publish later expire later, so storing this one displaces none of them."""
        return self._seal(record, ttl_seconds)[0]

    def _seal(self, record: Record, ttl_seconds: float) -> tuple[bytes, float]:
        if not 0 < ttl_seconds <= longest_ttl(record):
            raise RecordError(
                f"ttl_seconds must lie between 0 and {longest_ttl(record):g}, not {ttl_seconds}"
            )
        slot, now = (key_of(record), subkey_of(record)), self.now()
        rising = self._expiries.get(slot, 0.0) + 0.001
        if rising > latest_expiry(record, now):
            rising = 0.0  # our clock was ahead and has been set back: nobody would accept so late an expiry
        expires_at = max(now + ttl_seconds, rising)
        data = seal(record, self._identity, expires_at)
        self._remember_expiry(slot, expires_at)
        return data, expires_at

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    # Reading.

    async def records(
        self, keys: Sequence[str], kind: type[R], *, max_age_seconds: float = 0.0
    ) -> tuple[R, ...]:
        """As in `DirectoryByKey`; without an age, by a search for all keys."""
        found = await (self._glanced(keys, max_age_seconds) if max_age_seconds > 0 else self._search(keys))
        return tuple(sealed.record for each in found for sealed in each if isinstance(sealed.record, kind))

    async def _glanced(self, keys: Sequence[str], max_age_seconds: float) -> list[list[Sealed]]:
        """The live records under each of these keys, all of GLANCED_KEYS, from the cache where it is no older than that."""
        async with self._glancing:  # callers that wait for it find the cache fresh
            if self._aged(keys, max_age_seconds):
                # The queried nodes are also queried for keys that will soon be too old.
                wanted = {*self._aged(keys, max_age_seconds), *self._aged(GLANCED_KEYS, max_age_seconds / 2)}
                for _ in range(GLANCE_ROUNDS):
                    wanted -= await self._glance(wanted)
                if wanted:
                    await self._search(sorted(wanted))
        now = self.now()
        seen = (self._cached[key].valid(now) if key in self._cached else {} for key in keys)
        return [[each[subkey] for subkey in sorted(each)] for each in seen]

    async def sealed_under(self, keys: Sequence[str]) -> list[list[bytes]]:
        """The live records under each of the keys, as their authors signed them, for clients that check them again. Peers and
        jobs may be CLIENT_AGE_SECONDS old: they are read no more often, however many clients there are."""
        glanced = [key for key in keys if key in GLANCED_KEYS]
        others = [key for key in keys if key not in GLANCED_KEYS]
        found: dict[str, list[Sealed]] = {}
        if glanced:
            found |= zip(glanced, await self._glanced(glanced, CLIENT_AGE_SECONDS), strict=True)
        if others:
            found |= zip(others, await self._search(others), strict=True)
        return [[sealed.data for sealed in found[key]] for key in keys]

    def _aged(self, keys: Iterable[str], seconds: float) -> list[str]:
        now = time.monotonic()
        return [key for key in keys if now - self._cached_at.get(key, float("-inf")) >= seconds]

    async def _glance(self, keys: Iterable[str]) -> set[str]:
        """Query one of the nodes that keep each key; returns the keys for which one answered."""
        ids, known, now = {key_id(key): key for key in keys}, self._answering(), time.monotonic()
        kept = {key: self._holders.of(key, known, now) for key in ids}
        living = {
            key: [n for n in nodes if not self._calls.is_suspended(n.peer)] for key, nodes in kept.items()
        }
        holders = {key: nodes for key, nodes in living.items() if nodes}
        queries = self._holders.queries(holders, random.Random())
        read: set[str] = set()
        for node, reply in (
            await query_all(queries, self._query, self._config.lookup.patience_seconds)
        ).items():
            for key in queries[node]:
                if key not in reply.values:  # its reply had room for others only
                    continue
                values = reply.values[key]
                await self._checked(ids[key], {subkey: {data: (node,)} for subkey, data in values.items()})
                read.add(ids[key])
                if not self._holders.of(key, reply.nearest.get(key, ()), now):
                    self._holders.forget([key])  # there is a nearer node: the next read searches
        return read

    async def _search(self, keys: Sequence[str]) -> list[list[Sealed]]:
        """The swarm's records under each of the keys. Reads requested at the same moment share one lookup per subject (`subject_of`):
        hostile nodes next to one job's keys must not hold up other jobs' reads."""
        loop = asyncio.get_running_loop()
        futures = []
        for key in keys:
            subject = subject_of(key)
            if subject not in self._reads:
                self._reads[subject] = {}
                reader = asyncio.create_task(self._read(subject))
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
            futures.append(self._reads[subject].setdefault(key, loop.create_future()))
        return await asyncio.gather(*(asyncio.shield(future) for future in futures))

    async def _read(self, subject: str) -> None:
        await asyncio.sleep(0)  # let all callers that are ready now join
        reads = self._reads.pop(subject)
        try:
            ids = {key: key_id(key) for key in reads}
            found = await self._lookup(ids.values())
            for number, (key, future) in enumerate(reads.items(), start=1):
                records = await self._checked(key, found.values[ids[key]])
                if number % KEYS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if not future.done():
                    future.set_result(records)
        except Exception as error:  # raised in the callers: a cancelled future would end their tasks silently
            for future in reads.values():
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # marks it retrieved: the caller may be gone
        finally:
            for future in reads.values():
                future.cancel()

    async def _checked(
        self, key: str, values: Mapping[str, Mapping[bytes, Collection[Node]]]
    ) -> list[Sealed]:
        """The newest records that pass every check, of these values, those that we store and the cached ones. Yields to the event loop
        in between: a stranger's reply can have thousands of signatures."""
        now = self.now()
        newest = self._cached[key].valid(now) if key in self._cached else {}
        reported_by: dict[str, set[str]] = {}
        for n, (subkey, data, accounts) in enumerate(self._each(key, values), start=1):
            if n % _CHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                sealed = unseal(data, key, subkey, now)
            except RecordError as error:
                logger.debug("dropped a record at %s of %.80s: %s", key, subkey, error)
                continue
            reported_by.setdefault(subkey, set()).update(accounts)
            if subkey not in newest or sealed.expires_at > newest[subkey].expires_at:
                newest[subkey] = sealed
        if key in GLANCED_KEYS:
            self._cached.setdefault(key, Remembered()).add(newest, reported_by, now)
            self._cached_at[key] = time.monotonic()
        return [newest[subkey] for subkey in sorted(newest)]

    def _each(
        self, key: str, values: Mapping[str, Mapping[bytes, Collection[Node]]]
    ) -> Iterator[tuple[str, bytes, Iterable[str]]]:
        """The values of others under the key, and those that we store: subkey, bytes, and the accounts that have it."""
        for subkey, candidates in values.items():
            for data, nodes in candidates.items():
                yield subkey, data, (self._service.account(node.peer) for node in nodes)
        for subkey, kept in list(self._service.values(key_id(key)).items()):
            yield subkey, kept.data, (kept.account,)

    # Searching.

    async def _lookup(self, ids: Iterable[int]) -> Found:
        found = await lookup(ids, self._start_nodes, self._query, self._config.lookup)
        self._holders.found(self._holders_of(found), time.monotonic())
        return found

    def _holders_of(self, found: Found) -> dict[int, tuple[Node, ...]]:
        """The nodes that keep each key: the nearest ones, and the nearest of each path. Otherwise an attacker with enough ids next to
        a key on one path would hold all copies and could withhold them."""
        kept = self._config.replicas
        return {
            key: tuple(dict.fromkeys((*near[:kept], *found.best[key]))) for key, near in found.nearest.items()
        }

    async def _nearest(self, key: str) -> tuple[Node, ...]:
        """The nodes that keep our records under `key`."""
        wanted = key_id(key)
        nodes = self._holders.of(wanted, self._answering(), time.monotonic())
        if not nodes:
            nodes = self._holders_of(await self._lookup([wanted]))[wanted]
        return nodes

    def _answering(self) -> list[Node]:
        """The nodes of our routing table that are not suspended."""
        return [node for node in self._service.table if not self._calls.is_suspended(node.peer)]

    def _start_nodes(self, key: int) -> list[Node]:
        nearest = self._service.table.nearest(key, self._config.lookup.breadth * 2)
        return [node for node in nearest if not self._calls.is_suspended(node.peer)]

    def _remember_expiry(self, slot: tuple[str, str], expires_at: float) -> None:
        now = self.now()
        if len(self._expiries) > MAX_SUBKEYS:
            self._expiries = {s: expiry for s, expiry in self._expiries.items() if expiry > now}
        self._expiries[slot] = expires_at
