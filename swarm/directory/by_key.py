"""The part that directories which read records by key share: which keys a query reads, and what it returns of their records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from fusion.swarm.directory.api import JOB_KEYS, LINK_KEYS, PEER_KEYS
from fusion.swarm.directory.job_order import newest_jobs
from fusion.swarm.directory.keys import claims_key, jobs_key, providers_key, shard
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
from fusion.swarm.directory.sealing import unseal_anywhere
from fusion.swarm.identity import verify

R = TypeVar("R", PeerRecord, JobRecord, ClaimRecord, ProviderRecord, LinkRecord)


class DirectoryByKey(ABC):
    """The reading half of `fusion.swarm.directory.api.Directory`."""

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    async def records(
        self, keys: Sequence[str], kind: type[R], *, max_age_seconds: float = 0.0
    ) -> tuple[R, ...]:
        """The records of that kind under the keys that pass every check. An age as for `Directory.peers`."""

    def unsealed(self, data: bytes) -> Record:
        return unseal_anywhere(data, self.now()).record

    def verify(self, peer: str, signature: bytes, data: bytes) -> bool:
        return verify(peer, signature, data)

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        return await self.records(PEER_KEYS, PeerRecord, max_age_seconds=max_age_seconds)

    async def links(self) -> tuple[LinkRecord, ...]:
        return await self.records(LINK_KEYS, LinkRecord)

    async def jobs(self, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        return newest_jobs(await self.job_records(max_age_seconds=max_age_seconds))

    async def job(self, job: JobId) -> JobRecord | None:
        newest = newest_jobs(await self.job_records(job))
        return newest[0] if newest else None

    async def job_records(
        self, job: JobId | None = None, *, max_age_seconds: float = 0.0
    ) -> tuple[JobRecord, ...]:
        if job is None:
            return await self.records(JOB_KEYS, JobRecord, max_age_seconds=max_age_seconds)
        found = await self.records((jobs_key(shard(job)),), JobRecord)
        return tuple(record for record in found if record.job == job)

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        return await self.records((claims_key(job, stage),), ClaimRecord)

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]:
        return await self.records((providers_key(digest),), ProviderRecord)
