"""(contract part: the Protocol; hivemind's DHT behind it goes below or beside it)"""

from __future__ import annotations

from typing import Protocol, TypeVar

from fusion.swarm.records import ClaimRecord, Digest, JobId, JobRecord, PeerRecord, ProviderRecord, Record

R = TypeVar("R", PeerRecord, JobRecord, ClaimRecord, ProviderRecord)

HEARTBEAT_SECONDS = 2.0
RECORD_TTL_SECONDS = 3 * HEARTBEAT_SECONDS


class Directory(Protocol):
    """Signed, short-lived records in a DHT. Every reader sees only records that pass all checks."""

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        """Sign with our key and store. The record's author must be us (RecordError otherwise)."""

    async def peers(self) -> tuple[PeerRecord, ...]: ...

    async def jobs(self) -> tuple[JobRecord, ...]:
        """One per job: of several authors the highest (term, step, state finished first)."""

    async def job(self, job: JobId) -> JobRecord | None: ...

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """Every live claim of the stage, owners, standbys and released ones."""

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]: ...

    async def aclose(self) -> None: ...
