"""What is said of jobs, and what of it this process believes (`fusion.swarm.authority.belief`): it reads the claims of a job's
stages, remembers who owned them, and judges all words by that, anew each time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cachetools import FIFOCache

from fusion.runtime.job.errors import JobError
from fusion.swarm.authority.belief import Belief, Sight, believe
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.job.manifest import Manifest
    from fusion.swarm.authority.law import JobLaw

REMEMBERED_STAGES = 16_384  # whose owners are kept in mind
REMEMBERED_OWNERS = 4  # of each
READ_STAGES = 256  # of one job, by whoever has no part in it
MANIFEST_SECONDS = 5.0
HINTS = 8

Claims = Mapping[int, Sequence[ClaimRecord]]  # the live ones, by stage


class OwnersSeen:
    """Who owned which stage, and under which term, as far as anybody here has looked."""

    def __init__(self) -> None:
        self._seen: FIFOCache[tuple[JobId, int], dict[tuple[int, PeerId], None]] = FIFOCache(
            REMEMBERED_STAGES
        )

    def see(self, job: JobId, stage: int, claims: Iterable[ClaimRecord]) -> ClaimRecord | None:
        """The owner by these live claims, who is remembered."""
        owner = winner(claims)
        if owner is not None:
            seen = self._seen.setdefault((job, stage), {})
            seen.pop((owner.term, owner.peer), None)
            seen[owner.term, owner.peer] = None
            while len(seen) > REMEMBERED_OWNERS:
                del seen[next(iter(seen))]
        return owner

    def sight(self, job: JobId, law: JobLaw | None, stages: int, claims: Claims, us: PeerId) -> Sight:
        """What is known of the owners of the first `stages` of a job, whose live `claims` were just read."""
        found = {stage: self.see(job, stage, said) for stage, said in claims.items() if stage < stages}
        owners = {stage: (claim.peer, claim.term) for stage, claim in found.items() if claim is not None}
        held = frozenset(
            (stage, term, peer) for stage in range(stages) for term, peer in self._seen.get((job, stage), ())
        )
        return Sight(law=law, owners=owners, held=held, us=us)


def by_job(records: Iterable[JobRecord]) -> dict[JobId, tuple[JobRecord, ...]]:
    """All that is said of each job, in the order of job ids."""
    found: dict[JobId, list[JobRecord]] = {}
    for record in records:
        found.setdefault(record.job, []).append(record)
    return {job: tuple(found[job]) for job in sorted(found)}


def judged(
    context: Context, job: JobId, words: Sequence[JobRecord], manifest: Manifest | None, claims: Claims
) -> Belief | None:
    """What to believe of `words`, by these live claims; None where there are none."""
    law = None if manifest is None else manifest.law(job)
    stages = law.stages if law is not None else max((*claims, 0)) + 1
    sight = context.seen.sight(job, law, stages, claims, context.peer_id)
    return believe(words, sight, context.directory.verify)


async def newest(context: Context, job: JobId, manifest: Manifest) -> JobRecord | None:
    """What to believe of a job that we have a part in, of whose claims we need not read more than we know."""
    words = await context.directory.words(job)
    claims = {stage: context.leases.recent(job, stage) for stage in range(manifest.stages)}
    found = judged(context, job, words, manifest, claims)
    return None if found is None else found.record


async def look(
    context: Context, job: JobId, words: Sequence[JobRecord] | None = None, manifest: Manifest | None = None
) -> Belief | None:
    """What to believe of any job: its manifest, all that is said of it, and the claims of its stages are read. None where
    nobody speaks of it. Raises SwarmError."""
    if words is None:
        words = await context.directory.words(job)
    if not words:
        return None
    if manifest is None:
        manifest = await manifest_of(context, job, words)
    stages = manifest.stages if manifest is not None else max(record.stages for record in words)
    numbers = range(min(stages, READ_STAGES))
    claims = await asyncio.gather(*(context.leases.claims(job, stage) for stage in numbers))
    return judged(context, job, words, manifest, dict(zip(numbers, claims, strict=True)))


async def manifest_of(context: Context, job: JobId, words: Sequence[JobRecord]) -> Manifest | None:
    """None where nobody gives it to us in time, or it is none."""
    from fusion.runtime.job import manifest_wire as manifests  # only now: it knows the codecs

    hints = list(dict.fromkeys(p for record in words for p in (record.author, record.lead) if p is not None))
    with suppress(SwarmError, JobError, TimeoutError):
        async with asyncio.timeout(MANIFEST_SECONDS):
            data = await context.blobs.read(Digest(job), manifests.MAX_MANIFEST_BYTES, hints[:HINTS])
        return await asyncio.to_thread(manifests.decode, data)
    return None
