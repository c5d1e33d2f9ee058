"""The jobs that a peer knows of: the newest record of each, which ones it leads, which have ended and how. The one memory
of that. Pure: `gossip` brings in what the directory and our own stages say and publishes what is to be said, `server`
answers from it, and `files` keeps on disk what outlives the process.

Of two records of one job, our own or somebody else's, the greater in `job_order` counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cachetools import FIFOCache

from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import Progress
from fusion.swarm.directory.job_order import ENDED, job_order
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord
from fusion.swarm.printable import one_line
from fusion.swarm.transport import PeerId

REMEMBERED_RECORDS = 100
REMEMBERED_ENDS = 1000
STOPPED = "stopped by whoever launched it"
CONCLUDED = frozenset({"done", "stopped"})  # ends that no later lead can change


@dataclass(frozen=True, kw_only=True)
class Tombstone:
    """A job has ended: whatever is said of it under this term or a lower one, nobody works for it."""

    term: int = -1  # of its lead, as we knew it then
    record: JobRecord | None = None  # how it ended, where anybody has said
    progress: Progress | None = None  # the figures that it ended with, if a stage of it ran here
    certain: bool = False  # it was done or stopped before our eyes: who leads it later has not heard of it


NONE = Tombstone()


@dataclass
class Led:
    """A job whose first stage is ours."""

    record: JobRecord
    author: PeerId
    told: tuple[Digest | None, str]  # the snapshot and state that everybody was told of at once
    stop: tuple[bytes, ...] = ()  # the author's word that it is to stop, once it has come to its end


class JobBoard:
    """`us` says what is said here. Jobs are forgotten, those first that nobody has spoken of for longest."""

    def __init__(self, us: PeerId) -> None:
        self.concerned: frozenset[JobId] = frozenset()  # jobs that we hold stages of, or stand by for
        self.repeated: tuple[JobRecord, ...] = ()  # of jobs that we do not lead, which nobody else publishes
        self._us = us
        self._open: dict[JobId, tuple[JobRecord, Manifest]] = {}
        self._led: dict[JobId, Led] = {}
        # On jobs of others that concern us, or did.
        self._records: FIFOCache[JobId, JobRecord] = FIFOCache(REMEMBERED_RECORDS)
        self._tombstones: FIFOCache[JobId, Tombstone] = FIFOCache(REMEMBERED_ENDS)
        self._elsewhere: frozenset[JobId] = frozenset()  # run by others, and none of our business any more

    # --- jobs to work for

    def see(self, jobs: Mapping[JobId, tuple[JobRecord, Manifest]]) -> None:
        """These go on now; what ends meanwhile is taken out of them."""
        self._open = dict(jobs)

    def get(self, job: JobId) -> tuple[JobRecord, Manifest] | None:
        """Of a job that goes on."""
        return self._open.get(job)

    def over(self, record: JobRecord) -> bool:
        """Whether the job was over when that was said of it."""
        tombstone = self._tombstones.get(record.job, NONE)
        return tombstone.certain or record.term <= tombstone.term

    def buried(self, job: JobId) -> bool:
        """Whether we know of an end of the job: nobody takes it up again by a stranger's word."""
        return job in self._tombstones

    def record(self, job: JobId) -> JobRecord | None:
        """The newest on a job that we lead or that concerns us, or did."""
        return self._led[job].record if job in self._led else self._records.get(job)

    # --- jobs that we lead

    @property
    def led(self) -> tuple[JobRecord, ...]:
        return tuple(led.record for led in self._led.values())

    def leads(self, job: JobId) -> bool:
        return job in self._led

    def author(self, job: JobId) -> PeerId:
        """Who launched a job that we lead."""
        return self._led[job].author

    def lead(self, claim: ClaimRecord, manifest: Manifest, before: JobRecord | None) -> None:
        """We own the first stage from now on; `before` is the newest record of the job."""
        # Whoever takes a stage over reads it here: a new lead must not make the swarm forget the snapshot.
        resumed = before if before is not None and before.snapshot is not None else None
        record = JobRecord(
            job=claim.job, name=manifest.name, kind=manifest.kind, state="running", term=claim.term,
            step=resumed.snapshot_step if resumed else 0, lead=self._us, stages=manifest.stages,
            snapshot=resumed.snapshot if resumed else None, snapshot_step=resumed.snapshot_step if resumed else 0,
            author=self._us,
        )  # fmt: skip
        self._records.pop(claim.job, None)
        self._led[claim.job] = Led(record, manifest.author, (record.snapshot, record.state))

    def update(self, job: JobId, progress: Progress | None) -> None:
        """How a job stands that we lead, as its first stage says."""
        led = self._led.get(job)
        if led is None or progress is None or led.record.state in ENDED:
            return
        stopped = progress.state == "stopped"
        message = STOPPED if stopped and led.stop else progress.error or progress.message
        led.record = replace(
            led.record,
            state=progress.state,
            step=progress.step,
            snapshot=progress.snapshot,
            snapshot_step=progress.snapshot_step,
            message=one_line(message),
            proof=led.stop if stopped else led.record.proof,
        )
        if progress.finished:
            self._bury(led.record, progress)

    def stop_at_end(self, job: JobId, proof: tuple[bytes, ...]) -> None:
        """A job that we lead is about to end since its author says so, whose statement is the `proof`: nobody is told of it before
        the job has come to its last snapshot."""
        self._led[job].stop = proof

    def cut_short(
        self,
        job: JobId,
        state: Literal["stopped", "failed"],
        message: str,
        progress: Progress | None = None,
        *,
        proof: tuple[bytes, ...] = (),
    ) -> JobRecord:
        """A job that we lead was stopped by whoever launched it, whose statement is the `proof`, or cannot go on, here or
        elsewhere, unless it has ended before."""
        self.update(job, progress)
        led = self._led[job]
        if led.record.state in ENDED:
            return led.record
        message = one_line(message)
        led.record = replace(led.record, state=state, message=message, proof=proof)
        final = progress or Progress(job=job, state=state, stages=led.record.stages)
        error = message if state == "failed" else ""
        self._bury(led.record, replace(final, state=state, message=message, error=error))
        return led.record

    def changed(self) -> tuple[JobRecord, ...]:
        """Those that have come to a new snapshot or to their end since this was last asked."""
        changed = []
        for led in self._led.values():
            before, led.told = led.told, (led.record.snapshot, led.record.state)
            if led.told != before:
                changed.append(led.record)
        return tuple(changed)

    def rest(self, job: JobId, progress: Progress | None = None) -> None:
        """Our first stage of the job has ended, or is another peer's now; `progress` is how the job stood then."""
        self.update(job, progress)
        led = self._led.pop(job, None)
        if led is not None:
            self.remember(led.record)
            if led.record.state in ENDED:
                self._repeat(job)

    # --- jobs that have ended

    def end(self, job: JobId, term: int, record: JobRecord | None = None) -> None:
        """The job has ended, under a lead whose term was `term`: as `record` says, where anybody has said how."""
        self._open.pop(job, None)
        known = self._tombstones.get(job, NONE)
        told = [each for each in (known.record, record) if each is not None]
        newest = max(told, key=job_order, default=None)
        again = newest is not None and known.record is not None and newest.term > known.record.term
        if again and not known.certain:
            known = replace(known, progress=None)  # it was taken up again, and went otherwise
        self._tombstones[job] = replace(known, term=max(known.term, term), record=newest)

    def conclude(self, record: JobRecord, progress: Progress, term: int) -> None:
        """The job has ended before our eyes, done or stopped: the lead, whose term is `term`, told a stage of ours, and
        with which figures. `record` is what was said of it."""
        if record.job in self._led:
            self.update(record.job, progress)
            return
        known = self._records.get(record.job)
        record = record if known is None else max(record, known, key=job_order)
        if progress.snapshot is not None:  # what the lead told our stage, whatever others said of it since
            record = replace(record, snapshot=progress.snapshot, snapshot_step=progress.snapshot_step)
        term, step = max(record.term, term), max(record.step, progress.step)
        record = replace(record, state=progress.state, term=term, step=step, message="")
        # Whoever watches asks the lead of the record: the one that did lead it may be no more, and we know as much.
        record = replace(record, lead=self._us, author=self._us)
        self._bury(record, progress)
        self.remember(record)
        self._repeat(record.job)

    def _bury(self, record: JobRecord, progress: Progress) -> None:
        self.end(record.job, record.term, record)
        self._tombstones[record.job] = replace(
            self._tombstones[record.job], progress=progress, certain=record.state in CONCLUDED
        )

    def _repeat(self, job: JobId) -> None:
        others = [each for each in self.repeated if each.job != job]
        self.repeated = (*others, self._records[job])

    def final(self, job: JobId) -> Progress | None:
        """How the job went, if a stage of it ran here to the end and nobody has taken it up again."""
        known = self.record(job)
        ended = known is None or known.state in ENDED
        return self._tombstones.get(job, NONE).progress if ended else None

    # --- what others say

    def remember(self, record: JobRecord) -> None:
        """Somebody said so, whom we believe, or we did."""
        record = self._as_ended(record)
        before = self._records.get(record.job)
        # An end is proven by who says so, whatever lead there was since who has not heard of it.
        ended = before is not None and record.state in ENDED and before.state not in ENDED
        self._records[record.job] = record if before is None or ended else max(record, before, key=job_order)

    def update_from_directory(
        self, records: Sequence[JobRecord], concerned: Collection[JobId], leaderless: Collection[JobId]
    ) -> None:
        """What the directory says of all jobs, which of them we hold stages of or stand by for, and which of those
        nobody leads."""
        self.concerned = frozenset(concerned)
        said = {record.job: record for record in records}
        for job in {*concerned, *self._records} - set(self._led):
            if job in said:
                self.remember(said[job])
        repeated = [
            record
            for job, record in self._records.items()
            if said.get(job) != record
            or record.author == self._us
            or (job in leaderless and record.state not in ENDED)
        ]
        denied = [self._denial(record) for record in records]
        self.repeated = (*repeated, *(record for record in denied if record is not None))
        self._elsewhere = frozenset(
            job
            for job, record in said.items()
            # Only once somebody runs the job: at a cold start it is for us to say that there is one.
            if job not in self.concerned and record.lead not in (None, self._us) and record.author != self._us
        )

    def _denial(self, record: JobRecord) -> JobRecord | None:
        """The end of a job which somebody who has not heard of it says to go on, under no higher term: nobody who has
        would work for it, so that it would wait for ever."""
        end = self._tombstones.get(record.job, NONE)
        if record.state in ENDED or end.record is None or self.record(record.job) is not None:
            return None
        if end.certain:
            return self._as_ended(record)
        return end.record if record.term <= end.record.term else None

    def _as_ended(self, record: JobRecord) -> JobRecord:
        """What we say of a job whose end we saw, where somebody says that it goes on."""
        tombstone = self._tombstones.get(record.job, NONE)
        if not tombstone.certain or tombstone.record is None or record.state in ENDED:
            return record
        return tombstone.record

    # --- what the disk is for

    def to_keep(self) -> tuple[JobRecord, ...]:
        """The records of jobs of whose stages we hold some, or stand by for them."""
        others = (
            self._records[job] for job in self.concerned if job in self._records and job not in self._led
        )
        return (*self.led, *others)

    def needed_blobs(self) -> frozenset[Digest]:
        """What the jobs of `to_keep` need, as far as their manifests and records name it."""
        named: set[Digest] = set()
        for record in self.to_keep():
            named |= {Digest(record.job)} | ({record.snapshot} if record.snapshot is not None else set())
            if (known := self._open.get(record.job)) is not None:
                named |= known[1].blobs
        return frozenset(named)

    def gone(self, job: JobId) -> bool:
        """Whether nobody needs our record of the job any more, not even where everybody starts again."""
        known = self.record(job)
        return (known is not None and known.state in ENDED) or (
            job in self._elsewhere and job not in self._led
        )


def advanced(record: JobRecord, progress: Progress | None) -> JobRecord:
    """The record of a job that somebody else leads, or led, with the snapshot that our own stage knows of where that is
    newer: the one before may be deleted already."""
    if progress is None or progress.snapshot is None or progress.snapshot_step <= record.snapshot_step:
        return record
    step = max(record.step, progress.step)
    return replace(record, step=step, snapshot=progress.snapshot, snapshot_step=progress.snapshot_step)
