"""The simulated directory: `fusion.swarm.directory.api.Directory`, with a delay for each record and reader.

In lossy worlds a record never reaches some readers. Of two versions of a record the one that expires last counts, in
whatever order and however often they arrive. Records are neither encoded nor signed, since tests of
`fusion.swarm.directory.records` cover forged and broken ones. A sealed claim here is a token for the record.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import replace
from typing import Any

from worlds.network import Network
from worlds.virtual_time import EPOCH_SECONDS

from fusion.swarm.directory.api import RECORD_TTL_SECONDS
from fusion.swarm.directory.job_order import newest_jobs
from fusion.swarm.directory.records import (
    ClaimRecord,
    Digest,
    JobId,
    JobRecord,
    PeerRecord,
    ProviderRecord,
    Record,
    author_of,
)
from fusion.swarm.errors import RecordError, TransportError
from fusion.swarm.transport import PeerId

KEPT_VERSIONS = 3  # of each record, since some readers may still see an old one

Key = tuple[Any, ...]
# One version of a record: when it expires (unix seconds), the record, and the time from which each reader sees it.
Version = tuple[float, Record, dict[PeerId, float]]


class Bulletin:
    """The records that all directories of a world share.

    `lost` is the chance that a publication never reaches a given reader, `fails` the chance that a call fails.
    """

    def __init__(
        self, network: Network, rng: random.Random, slowest_seconds: float, lost: float, fails: float
    ):
        self.network = network
        self.readers: dict[PeerId, None] = {}
        self.sealed: dict[bytes, tuple[float, Record]] = {}
        self.slowest_seconds = slowest_seconds
        self.lost = lost
        self.fails = fails
        self.rng = rng
        self._slots: dict[Key, dict[Key, list[Version]]] = {}

    @property
    def now(self) -> float:
        return self.network.loop.now + EPOCH_SECONDS

    def look_up_seconds(self) -> float:
        return self.slowest_seconds * (0.1 + 0.9 * self.rng.random())

    def store(
        self, author: PeerId, key: Key, subkey: Key, record: Record, expires_at: float, spread_seconds: float
    ) -> None:
        draw, now, lost = self.rng.random, self.network.loop.now, self.lost
        seen = {}
        for reader in self.readers:
            if reader == author:
                seen[reader] = now
            elif self.network.answers(author, reader) and draw() >= lost:
                seen[reader] = now + spread_seconds * draw() ** 2
            else:
                seen[reader] = 1e18
        versions = self._slots.setdefault(key, {}).setdefault(subkey, [])
        versions.append((expires_at, _dated(record, expires_at), seen))
        if len(versions) > 1 and versions[-2][0] > expires_at:
            versions.sort(key=lambda version: version[0])
        if len(versions) > KEPT_VERSIONS:
            del versions[0]

    def read(self, reader: PeerId, key: Key) -> list[Record]:
        """The records at `key` that `reader` sees now, in the order of authors."""
        slots = self._slots.get(key)
        if not slots:
            return []
        now, unix, records = self.network.loop.now, self.now, []
        for subkey in sorted(slots):
            versions = slots[subkey]
            for expires_at, record, seen in reversed(versions):
                if seen.get(reader, 0.0) <= now:
                    if expires_at > unix:
                        records.append(record)
                    break
            if versions[-1][0] <= unix:
                del slots[subkey]
        return records


class WorldDirectory:
    def __init__(self, bulletin: Bulletin, peer_id: PeerId) -> None:
        self._bulletin = bulletin
        self._peer = peer_id
        bulletin.readers[peer_id] = None
        self._rising = 0.0

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        bulletin = self._bulletin
        if author_of(record) != self._peer:
            raise RecordError(f"a record of {author_of(record)} cannot be signed by {self._peer}")
        # The record is signed now. The real one is stored when the storing nodes are found.
        expires_at = self._expiry(ttl_seconds)
        seconds = bulletin.look_up_seconds()
        # If no record is lost, all can read it once `publish` has returned; otherwise some see it later.
        spread = seconds if bulletin.lost == 0 else 2 * bulletin.slowest_seconds
        bulletin.store(self._peer, *_place(record), record, expires_at, spread)
        await self._wait(seconds)

    def sign(self, data: bytes) -> bytes:
        return signed(self._peer, data)

    @staticmethod
    def verify(peer: str, signature: bytes, data: bytes) -> bool:
        """Static, since caches of verified signatures keep this function, and would keep the world with it."""
        return signature == signed(peer, data)

    def now(self) -> float:
        return self._bulletin.now

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        return await self._read(("peers",))

    async def jobs(self, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        return newest_jobs(await self.job_records())

    async def job(self, job: JobId) -> JobRecord | None:
        return next((record for record in await self.jobs() if record.job == job), None)

    async def job_records(
        self, job: JobId | None = None, *, max_age_seconds: float = 0.0
    ) -> tuple[JobRecord, ...]:
        return tuple(record for record in await self._read(("jobs",)) if job in (None, record.job))

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        return await self._read(("claims", job, stage))

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]:
        return await self._read(("providers", digest))

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        expires_at = self._expiry(ttl_seconds)
        token = f"{len(self._bulletin.sealed)}".encode()
        self._bulletin.sealed[token] = (expires_at, _dated(record, expires_at))
        return token

    def unsealed(self, data: bytes) -> Record:
        expires_at, record = self._bulletin.sealed.get(bytes(data), (0.0, None))
        if record is None:
            raise RecordError("the record has not the form of one")
        if expires_at <= self._bulletin.now:
            raise RecordError("the record has expired or ends too far in the future")
        return record

    async def aclose(self) -> None:
        return

    def _expiry(self, ttl_seconds: float) -> float:
        self._rising = max(self._bulletin.now + ttl_seconds, self._rising + 1e-6)
        return self._rising

    async def _read(self, key: Key) -> tuple[Any, ...]:
        await self._wait()
        return tuple(self._bulletin.read(self._peer, key))

    async def _wait(self, seconds: float | None = None) -> None:
        """Wait as long as a look-up in the DHT takes. Raises TransportError with the chance `fails`."""
        bulletin = self._bulletin
        await asyncio.sleep(bulletin.look_up_seconds() if seconds is None else seconds)
        if bulletin.rng.random() < bulletin.fails:
            raise TransportError("the directory does not answer")


def signed(peer: str, data: bytes) -> bytes:
    """A stand-in for the signature by `peer`'s key."""
    return hashlib.sha256(f"{peer}/".encode() + data).digest()


def _dated(record: Record, expires_at: float) -> Record:
    return replace(record, expires_at=expires_at) if isinstance(record, ClaimRecord) else record


def _place(record: Record) -> tuple[Key, Key]:
    match record:
        case PeerRecord():
            return ("peers",), (record.peer,)
        case JobRecord():
            return ("jobs",), (record.job, record.author)
        case ClaimRecord():
            return ("claims", record.job, record.stage), (record.peer,)
        case ProviderRecord():
            return ("providers", record.digest), (record.peer,)
