"""What this peer sees of the swarm's jobs and of who has their stages, from look to look."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from cachetools import FIFOCache

from fusion.dag.ir.opset import OPSET_VERSION
from fusion.runtime.hosting.jobs.board import JobBoard
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.manifest_shelf import ManifestShelf
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.job_order import ENDED
from fusion.swarm.directory.records import ClaimRecord, JobId, JobRecord, Place
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

NEWER_JOBS = 1024  # that were named to whoever reads our log

OpenJob = tuple[JobRecord, Manifest]  # one that goes on, whose manifest is here and whose graph we can run
OpenJobs = Mapping[JobId, OpenJob]
StagesClaims = Mapping[Place, tuple[ClaimRecord, ...]]  # the live claims of each stage that was looked at


class JobView:
    """At most `places` stages that others have, or nobody, are looked at at once. `spawn` runs work beside everything else,
    `arrived` is called when a manifest has come."""

    def __init__(
        self,
        context: Context,
        board: JobBoard,
        places: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        arrived: Callable[[], None],
    ) -> None:
        self._context = context
        self._board = board
        self._places = places
        self._shelf = ManifestShelf(context.blobs, spawn, arrived, context.clock.monotonic)
        self._newer: FIFOCache[JobId, None] = FIFOCache(NEWER_JOBS)

    async def records(self, max_age_seconds: float) -> tuple[JobRecord, ...]:
        """What the directory says of all jobs."""
        records = await self._context.directory.jobs(max_age_seconds=max_age_seconds)
        for record in records:
            self._context.leases.observe(record.job, 0, record.term)
        return records

    def open_jobs(self, records: Sequence[JobRecord]) -> OpenJobs:
        """Those that go on, as far as their manifests are here (the others' are fetched) and ask for no newer op-set than
        ours: in such a job we have no part, and it goes on without us."""
        jobs: dict[JobId, OpenJob] = {}
        for record in records:
            if not is_over(record) and not self._board.over(record):
                manifest = self._shelf.get(record)
                if manifest is None:
                    continue
                self._context.leases.know(manifest.law(record.job))
                if self._runs(record, manifest):
                    jobs[record.job] = (record, manifest)
        self._shelf.keep_only({record.job for record in records})
        return jobs

    def _runs(self, record: JobRecord, manifest: Manifest) -> bool:
        if manifest.opset <= OPSET_VERSION:
            return True
        if record.job not in self._newer:
            self._newer[record.job] = None
            what = (manifest.name, manifest.opset, OPSET_VERSION)
            log.warning("job %s needs op-set %d: this peer knows %d and leaves it to newer ones", *what)
        return False

    async def claims(
        self, jobs: OpenJobs, hosted: Collection[Place], ours: Collection[JobId]
    ) -> StagesClaims:
        """The claims of `stages_to_read`, and of those that run here, in `hosted`: these are read with every renewal."""
        leases, free_bytes = self._context.leases, self._context.memory.free_bytes
        places = stages_to_read(
            jobs, hosted, ours, self._context.peer_id, free_bytes, self._context.random.shuffle
        )[: self._places]
        claims = await asyncio.gather(*(leases.claims(*place) for place in places))
        recent = {place: leases.recent(*place) for place in hosted if place[0] in jobs}
        return {**dict(zip(places, claims, strict=True)), **recent}

    async def leaderless(
        self, ours: Collection[JobId], hosted: Collection[Place], claims: StagesClaims
    ) -> set[JobId]:
        """Those of our jobs whose first stage nobody owns."""
        others = [job for job in ours if (job, 0) not in hosted]
        unread = [job for job in others if (job, 0) not in claims]
        read = await asyncio.gather(*(self._context.leases.claims(job, 0) for job in unread))
        leads = dict(zip(unread, read, strict=True))
        return {job for job in others if winner(leads[job] if job in leads else claims[job, 0]) is None}


def is_over(record: JobRecord) -> bool:
    """Whether it says that the job has ended."""
    return record.state in ENDED


def stages_to_read(
    jobs: OpenJobs,
    hosted: Collection[Place],
    ours: Collection[JobId],
    us: PeerId,
    free_memory_bytes: int,
    shuffle: Callable[[list[Place]], object],
) -> list[Place]:
    """The stages whose claims we should know: those that we might host, and all of the jobs that we have a hand in (when
    an owner vanishes we should know its standbys). Authors take turns; of each first what was proposed to us, then what
    is of `ours`."""
    places = [
        (job, stage)
        for job, (_, manifest) in jobs.items()
        for stage in range(manifest.stages)
        if (job, stage) not in hosted and (job in ours or manifest.needed_bytes(stage) <= free_memory_bytes)
    ]
    shuffle(places)  # where there are too many, others next time
    places.sort(key=lambda place: (jobs[place[0]][1].proposed[place[1]] != us, place[0] not in ours))
    turns: Counter[PeerId] = Counter()
    ranks = {}
    for place in places:  # authors take turns, so that nobody's many stages keep us from looking at others'
        author = jobs[place[0]][1].author
        ranks[place] = turns[author]
        turns[author] += 1
    return sorted(places, key=ranks.__getitem__)
