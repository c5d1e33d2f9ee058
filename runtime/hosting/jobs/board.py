"""The jobs that a peer knows of: the newest record of each, which ones it leads, which have ended and how. The one memory
of that. Pure: `gossip` updates it from the directory and our own stages and publishes its records, `server` answers from
it, and `files` keeps on disk what outlives the process.

Of two records of a job, our own or another peer's, the greater in `job_order` counts.
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
    """A job has ended: records of it under this term or a lower one are void."""

    term: int = -1  # of its lead, as we knew it then
    record: JobRecord | None = None  # how it ended, where a record states that
    progress: Progress | None = None  # the figures that it ended with, if a stage of it ran here
    certain: bool = False  # done or stopped, and a stage of it ran here: a later lead does not know that


NONE = Tombstone()


@dataclass
class Led:
    """A job whose first stage is ours."""

    record: JobRecord
    author: PeerId
    notified: tuple[Digest | None, str]  # the snapshot and state that `changed` returned last
    stop: tuple[bytes, ...] = ()  # the author's statement that it is to stop, for the record of its end


class JobBoard:
    """`us`: this peer. Both memories are bounded and drop the oldest job first."""

    def __init__(self, us: PeerId) -> None:
        self.concerned: frozenset[JobId] = frozenset()  # jobs that we hold stages of, or stand by for
        # Of jobs that we do not lead, which no other peer publishes
        self.republished: tuple[JobRecord, ...] = ()
        self._us = us
        self._open: dict[JobId, tuple[JobRecord, Manifest]] = {}
        self._led: dict[JobId, Led] = {}
        # Of jobs led by others that concern us, or did.
        self._records: FIFOCache[JobId, JobRecord] = FIFOCache(REMEMBERED_RECORDS)
        self._tombstones: FIFOCache[JobId, Tombstone] = FIFOCache(REMEMBERED_ENDS)
        self._elsewhere: frozenset[JobId] = frozenset()  # run by others, and no longer of concern to us

    # --- jobs to work for

    def set_open(self, jobs: Mapping[JobId, tuple[JobRecord, Manifest]]) -> None:
        """These jobs go on now; `end` removes those that end later."""
        self._open = dict(jobs)

    def get(self, job: JobId) -> tuple[JobRecord, Manifest] | None:
        """The record and manifest of an open job."""
        return self._open.get(job)

    def over(self, record: JobRecord) -> bool:
        """Whether the job had ended under the record's term already."""
        tombstone = self._tombstones.get(record.job, NONE)
        return tombstone.certain or record.term <= tombstone.term

    def has_tombstone(self, job: JobId) -> bool:
        """Whether we know of an end of the job: a stranger's record does not reopen it."""
        return job in self._tombstones

    def record(self, job: JobId) -> JobRecord | None:
        """The newest record of a job that we lead or that concerns us, or did."""
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
        # A new lead must not drop the snapshot: peers that take stages over read it in this record.
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
        """Put the progress of our first stage into the record of a job that we lead."""
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
            self._add_tombstone(led.record, progress)

    def stop_at_end(self, job: JobId, proof: tuple[bytes, ...]) -> None:
        """The author of a job that we lead stops it, by the signed statement `proof`. The record shows that only once the job has
        come to its last snapshot."""
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
        """End a job that we lead, unless it has ended before, and give its record: its author stopped it, by the signed statement
        `proof`, or it failed."""
        self.update(job, progress)
        led = self._led[job]
        if led.record.state in ENDED:
            return led.record
        message = one_line(message)
        led.record = replace(led.record, state=state, message=message, proof=proof)
        final = progress or Progress(job=job, state=state, stages=led.record.stages)
        error = message if state == "failed" else ""
        self._add_tombstone(led.record, replace(final, state=state, message=message, error=error))
        return led.record

    def changed(self) -> tuple[JobRecord, ...]:
        """The records of jobs that we lead that have come to a new snapshot or to their end since the last call."""
        changed = []
        for led in self._led.values():
            before, led.notified = led.notified, (led.record.snapshot, led.record.state)
            if led.notified != before:
                changed.append(led.record)
        return tuple(changed)

    def stop_leading(self, job: JobId, progress: Progress | None = None) -> None:
        """Our first stage of the job has ended, or is another peer's now; `progress` is how the job stood then."""
        self.update(job, progress)
        led = self._led.pop(job, None)
        if led is not None:
            self.remember(led.record)
            if led.record.state in ENDED:
                self._republish(job)

    # --- jobs that have ended

    def end(self, job: JobId, term: int, record: JobRecord | None = None) -> None:
        """The job has ended, under a lead whose term was `term`; `record` states how, where there is one."""
        self._open.pop(job, None)
        known = self._tombstones.get(job, NONE)
        records = [each for each in (known.record, record) if each is not None]
        newest = max(records, key=job_order, default=None)
        resumed = newest is not None and known.record is not None and newest.term > known.record.term
        if resumed and not known.certain:
            known = replace(known, progress=None)  # of an earlier end
        self._tombstones[job] = replace(known, term=max(known.term, term), record=newest)

    def conclude(self, record: JobRecord, progress: Progress, term: int) -> None:
        """The job is done or stopped: its lead, whose term is `term`, reported `progress` to a stage of ours. `record`: the
        job's last."""
        if record.job in self._led:
            self.update(record.job, progress)
            return
        known = self._records.get(record.job)
        record = record if known is None else max(record, known, key=job_order)
        if progress.snapshot is not None:  # the lead's own report goes before others' records
            record = replace(record, snapshot=progress.snapshot, snapshot_step=progress.snapshot_step)
        term, step = max(record.term, term), max(record.step, progress.step)
        record = replace(record, state=progress.state, term=term, step=step, message="")
        # Watchers go to the record's lead: the one that did lead the job may be gone, and we know as much.
        record = replace(record, lead=self._us, author=self._us)
        self._add_tombstone(record, progress)
        self.remember(record)
        self._republish(record.job)

    def _add_tombstone(self, record: JobRecord, progress: Progress) -> None:
        self.end(record.job, record.term, record)
        self._tombstones[record.job] = replace(
            self._tombstones[record.job], progress=progress, certain=record.state in CONCLUDED
        )

    def _republish(self, job: JobId) -> None:
        others = [each for each in self.republished if each.job != job]
        self.republished = (*others, self._records[job])

    def final(self, job: JobId) -> Progress | None:
        """How the job went, if a stage of it ran here to the end and nobody has resumed it."""
        record = self.record(job)
        ended = record is None or record.state in ENDED
        return self._tombstones.get(job, NONE).progress if ended else None

    # --- records of others

    def remember(self, record: JobRecord) -> None:
        """Keep a record that we believe, or that is our own, where it is the newest of its job."""
        record = self._as_ended(record)
        before = self._records.get(record.job)
        # A proven end goes before a running record even of a higher term: that lead has not learned of the end.
        ended = before is not None and record.state in ENDED and before.state not in ENDED
        self._records[record.job] = record if before is None or ended else max(record, before, key=job_order)

    def update_from_directory(
        self, records: Sequence[JobRecord], concerned: Collection[JobId], leaderless: Collection[JobId]
    ) -> None:
        """`records`: the believed ones of all jobs. `concerned`: the jobs that we hold stages of or stand by for, and `leaderless`
        those of them without a lead."""
        self.concerned = frozenset(concerned)
        published = {record.job: record for record in records}
        for job in {*concerned, *self._records} - set(self._led):
            if job in published:
                self.remember(published[job])
        republished = [
            record
            for job, record in self._records.items()
            if published.get(job) != record
            or record.author == self._us
            or (job in leaderless and record.state not in ENDED)
        ]
        corrections = [self._correction(record) for record in records]
        self.republished = (*republished, *(record for record in corrections if record is not None))
        self._elsewhere = frozenset(
            job
            for job, record in published.items()
            # Only once somebody runs the job: after a cold start our record may be the only one.
            if job not in self.concerned and record.lead not in (None, self._us) and record.author != self._us
        )

    def _correction(self, record: JobRecord) -> JobRecord | None:
        """The record of the job's end, where `record`, under no higher term, states that it goes on: peers that know of the end do
        not work for it, so that it would wait for ever."""
        end = self._tombstones.get(record.job, NONE)
        if record.state in ENDED or end.record is None or self.record(record.job) is not None:
            return None
        if end.certain:
            return self._as_ended(record)
        return end.record if record.term <= end.record.term else None

    def _as_ended(self, record: JobRecord) -> JobRecord:
        """Of a job whose end is certain, the record of that end."""
        tombstone = self._tombstones.get(record.job, NONE)
        if not tombstone.certain or tombstone.record is None or record.state in ENDED:
            return record
        return tombstone.record

    # --- what the disk is for

    def to_keep(self) -> tuple[JobRecord, ...]:
        """The records of the jobs that we hold stages of, or stand by for."""
        others = (
            self._records[job] for job in self.concerned if job in self._records and job not in self._led
        )
        return (*self.led, *others)

    def needed_blobs(self) -> frozenset[Digest]:
        """The blobs that the manifests and records of the jobs of `to_keep` name."""
        named: set[Digest] = set()
        for record in self.to_keep():
            named |= {Digest(record.job)} | ({record.snapshot} if record.snapshot is not None else set())
            if (known := self._open.get(record.job)) is not None:
                named |= known[1].blobs
        return frozenset(named)

    def gone(self, job: JobId) -> bool:
        """Whether our record of the job is needed no more, not even after a cold start of all peers."""
        record = self.record(job)
        ended = record is not None and record.state in ENDED
        return ended or (job in self._elsewhere and job not in self._led)


def advanced(record: JobRecord, progress: Progress | None) -> JobRecord:
    """The record of a job that another peer leads, or led, with the snapshot that our own stage knows of where that is
    newer: the one before may be deleted already."""
    if progress is None or progress.snapshot is None or progress.snapshot_step <= record.snapshot_step:
        return record
    step = max(record.step, progress.step)
    return replace(record, step=step, snapshot=progress.snapshot, snapshot_step=progress.snapshot_step)
