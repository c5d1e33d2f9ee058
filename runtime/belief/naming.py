"""Which jobs a name means (`fusion.swarm.authority.names`). The name in a record may be false, so each job with such a record is
inspected: what counts is its manifest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from fusion.runtime.belief.reading import by_job, judge_by_claims, manifest_of, round_robin
from fusion.runtime.belief.shared_work import SharedWork
from fusion.runtime.device.accounts import launches_of
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.authority.belief import Belief
from fusion.swarm.authority.names import Named, may_mean, meant
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.transport import PeerId

INSPECTIONS_AT_ONCE = 8
CANDIDATES = 64  # jobs that are inspected for one name
CHECKS = 256  # signatures that are verified for one name: strangers may send false ones


@dataclass(frozen=True)
class Known:
    """A job as this reader sees it; `manifest` None where no peer sent it."""

    belief: Belief
    manifest: Manifest | None

    @property
    def record(self) -> JobRecord:
        return self.belief.record

    @property
    def named(self) -> Named:
        manifest = self.manifest
        return Named(
            job=self.record.job,
            name=self.record.name if manifest is None else manifest.name,
            author=None if manifest is None else manifest.author,
            owned=self.belief.owned,
            launched_at=0 if manifest is None else manifest.launched_at,
        )


async def inspect(context: Context, job: JobId, records: Sequence[JobRecord]) -> Known:
    """The job of these records (at least one), judged by its manifest and its stages' claims. Raises SwarmError."""
    manifest = await manifest_of(context, job, records)
    belief = await judge_by_claims(context, job, records, manifest)
    assert belief is not None, "there is a record of the job"
    return Known(belief, manifest)


Inspect = Callable[[JobId, Sequence[JobRecord]], Awaitable[Known]]


class SharedInspections:
    """`inspect` for many callers: strangers may request any name, and publish jobs of that name."""

    def __init__(self, context: Context, pause_seconds: float) -> None:
        self._context = context
        self._shared: SharedWork[JobId, Known] = SharedWork(context.clock.monotonic, pause_seconds)

    async def aclose(self) -> None:
        await self._shared.aclose()

    def since(self, moment: float = -math.inf) -> Inspect:
        """`inspect`, by an inspection that began at `moment` or later."""

        async def shared(job: JobId, records: Sequence[JobRecord]) -> Known:
            return await self._shared.get(job, lambda: inspect(self._context, job, records), moment)

        return shared


async def candidates(
    context: Context,
    records: Iterable[JobRecord],
    inspect_job: Inspect | None = None,
    known: Collection[JobId] = (),
) -> tuple[Known, ...]:
    """The jobs of these records, in the order of their ids, inspected by `inspect_job` or else `inspect`. Of more than CANDIDATES
    jobs, those of `known` and CANDIDATES others, round robin over the records' authors. Raises SwarmError."""
    published = tuple(records)
    of_jobs = by_job(published)
    if len(of_jobs) > CANDIDATES:
        turns = dict.fromkeys(record.job for record in round_robin(context.random, published))
        others = (job for job in turns if job not in known)
        chosen = {*known, *islice(others, CANDIDATES)}
        of_jobs = {job: of_job for job, of_job in of_jobs.items() if job in chosen}
    slots = asyncio.Semaphore(INSPECTIONS_AT_ONCE)

    async def one(job: JobId, of_job: Sequence[JobRecord]) -> Known:
        async with slots:
            return await (inspect(context, job, of_job) if inspect_job is None else inspect_job(job, of_job))

    return tuple(await asyncio.gather(*(one(job, of_job) for job, of_job in of_jobs.items())))


async def find(
    context: Context,
    wanted: str,
    known: Collection[PeerId] = (),
    records: Iterable[JobRecord] | None = None,
    inspect_job: Inspect | None = None,
) -> tuple[Known, ...]:
    """The jobs that `wanted`, a name or the beginning of an id, means, best first (`fusion.swarm.authority.names`), of those with
    `records` (by default all that are published). `known`: authors whom the reader knows. `inspect_job`: as for `candidates`.
    Raises Ambiguous, SwarmError."""
    published = tuple(await context.directory.job_records() if records is None else records)
    jobs = {record.job for record in published if may_mean(wanted, record.name, record.job)}
    if len(jobs) > CANDIDATES:
        of_jobs = by_job(record for record in published if record.job in jobs)
        jobs = set(_likely(context, of_jobs, wanted, known)[:CANDIDATES])
    fitting = [record for record in published if record.job in jobs]
    found = {each.record.job: each for each in await candidates(context, fitting, inspect_job)}
    return tuple(found[each.job] for each in meant([each.named for each in found.values()], wanted, known))


def _likely(
    context: Context, records: Mapping[JobId, Sequence[JobRecord]], wanted: str, known: Collection[PeerId]
) -> list[JobId]:
    """These jobs, first those launched by an author whom `wanted` names or the reader knows; each class round robin over the
    records' authors, as a stranger may give any number of jobs this name, and chooses how their ids begin."""
    name, _, author = wanted.rpartition("@")
    turns = round_robin(context.random, (record for of_job in records.values() for record in of_job))
    checks = 0

    def is_meant(peer: PeerId) -> bool:
        return peer in known or bool(name and author and peer.startswith(author))

    def is_checked(signer: PeerId) -> bool:
        nonlocal checks
        checks += is_meant(signer)
        return is_meant(signer) and checks <= CHECKS

    first = [
        record.job
        for record in turns
        if is_meant(record.author) or launches_of(record, context.directory.verify, is_checked)
    ]
    return list(dict.fromkeys([*first, *(record.job for record in turns)]))
