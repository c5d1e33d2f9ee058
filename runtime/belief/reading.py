"""The job records of others, and which of them this process believes (`fusion.swarm.authority.belief`). It reads the claims of
a job's stages, remembers their owners, and judges all records by them, again whenever records or claims have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from random import Random
from typing import TYPE_CHECKING

from fusion.runtime.job.errors import JobError
from fusion.swarm.authority.belief import Belief, OwnershipView, believe
from fusion.swarm.claims.owners_seen import Claims
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

if TYPE_CHECKING:
    from fusion.runtime.job.context import Context
    from fusion.runtime.job.manifest import Manifest

READ_STAGES = 256  # of one job that this peer has no part in
# Stages, in an overview of all jobs: anybody may publish records of hundreds of jobs, with thousands of stages each.
READ_IN_ALL = 2048
MANIFEST_SECONDS = 5.0
ALL_MANIFESTS_SECONDS, MANIFESTS_AT_ONCE, MANIFESTS_IN_ALL = 1.0, 16, 64
HINTS = 8
UNKNOWN_STAGES = 16  # that are read of a job without a manifest


def by_job(records: Iterable[JobRecord]) -> dict[JobId, tuple[JobRecord, ...]]:
    """The records of each job, in the order of job ids."""
    grouped: dict[JobId, list[JobRecord]] = {}
    for record in records:
        grouped.setdefault(record.job, []).append(record)
    return {job: tuple(grouped[job]) for job in sorted(grouped)}


def round_robin(random: Random, records: Iterable[JobRecord]) -> list[JobRecord]:
    """The same records, one of each author at a time, the authors in random order: a stranger may publish records of any number
    of jobs, and chooses how their ids begin."""
    by_author: dict[PeerId, list[JobRecord]] = {}
    for record in records:
        by_author.setdefault(record.author, []).append(record)
    authors = list(by_author.values())
    random.shuffle(authors)
    return [record for turn in zip_longest(*authors) for record in turn if record is not None]


@dataclass(frozen=True)
class Judgement:
    """A belief, with the records and the view of the job's owners that it follows from."""

    records: Sequence[JobRecord]
    view: OwnershipView
    belief: Belief | None  # None where there are no records


def judged(
    context: Context, job: JobId, records: Sequence[JobRecord], manifest: Manifest | None, claims: Claims
) -> Belief | None:
    """What to believe of `records`, given these live claims; None where there are no records."""
    return judgement(context, job, records, manifest, claims).belief


def judgement(
    context: Context,
    job: JobId,
    records: Sequence[JobRecord],
    manifest: Manifest | None,
    claims: Claims,
    previous: Judgement | None = None,
) -> Judgement:
    """As `judged`, with its inputs. `previous`: the job's last judgement, returned as it is where its inputs have not changed."""
    law = None if manifest is None else manifest.law(job)
    if law is not None and law.admission.kind == "granted":
        context.leases.know(law)
        for record in records:
            context.access.revoke_all(job, record.proof)
    stages = law.stages if law is not None else max((*claims, 0)) + 1
    verify = context.directory.verify
    view = context.seen.ownership_view(
        job, law, stages, claims, context.peer_id, shown=[record.proof for record in records], verify=verify
    )
    if previous is not None and previous.records == records and previous.view == view:
        return previous
    return Judgement(records, view, believe(records, view, verify))


async def newest(context: Context, job: JobId, manifest: Manifest) -> JobRecord | None:
    """The believed record of a job that we have a part in, by the claims that `Leases` knows already."""
    records = await context.directory.job_records(job)
    claims = {stage: context.leases.recent(job, stage) for stage in range(manifest.stages)}
    belief = judged(context, job, records, manifest, claims)
    return None if belief is None else belief.record


async def read_belief(
    context: Context, job: JobId, records: Sequence[JobRecord] | None = None, manifest: Manifest | None = None
) -> Belief | None:
    """What to believe of any job, by its records, its manifest and its stages' claims, which are read where they are not given.
    None where nobody publishes a record of it. Raises SwarmError."""
    records = await context.directory.job_records(job) if records is None else records
    if records and manifest is None:
        manifest = await manifest_of(context, job, records)
    return await judge_by_claims(context, job, records, manifest)


async def judge_by_claims(
    context: Context,
    job: JobId,
    records: Sequence[JobRecord],
    manifest: Manifest | None,
) -> Belief | None:
    """What to believe of these records, by the claims of the job's stages, which are read. Raises SwarmError."""
    if manifest is not None:
        numbers = range(min(manifest.stages, READ_STAGES))
    else:  # as many as a record states, which may be false
        numbers = range(min(max((record.stages for record in records), default=0), UNKNOWN_STAGES))
    claims = await context.leases.claims_of(job, numbers)
    return judged(context, job, records, manifest, dict(zip(numbers, claims, strict=True)))


@dataclass(frozen=True)
class Seen:
    """A job in an overview. `claims`: the live ones of its stages; of several owners' claims to one stage, the one that counts."""

    belief: Belief
    claims: Claims


async def overview(context: Context) -> tuple[Seen, ...]:
    """All jobs, in the order of their ids, by the claims of READ_STAGES of each, READ_IN_ALL in all, and by the manifests that
    peers give us within ALL_MANIFESTS_SECONDS. Raises SwarmError."""
    published = await context.directory.job_records()
    records = by_job(published)
    jobs = list(dict.fromkeys(record.job for record in round_robin(context.random, published)))
    manifests = await _manifests(context, jobs[:MANIFESTS_IN_ALL], records)
    for job, manifest in manifests.items():
        context.leases.know(manifest.law(job))
    stages = {job: max(record.stages for record in of_job) for job, of_job in records.items()}
    stages |= {job: manifest.stages for job, manifest in manifests.items()}
    places = tuple(islice(_diagonal(jobs, stages), READ_IN_ALL))
    read = await asyncio.gather(*(context.leases.claims(job, stage) for job, stage in places))
    claims: dict[JobId, dict[int, Sequence[ClaimRecord]]] = {job: {} for job in records}
    for (job, stage), live in zip(places, read, strict=True):
        claims[job][stage] = live
    beliefs = {job: judged(context, job, records[job], manifests.get(job), claims[job]) for job in records}
    return tuple(Seen(belief, claims[job]) for job, belief in beliefs.items() if belief is not None)


def _diagonal(jobs: Sequence[JobId], stages: Mapping[JobId, int]) -> Iterator[Place]:
    """READ_STAGES of each job, by the sum of the job's index and the stage's number, the least first: neither many jobs nor jobs
    of many stages keep others from being read."""
    for total in range(len(jobs) + READ_STAGES - 1):
        for index in range(max(0, total - READ_STAGES + 1), min(total + 1, len(jobs))):
            if total - index < stages[jobs[index]]:
                yield jobs[index], total - index


async def _manifests(
    context: Context, jobs: Iterable[JobId], records: Mapping[JobId, Sequence[JobRecord]]
) -> Mapping[JobId, Manifest]:
    """Those that a peer gives us within ALL_MANIFESTS_SECONDS."""
    found, slots = dict[JobId, "Manifest"](), asyncio.Semaphore(MANIFESTS_AT_ONCE)

    async def read(job: JobId) -> None:
        async with slots:
            manifest = await manifest_of(context, job, records[job])
        if manifest is not None:
            found[job] = manifest

    with suppress(TimeoutError):
        async with asyncio.timeout(ALL_MANIFESTS_SECONDS), asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(read(job))
    return found


async def manifest_of(context: Context, job: JobId, records: Sequence[JobRecord]) -> Manifest | None:
    """Fetched from peers, first from those that `records` name; None where no peer sends a valid one within MANIFEST_SECONDS."""
    from fusion.runtime.job import manifest_wire as manifests  # only now: it knows the codecs

    hints = list(
        dict.fromkeys(p for record in records for p in (record.author, record.lead) if p is not None)
    )
    with suppress(SwarmError, JobError, TimeoutError):
        async with asyncio.timeout(MANIFEST_SECONDS):
            data = await context.blobs.read(Digest(job), manifests.MAX_MANIFEST_BYTES, hints[:HINTS])
        return await asyncio.to_thread(manifests.decode, data)
    return None
