"""The directory of one process: records are signed, checked and kept as the nodes of the DHT do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from fusion.swarm.directory.api import JOB_KEYS, LINK_KEYS, PEER_KEYS, RECORD_TTL_SECONDS
from fusion.swarm.directory.job_order import newest_jobs
from fusion.swarm.directory.keys import claims_key, key_of, providers_key, subkey_of
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
from fusion.swarm.directory.sealing import open_record, seal, unseal_anywhere
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity, verify
from fusion.swarm.memory.network import MemoryNetwork

logger = logging.getLogger(__name__)


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

    def sign(self, data: bytes) -> bytes:
        return self._identity.sign(data)

    def verify(self, peer: str, signature: bytes, data: bytes) -> bool:
        return verify(peer, signature, data)

    def now(self) -> float:
        return self._clock()

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        return tuple(
            record for key in PEER_KEYS for record in self._read(key) if isinstance(record, PeerRecord)
        )

    async def links(self) -> tuple[LinkRecord, ...]:
        return tuple(
            record for key in LINK_KEYS for record in self._read(key) if isinstance(record, LinkRecord)
        )

    async def jobs(self, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        return newest_jobs(await self.words())

    async def job(self, job: JobId) -> JobRecord | None:
        newest = newest_jobs(await self.words(job))
        return newest[0] if newest else None

    async def words(self, job: JobId | None = None, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        found = [record for key in JOB_KEYS for record in self._read(key) if isinstance(record, JobRecord)]
        return tuple(record for record in found if job in (None, record.job))

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        return tuple(
            record for record in self._read(claims_key(job, stage)) if isinstance(record, ClaimRecord)
        )

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]:
        return tuple(
            record for record in self._read(providers_key(digest)) if isinstance(record, ProviderRecord)
        )

    async def sealed_under(self, keys: Sequence[str]) -> list[list[bytes]]:
        """As `fusion.swarm.thin.directory_server.SealedDirectory`; whoever reads them checks them."""
        return [[data for _, data in self._replica.get(key, {}).values()] for key in keys]

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
