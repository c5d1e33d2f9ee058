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
# How old what was read may be for whoever only keeps an eye on the swarm: it has not run out by then, even where it was
# about to be renewed when it was read.
GLANCE_SECONDS = 1.5 * HEARTBEAT_SECONDS

PEER_KEYS: tuple[str, ...] = tuple(peers_key(shard) for shard in range(SHARDS))
JOB_KEYS: tuple[str, ...] = tuple(jobs_key(shard) for shard in range(SHARDS))
LINK_KEYS: tuple[str, ...] = tuple(links_key(shard) for shard in range(SHARDS))


class Directory(Protocol):
    """Signed, short-lived records in a DHT. Every reader sees only records that pass all checks."""

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        """Sign with our key and store. The record's author must be us (RecordError otherwise)."""

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        """The record signed with our key as `publish` would store it, to be shown to a peer directly. RecordError as
        there."""

    def unsealed(self, data: bytes) -> Record:
        """The record that a peer showed us, if it passes every check now. Raises RecordError."""

    def sign(self, data: bytes) -> bytes:
        """Our signature over `data`, which must begin with what it is for: what one room had signed must not be taken
        for what another one signs."""

    def verify(self, peer: str, signature: bytes, data: bytes) -> bool:
        """Whether `peer` signed that."""

    def now(self) -> float:
        """Unix seconds, as records are dated."""

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        """The peers of the swarm. With an age, what was read no longer ago is told again, and the rest is asked of as few
        nodes as will do: what is quite new may be missing, until it is as old."""

    async def links(self) -> tuple[LinkRecord, ...]:
        """What each peer has measured of its links."""

    async def jobs(self, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        """One per job: of several authors the newest word (`fusion.swarm.directory.job_order`). An age as for `peers`."""

    async def job(self, job: JobId) -> JobRecord | None: ...

    async def job_records(
        self, job: JobId | None = None, *, max_age_seconds: float = 0.0
    ) -> tuple[JobRecord, ...]:
        """All that anybody says of the job, or of all jobs: which of it is to be believed is not for the directory to say
        (`fusion.swarm.authority.belief`). An age, for all jobs, as for `peers`."""

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """Every live claim of the stage, owners, standbys and released ones."""

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]: ...

    async def aclose(self) -> None: ...
