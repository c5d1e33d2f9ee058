"""The last word on jobs that this peer does not lead but holds, or held, stages of: repeated while nobody else says it,
and kept on disk. A job that no record names any more could never find another lead."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from fusion.runtime.hosting.jobs.job_files import JobFiles
from fusion.swarm.directory.job_order import ENDED, job_order
from fusion.swarm.directory.records import Digest, JobId, JobRecord
from fusion.swarm.transport import PeerId

T = TypeVar("T")
Version = tuple[int, Digest | None]  # term and snapshot of a job

log = logging.getLogger(__name__)

REMEMBERED_JOBS = 100
REMEMBERED_ENDS = 1000
REFRESH_SECONDS = 6 * 3600.0  # a file that is much older speaks of a job that may have ended long ago


class JobGossip:
    """`us` repeats them; `files` None: nothing is kept on disk."""

    def __init__(
        self, us: PeerId, files: JobFiles | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._us = us
        self._files = files
        self._words: dict[JobId, JobRecord] = {}
        self._clock = clock
        self._kept: dict[JobId, tuple[Version, float]] = {}  # what the files say, and since when
        self._concluded: dict[JobId, JobRecord] = {}  # jobs that ended before our eyes, and how
        self._ends: dict[JobId, JobRecord] = {}  # jobs that ended as the directory said
        self._keeping = asyncio.Lock()  # of two that write, the later one knows better
        self._orphans: set[JobId] = set()  # on disk, but none of our business any more
        self.concerned: frozenset[JobId] = frozenset()  # jobs that we hold stages of, or stand by for
        self.repeated: tuple[JobRecord, ...] = ()  # what nobody else says

    async def load(self) -> None:
        """What the files say is repeated until somebody knows better."""
        if self._files is None:
            return
        for record in await asyncio.to_thread(self._files.load):
            self._kept[record.job] = (_version(record), -math.inf)  # written again soon: the job lives
            self.remember(record)
        self.repeated = tuple(self._words.values())

    def remember(self, record: JobRecord) -> None:
        """Somebody said so, or we did."""
        record = self._as_ended(record)
        before = self._words.pop(record.job, None)
        self._words[record.job] = record if before is None else max(record, before, key=job_order)
        while len(self._words) > REMEMBERED_JOBS:
            del self._words[next(iter(self._words))]

    def conclude(self, record: JobRecord) -> None:
        """The job has ended, as `record` says: its own lead told us. Whoever says later that it runs, under whatever
        term, has not heard of it, and hears it from us."""
        self._concluded.pop(record.job, None)
        self._concluded[record.job] = record
        while len(self._concluded) > REMEMBERED_ENDS:
            del self._concluded[next(iter(self._concluded))]
        self.remember(record)
        others = [each for each in self.repeated if each.job != record.job]
        self.repeated = (*others, self._words[record.job])

    def concluded(self, job: JobId) -> bool:
        return job in self._concluded

    def _as_ended(self, record: JobRecord) -> JobRecord:
        """What we say of a job whose end we know, where somebody says that it goes on: above all that was said."""
        end = self._concluded.get(record.job)
        if end is None or record.state in ENDED:
            return record
        newest = max(end, record, key=lambda each: each.snapshot_step)
        return replace(
            end,
            term=max(end.term, record.term),
            step=max(end.step, record.step),
            snapshot=newest.snapshot,
            snapshot_step=newest.snapshot_step,
        )

    def forget(self, job: JobId) -> None:
        """We lead the job now, and say ourselves how it stands."""
        self._words.pop(job, None)

    def hear(
        self,
        records: Sequence[JobRecord],
        concerned: Collection[JobId],
        leaderless: Collection[JobId],
        led: Collection[JobId],
    ) -> None:
        """What the directory says of all jobs, which of them we hold stages of or stand by for, which of those nobody
        leads, and which ones we speak for as their lead."""
        self.concerned = frozenset(concerned)
        said = {record.job: record for record in records}
        for job in {*concerned, *self._words} - set(led):
            if job in said:
                self.remember(said[job])
        self.repeated = tuple(
            record
            for job, record in self._words.items()
            if said.get(job) != record
            or record.author == self._us
            or (job in leaderless and record.state not in ENDED)
        )
        self.repeated += self._denied(said, {*self._words, *led})
        self._orphans = {
            job
            for job in set(self._kept) - self.concerned - set(led)
            # Only once somebody runs the job: at a cold start it is for us to say that there is one.
            if job in said and said[job].lead not in (None, self._us) and said[job].author != self._us
        }

    def _denied(self, said: Mapping[JobId, JobRecord], others: Collection[JobId]) -> tuple[JobRecord, ...]:
        """The ends of jobs which somebody who has not heard of them says to go on, under no higher term: nobody who
        has would work for them, so that they would wait for ever."""
        for job, record in said.items():
            if record.state in ENDED:
                self._ends.pop(job, None)
                self._ends[job] = record
        while len(self._ends) > REMEMBERED_ENDS:
            del self._ends[next(iter(self._ends))]
        running = [
            r for job, r in said.items() if r.state not in ENDED and job in self._ends and job not in others
        ]
        return tuple(self._ends[r.job] for r in running if r.term <= self._ends[r.job].term)

    def get(self, job: JobId) -> JobRecord | None:
        return self._words.get(job)

    def of_concern(self) -> list[JobRecord]:
        """The last words on jobs of whose stages we hold some, or stand by for them, and which we do not lead."""
        return [self._words[job] for job in self.concerned if job in self._words]

    async def keep(self, records: Iterable[JobRecord]) -> None:
        """Bring the files up to date with what we believe of the jobs that concern us."""
        if self._files is None:
            return
        async with self._keeping:
            await self._keep(self._files, records)

    async def _keep(self, files: JobFiles, records: Iterable[JobRecord]) -> None:
        wanted = {record.job: record for record in records}
        for job, record in wanted.items():
            kept = self._kept.get(job)
            due = kept is None or kept[0] != _version(record) or self._clock() - kept[1] >= REFRESH_SECONDS
            if due and record.state not in ENDED:
                self._kept[job] = (
                    _version(record),
                    self._clock(),
                )  # a disk that does not take it is told of once
                await self._write(files.save, record, record.name)
        known = {**self._words, **wanted}
        ended = {job for job in self._kept if job in known and known[job].state in ENDED}
        for job in ended | (self._orphans & self._kept.keys() - wanted.keys()):
            del self._kept[job]
            await self._write(files.remove, job, job[:12])

    async def _write(self, change: Callable[[T], None], what: T, name: str) -> None:
        try:
            await asyncio.to_thread(change, what)
        except OSError as error:
            log.warning("the file of job %s: %s", name, error.strerror or error)


def _version(record: JobRecord) -> Version:
    return record.term, record.snapshot
