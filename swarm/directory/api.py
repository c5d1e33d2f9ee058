"""What the swarm knows about itself: peers, jobs, claims and blob providers, as signed records that soon expire.

Two directories implement it: `fusion.swarm.dht.directory` (hivemind's Kademlia DHT) and `fusion.swarm.memory.network` (one process,
for unit tests). Both share the checks of `fusion.swarm.directory.records` and the rules below.
"""

from __future__ import annotations

from typing import Protocol

from fusion.swarm.directory.keys import SHARDS, jobs_key, links_key, peers_key
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

HEARTBEAT_SECONDS = 2.0
RECORD_TTL_SECONDS = 3 * HEARTBEAT_SECONDS
# The age of cached reads that suffices to watch the swarm: no record read within it expires before its renewal can be read.
GLANCE_SECONDS = 1.5 * HEARTBEAT_SECONDS

PEER_KEYS: tuple[str, ...] = tuple(peers_key(shard) for shard in range(SHARDS))
JOB_KEYS: tuple[str, ...] = tuple(jobs_key(shard) for shard in range(SHARDS))
LINK_KEYS: tuple[str, ...] = tuple(links_key(shard) for shard in range(SHARDS))


class Directory(Protocol):
    """Signed, short-lived records. Readers see only records that pass all checks."""

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        """Sign with our key and store. The record's author must be us (RecordError otherwise)."""

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        """The record signed with our key as `publish` would store it, to be sent to a peer directly. Raises RecordError as
        there."""

    def unsealed(self, data: bytes) -> Record:
        """The record in `data`, which a peer sent us. Raises RecordError unless it passes every check now."""

    def sign(self, data: bytes) -> bytes:
        """Our signature over `data`, which must begin with its purpose, so that no signature can be used for another."""

    def verify(self, peer: str, signature: bytes, data: bytes) -> bool:
        """Whether `signature` is `peer`'s over `data`."""

    def now(self) -> float:
        """Unix seconds, as records are dated."""

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        """The peers of the swarm. With an age, records read no longer ago are returned from the cache, and the others are read from
        as few nodes as suffice: a record may be missing until it is as old as that."""

    async def links(self) -> tuple[LinkRecord, ...]:
        """The measured links of each peer."""

    async def jobs(self, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        """One record per job, the newest of all authors' (`fusion.swarm.directory.job_order`). An age as for `peers`."""

    async def job(self, job: JobId) -> JobRecord | None: ...

    async def job_records(
        self, job: JobId | None = None, *, max_age_seconds: float = 0.0
    ) -> tuple[JobRecord, ...]:
        """The records of the job, or of all jobs, by every author: `fusion.swarm.authority.belief` decides which to believe. An
        age, for all jobs, as for `peers`."""

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """Every live claim of the stage, owners, standbys and released ones."""

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]: ...

    async def aclose(self) -> None: ...
