"""The directory of a command, read through the peer that runs on this machine, at its control socket."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgpack

from fusion.swarm.control.client import ControlTransport, Gone
from fusion.swarm.directory import sealing
from fusion.swarm.directory.api import RECORD_TTL_SECONDS, Directory
from fusion.swarm.directory.by_key import R
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
from fusion.swarm.errors import FrameError, PeerUnreachable
from fusion.swarm.identity import verify


class ControlDirectory:
    """Implements `fusion.swarm.directory.api.Directory`, read only, through the running peer."""

    def __init__(self, transport: ControlTransport) -> None:
        self._transport = transport
        self._ahead = 0.0  # seconds by which the swarm's clock, as the peer knows it, is ahead of ours

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        raise PeerUnreachable("a command publishes nothing through its peer")

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        raise PeerUnreachable("a command publishes nothing through its peer")

    def unsealed(self, data: bytes) -> Record:
        raise PeerUnreachable("a command is shown nothing")

    def sign(self, data: bytes) -> bytes:
        raise PeerUnreachable("a command signs nothing through its peer")

    def verify(self, peer: str, signature: bytes, data: bytes) -> bool:
        return verify(peer, signature, data)

    def now(self) -> float:
        return time.time() + self._ahead

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        return await self._read(
            PeerRecord, "peers", {}, lambda there: there.peers(max_age_seconds=max_age_seconds)
        )

    async def links(self) -> tuple[LinkRecord, ...]:
        return await self._read(LinkRecord, "links", {}, lambda there: there.links())

    async def jobs(self, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        return await self._read(
            JobRecord, "jobs", {}, lambda there: there.jobs(max_age_seconds=max_age_seconds)
        )

    async def job(self, job: JobId) -> JobRecord | None:
        async def there(directory: Directory) -> tuple[JobRecord, ...]:
            found = await directory.job(job)
            return () if found is None else (found,)

        return next(iter(await self._read(JobRecord, "job", {"job": job}, there)), None)

    async def job_records(
        self, job: JobId | None = None, *, max_age_seconds: float = 0.0
    ) -> tuple[JobRecord, ...]:
        header = {} if job is None else {"job": job}
        return await self._read(JobRecord, "words", header, lambda there: there.job_records(job))

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        header = {"job": job, "stage": stage}
        return await self._read(ClaimRecord, "claims", header, lambda there: there.claims(job, stage))

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]:
        header = {"digest": digest}
        return await self._read(ProviderRecord, "providers", header, lambda there: there.providers(digest))

    async def aclose(self) -> None:
        pass

    async def _read(
        self,
        kind: type[R],
        query: str,
        header: Mapping[str, Any],
        elsewhere: Callable[[Directory], Awaitable[tuple[R, ...]]],
    ) -> tuple[R, ...]:
        try:
            answer = await self._transport.request(query, header)
            found = [sealing.decode(body) for body in msgpack.unpackb(answer.payload)]
            self._ahead = float(answer.header.get("now", time.time())) - time.time()
            for at, end in enumerate(answer.header.get("ends", ())):
                claim = found[at]
                if isinstance(claim, ClaimRecord):
                    found[at] = replace(claim, expires_at=float(end))
        except Gone:
            return await elsewhere((await self._transport.moved())[1])
        except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
            raise FrameError(f"the running peer's answer makes no sense: {error}") from error
        return tuple(record for record in found if isinstance(record, kind))
