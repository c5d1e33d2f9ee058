"""What is said of jobs, and what of it this process believes (`fusion.swarm.authority.belief`): it reads the claims of a job's
stages, remembers who owned them, and judges all records by that, anew whenever either has changed."""

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

READ_STAGES = 256  # of one job, by whoever has no part in it
# Stages, where all jobs are looked at: anybody may speak of hundreds, with thousands of stages each.
READ_IN_ALL = 2048
MANIFEST_SECONDS = 5.0
ALL_MANIFESTS_SECONDS, MANIFESTS_AT_ONCE, MANIFESTS_IN_ALL = 1.0, 16, 64
HINTS = 8
UNKNOWN_STAGES = 16  # of a job whose manifest is not here


def by_job(records: Iterable[JobRecord]) -> dict[JobId, tuple[JobRecord, ...]]:
    """All that is said of each job, in the order of job ids."""
    found: dict[JobId, list[JobRecord]] = {}
    for record in records:
        found.setdefault(record.job, []).append(record)
    return {job: tuple(found[job]) for job in sorted(found)}


def in_turn(random: Random, records: Iterable[JobRecord]) -> list[JobRecord]:
    """The same records, one of everybody who speaks at a time, whoever is first: a stranger may speak of any number of jobs, and
    chooses how their ids begin."""
    by_speaker: dict[PeerId, list[JobRecord]] = {}
    for record in records:
        by_speaker.setdefault(record.author, []).append(record)
    speakers = list(by_speaker.values())
    random.shuffle(speakers)
    return [record for turn in zip_longest(*speakers) for record in turn if record is not None]


@dataclass(frozen=True)
class Judgement:
    """What was believed of these records, and by which view of the job's owners: the same of both give the same again."""

    records: Sequence[JobRecord]
    view: OwnershipView
    belief: Belief | None  # None where there are no records


def judged(
    context: Context, job: JobId, records: Sequence[JobRecord], manifest: Manifest | None, claims: Claims
) -> Belief | None:
    """What to believe of `records`, by these live claims; None where there are none."""
    return judgement(context, job, records, manifest, claims).belief


def judgement(
    context: Context,
    job: JobId,
    records: Sequence[JobRecord],
    manifest: Manifest | None,
    claims: Claims,
    before: Judgement | None = None,
) -> Judgement:
    """`judged`, with what it went by. `before`: the last one of the job, which is most of the work where nothing is new."""
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
    if before is not None and before.records == records and before.view == view:
        return before
    return Judgement(records, view, believe(records, view, verify))


async def newest(context: Context, job: JobId, manifest: Manifest) -> JobRecord | None:
    """What to believe of a job that we have a part in, of whose claims we need not read more than we know."""
    records = await context.directory.job_records(job)
    claims = {stage: context.leases.recent(job, stage) for stage in range(manifest.stages)}
    found = judged(context, job, records, manifest, claims)
    return None if found is None else found.record


async def look(
    context: Context, job: JobId, records: Sequence[JobRecord] | None = None, manifest: Manifest | None = None
) -> Belief | None:
    """What to believe of any job: its manifest, all that is said of it, and the claims of its stages are read. None where
    nobody speaks of it. Raises SwarmError."""
    records = await context.directory.job_records(job) if records is None else records
    if records and manifest is None:
        manifest = await manifest_of(context, job, records)
    return await weigh(context, job, records, manifest)


async def weigh(
    context: Context,
    job: JobId,
    records: Sequence[JobRecord],
    manifest: Manifest | None,
) -> Belief | None:
    """What to believe of these records, by the claims of the job's stages, which are read. Raises SwarmError."""
    if manifest is not None:
        numbers = range(min(manifest.stages, READ_STAGES))
    else:  # it has as many as whoever speaks of it says
        numbers = range(min(max((record.stages for record in records), default=0), UNKNOWN_STAGES))
    claims = await context.leases.claims_of(job, numbers)
    return judged(context, job, records, manifest, dict(zip(numbers, claims, strict=True)))


@dataclass(frozen=True)
class Seen:
    """A job in a look at all of them. `claims`: the live ones of its stages, of those to own one the one that counts."""

    belief: Belief
    claims: Claims


async def overview(context: Context) -> tuple[Seen, ...]:
    """All jobs, in the order of their ids, by the claims of READ_STAGES of each, READ_IN_ALL in all; and by their manifests, as
    far as these are given to us at once. Raises SwarmError."""
    records = await context.directory.job_records()
    records_by_job = by_job(records)
    jobs = list(dict.fromkeys(record.job for record in in_turn(context.random, records)))
    manifests = await _manifests(context, jobs[:MANIFESTS_IN_ALL], records_by_job)
    for job, manifest in manifests.items():
        context.leases.know(manifest.law(job))
    stages = {job: max(record.stages for record in said) for job, said in records_by_job.items()}
    stages |= {job: manifest.stages for job, manifest in manifests.items()}
    places = tuple(islice(_stages_in_turn(jobs, stages), READ_IN_ALL))
    found = await asyncio.gather(*(context.leases.claims(job, stage) for job, stage in places))
    claims: dict[JobId, dict[int, Sequence[ClaimRecord]]] = {job: {} for job in records_by_job}
    for (job, stage), live in zip(places, found, strict=True):
        claims[job][stage] = live
    beliefs = {
        job: judged(context, job, records_by_job[job], manifests.get(job), claims[job])
        for job in records_by_job
    }
    return tuple(Seen(belief, claims[job]) for job, belief in beliefs.items() if belief is not None)


def _stages_in_turn(jobs: Sequence[JobId], stages: Mapping[JobId, int]) -> Iterator[Place]:
    """READ_STAGES of each job, those first whose place in it and its own place among the jobs are the least together: neither many
    jobs nor jobs of many stages keep others from being looked at."""
    for both in range(len(jobs) + READ_STAGES - 1):
        for place in range(max(0, both - READ_STAGES + 1), min(both + 1, len(jobs))):
            if both - place < stages[jobs[place]]:
                yield jobs[place], both - place


async def _manifests(
    context: Context, jobs: Iterable[JobId], records_by_job: Mapping[JobId, Sequence[JobRecord]]
) -> Mapping[JobId, Manifest]:
    """Those that somebody gives us in ALL_MANIFESTS_SECONDS."""
    found, busy = dict[JobId, "Manifest"](), asyncio.Semaphore(MANIFESTS_AT_ONCE)

    async def read(job: JobId) -> None:
        async with busy:
            manifest = await manifest_of(context, job, records_by_job[job])
        if manifest is not None:
            found[job] = manifest

    with suppress(TimeoutError):
        async with asyncio.timeout(ALL_MANIFESTS_SECONDS), asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(read(job))
    return found


async def manifest_of(context: Context, job: JobId, records: Sequence[JobRecord]) -> Manifest | None:
    """None where nobody gives it to us in time, or it is none."""
    from fusion.runtime.job import manifest_wire as manifests  # only now: it knows the codecs

    hints = list(
        dict.fromkeys(p for record in records for p in (record.author, record.lead) if p is not None)
    )
    with suppress(SwarmError, JobError, TimeoutError):
        async with asyncio.timeout(MANIFEST_SECONDS):
            data = await context.blobs.read(Digest(job), manifests.MAX_MANIFEST_BYTES, hints[:HINTS])
        return await asyncio.to_thread(manifests.decode, data)
    return None
