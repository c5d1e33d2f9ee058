"""What a peer says about jobs: the records that it publishes of them, and its answers to whoever asks.

It speaks for the jobs that it leads, and repeats the last word on others (`fusion.runtime.hosting.jobs.job_gossip`) while nobody
does. A new snapshot is said at once, to the directory and straight to the job's standbys.

/fusion/job/1   launch {job}                     look at this job now, do not wait for the next heartbeat
                watch  {job}                     a stream of `progress` frames until the job ends, or one
                                                 `redirect` {lead} from a peer that does not lead the job
                stop   {job, time, signature}    end the job; signed by the key of whoever launched it
    snapshot {record}                from the lead: its sealed job record, which names a new snapshot
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fusion.runtime.hosting.jobs.job_files import JobFiles
from fusion.runtime.hosting.jobs.job_gossip import REMEMBERED_JOBS, JobGossip
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import JOB
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.job_order import ENDED, job_order
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, one_line
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import verify
from fusion.swarm.transport import PeerId, Stream, call

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
FOLLOW_SECONDS = 0.25  # between two looks at what our services know
# Longer than a claim: a job's record must outlive the claim of the lead that vanished, or there would be a moment in
# which nobody speaks for the job.
RECORD_TTL_SECONDS = 6 * HEARTBEAT_SECONDS
CONCLUDED = frozenset({"done", "stopped"})  # ends that no later lead can change
LEADERLESS = "waiting for a peer to take the lead"
STOP_WINDOW_SECONDS = 300.0  # how far the clock of whoever stops a job may be from ours
TELL_SECONDS = 2.0
TOLD_PEERS = 256


class Service(Protocol):
    """What runs the stages of one kind of job."""

    async def host(
        self, job: JobId, manifest: Manifest, stage: int, term: int, baton: Mapping[str, Any] | None = None
    ) -> None:
        """Run one stage under our claim's `term` until its job ends (returns), it is cancelled, or it fails: raises
        JobFailed for the whole job, anything else where only this peer cannot go on. `baton`: what the owner before
        said when it handed the stage over (`pass_on`)."""

    def progress(self, job: JobId) -> Progress | None: ...

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        """Stand by for a stage: bring what `host` needs onto this peer and, where memory allows, into memory.
        Idempotent; called again whenever the job's snapshot has changed. The step that is here now. Raises SwarmError,
        JobError."""

    def forget(self, job: JobId, stage: int) -> None:
        """No longer standing by: free the memory that `prepare` keeps."""

    async def pass_on(self, job: JobId, stage: int) -> Mapping[str, Any]:
        """We leave: stop a stage that runs here at a boundary where nothing is lost. What the successor's `host` gets,
        msgpack-able, below 16 KiB. Raises JobError where it cannot; the caller bounds the time."""

    def stay(self, job: JobId, stage: int) -> None:
        """Nobody took the stage that `pass_on` stopped, or still waits to stop: go on with it."""


@dataclass
class _Led:
    """A job that we lead, or led until it ended."""

    record: JobRecord
    trainer: str
    said: tuple[Digest | None, str]  # the snapshot and state that everybody was told of at once
    leading: bool = True

    @property
    def ended(self) -> bool:
        return self.record.state in ENDED


class JobServer:
    """`nudged` is called when somebody asks us to look at the jobs now, `stopped` when a job that we lead was stopped
    by whoever launched it, `snapshotted` with the record of a job that has come to a new snapshot. `now` gives unix
    seconds. `files` None: nothing is kept on disk."""

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        nudged: Callable[[], None],
        stopped: Callable[[JobId], None],
        now: Callable[[], float] = time.time,
        *,
        snapshotted: Callable[[JobRecord], None] = lambda record: None,
        files: JobFiles | None = None,
    ) -> None:
        self._context = context
        self._services = services
        self._nudged = nudged
        self._stopped = stopped
        self._now = now
        self._led: dict[JobId, _Led] = {}
        self._snapshotted = snapshotted
        self._words = JobGossip(context.peer_id, files)

    async def start(self) -> None:
        """Answer from now on, and say what our disk knows of: after a cold start nobody else may."""
        await self._words.load()
        await asyncio.gather(*(self._say(self._repeat(record)) for record in self._words.repeated))
        await self._context.transport.serve(JOB.name, self._handle)

    # --- the jobs we lead

    def lead(self, claim: ClaimRecord, manifest: Manifest, before: JobRecord | None) -> None:
        """We own the first stage from now on; `before` is what the swarm said of the job."""
        known = [self._newest(r) for r in (before, self._words.get(claim.job)) if r is not None]
        before = max(known, key=job_order, default=None)
        resumed = before is not None and before.snapshot is not None
        record = JobRecord(
            job=claim.job,
            name=manifest.name,
            kind=manifest.kind,
            state="running",
            term=claim.term,
            step=before.snapshot_step if before is not None and resumed else 0,
            lead=self._context.peer_id,
            stages=manifest.stages,
            # Whoever takes a stage over reads it here: a new lead must not make the swarm forget the snapshot.
            snapshot=before.snapshot if before is not None and resumed else None,
            snapshot_step=before.snapshot_step if before is not None and resumed else 0,
            author=self._context.peer_id,
        )
        self._words.forget(claim.job)
        self._led.pop(claim.job, None)
        self._led[claim.job] = _Led(record, manifest.trainer, (record.snapshot, record.state))
        for job in [job for job, led in self._led.items() if not led.leading][:-REMEMBERED_JOBS]:
            del self._led[job]

    def rest(self, job: JobId) -> None:
        """Our first stage of the job has ended, or is another peer's now."""
        led = self._led.get(job)
        if led is None:
            return
        self._update(led)
        led.leading = False
        if not led.ended:
            del self._led[job]
            self._words.remember(led.record)

    async def conclude(self, record: JobRecord) -> None:
        """A stage of the job ran here to the job's end. If its lead vanishes now, nobody else may ever say so: say it
        before the stage is free, and from now on against all who believe that the job goes on."""
        progress = self._services[record.kind].progress(record.job)
        if progress is None or progress.state not in CONCLUDED:
            return
        led = self._led.get(record.job)
        if led is not None:
            self._update(led)
            record = led.record
        else:
            known = self._words.get(record.job)
            record = self._newest(record if known is None else max(record, known, key=job_order))
            term = max(record.term, self._context.leases.known_term(record.job, 0))
            step = max(record.step, progress.step)
            # Who led it knows how it went, and may not have said yet that it has ended: whoever watches asks there.
            lead = winner(self._context.leases.recent(record.job, 0))
            ended = replace(record, state=progress.state, term=term, step=step, message="")
            self._words.conclude(replace(ended, lead=None if lead is None else lead.peer))
            record = self._repeat(self._words.get(record.job) or record)
        with suppress(TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await self._say(record)

    def concluded(self, job: JobId) -> bool:
        """Whether the job ended before our eyes: whoever leads it now has not heard of it."""
        led = self._led.get(job)
        return self._words.concluded(job) or (led is not None and _over(led))

    def leads(self, job: JobId) -> bool:
        led = self._led.get(job)
        return led is not None and led.leading

    @property
    def repeats(self) -> bool:
        """Whether there is a job of which nobody else speaks."""
        return bool(self._words.repeated)

    def fail(self, job: JobId, text: str) -> None:
        """A job that we lead cannot go on, here or elsewhere."""
        led = self._led.get(job)
        if led is not None:
            self._update(led)
            if led.record.state not in ("done", "stopped"):
                led.record = replace(led.record, state="failed", message=one_line(text))

    def _update(self, led: _Led) -> None:
        """Take what the service knows of the job into its record."""
        progress = self._services[led.record.kind].progress(led.record.job)
        if progress is not None and not led.ended:
            led.record = replace(
                led.record,
                state=progress.state,
                step=progress.step,
                snapshot=progress.snapshot,
                snapshot_step=progress.snapshot_step,
                message=one_line(progress.error or progress.message),
            )

    # --- what the directory gets to hear

    def hear(
        self, records: Sequence[JobRecord], concerned: Collection[JobId], leaderless: Collection[JobId]
    ) -> None:
        """What the directory says of all jobs, which of them we hold stages of or stand by for, and which of those
        nobody leads."""
        for record in records:
            led = self._led.get(record.job)
            if led is not None and _over(led) and record.state not in ENDED:
                # Somebody took the lead before it heard of the end.
                term, step = max(led.record.term, record.term), max(led.record.step, record.step)
                led.record = replace(led.record, term=term, step=step)
        self._words.hear(records, concerned, leaderless, self._led)

    def _newest(self, record: JobRecord) -> JobRecord:
        """The last word on a job that somebody else leads, or led; our own stage may know of a newer snapshot, and the
        one before may be deleted already."""
        progress = self._services[record.kind].progress(record.job)
        if record.state in ENDED or progress is None or progress.snapshot is None:
            return record
        if progress.snapshot_step <= record.snapshot_step:
            return record
        return replace(
            record,
            step=max(record.step, progress.step),
            snapshot=progress.snapshot,
            snapshot_step=progress.snapshot_step,
        )

    def _repeat(self, record: JobRecord) -> JobRecord:
        """The last word on a job, as we say it ourselves."""
        record = replace(self._newest(record), author=self._context.peer_id)
        if self._words.concluded(record.job):
            return record
        record = replace(record, lead=None)
        return record if record.state in ENDED else replace(record, message=LEADERLESS)

    async def publish(self) -> None:
        """Say how the jobs stand that we speak for."""
        for led in self._led.values():
            if led.leading:
                self._update(led)
        await asyncio.gather(*(self._say(record) for record in self._spoken_for()), self._keep())

    async def last_word(self) -> None:
        """We leave: say what we know of every job, so that whoever leads next knows it too. Before our claims are
        released, or others would see a job without a lead and without its newest snapshot."""
        for led in self._led.values():
            if led.leading:
                self._update(led)
        ours = [self._repeat(led.record) for led in self._led.values()]
        others = [self._repeat(record) for record in self._words.repeated]
        await asyncio.gather(*(self._say(record) for record in [*ours, *others]), self._keep())

    async def follow(self) -> None:
        """Say at once, for ever, when a job that we lead has come to a new snapshot or to its end."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            await self.catch_up()

    async def catch_up(self) -> None:
        """What `follow` does each time."""
        changed = []
        for led in self._led.values():
            if led.leading:
                self._update(led)
                now = (led.record.snapshot, led.record.state)
                if led.said != now:
                    changed.append(led.record)
                led.said = now
        running = [record for record in changed if record.state not in ENDED]
        await asyncio.gather(self._keep(), *map(self._say, changed), *map(self._tell_standbys, running))

    async def _keep(self) -> None:
        ours = [led.record for led in self._led.values()]
        await self._words.keep([*ours, *map(self._newest, self._words.of_concern())])

    def _spoken_for(self) -> list[JobRecord]:
        return [*(led.record for led in self._led.values()), *map(self._repeat, self._words.repeated)]

    async def _say(self, record: JobRecord) -> None:
        try:
            await self._context.directory.publish(record, ttl_seconds=RECORD_TTL_SECONDS)
        except SwarmError as error:
            log.warning("job %s (%s): not published: %s", record.name, record.job[:12], error)

    # --- what others ask

    async def _handle(self, stream: Stream) -> None:
        frame = await stream.receive()
        job = JobId(str(frame.header.get("job", ""))[:64])
        if frame.kind == "launch":
            self._nudged()
            await stream.send("ok")
        elif frame.kind == "watch":
            await self._watch(stream, job)
        elif frame.kind == "stop":
            led = self._stop(job, frame.header.get("time"), frame.header.get("signature"))
            await self._say(led.record)
            await stream.send("ok")
            await self._tell_owners(led.record)
        elif frame.kind == "snapshot":
            self._follow_lead(stream.remote, frame.header.get("record"))
            await stream.send("ok")
        else:
            raise ValueError(f"{JOB.name} knows launch, watch, stop and snapshot, not {frame.kind[:40]!r}")

    def _follow_lead(self, sender: PeerId, data: object) -> None:
        """Raises RecordError. Others than the lead as we know it may be right, but the directory will say so."""
        record = self._context.directory.unsealed(data) if isinstance(data, bytes) else None
        if not isinstance(record, JobRecord) or record.author != sender:
            raise ValueError("snapshot needs the sealed job record of whoever sends it")
        lead = winner(self._context.leases.recent(record.job, 0))
        if lead is None or (lead.peer, lead.term) != (sender, record.term):
            return
        if record.job in self._words.concerned and record.job not in self._led:
            self._words.remember(record)
        self._snapshotted(record)

    async def _watch(self, stream: Stream, job: JobId) -> None:
        if job not in self._led:
            known = await self._context.directory.job(job)
            await stream.send("redirect", {"lead": known.lead if known else None})
            return
        gone = asyncio.ensure_future(stream.receive())  # a watcher says nothing more
        last: Progress | None = None
        try:
            while (led := self._led.get(job)) is not None:
                progress = self._progress(led)
                if progress is not None and progress != last:
                    if progress.finished:
                        # Whoever sees the end asks the directory next: it must know of it, and of the last snapshot.
                        self._update(led)
                        await self._say(led.record)
                    await stream.send("progress", progress.to_header())
                    last = progress
                if (progress is not None and progress.finished) or gone.done():
                    return
                await asyncio.wait([gone], timeout=WATCH_SECONDS)
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    def _progress(self, led: _Led) -> Progress | None:
        """What a watcher is told: the service's figures, with the end that the record says it came to."""
        record = led.record
        progress = self._services[record.kind].progress(record.job)
        if not led.ended or (progress is not None and progress.finished):
            return progress
        progress = progress or Progress(job=record.job, state=record.state, stages=record.stages)
        error = record.message if record.state == "failed" else ""
        return replace(progress, state=record.state, message=record.message, error=error)

    def _stop(self, job: JobId, at: object, signature: object) -> _Led:
        led = self._led.get(job)
        if led is None:
            raise JobError(f"this peer does not lead the job {job[:12]}: ask its lead")
        timely = isinstance(at, int | float) and abs(self._now() - at) <= STOP_WINDOW_SECONDS
        if not isinstance(at, int | float) or not timely or not isinstance(signature, bytes):
            raise JobError(f"stop needs the time (within {STOP_WINDOW_SECONDS:.0f} s of now) and a signature")
        if not verify(PeerId(led.trainer), signature, stop_request(job, at)):
            raise JobError("only whoever launched the job may stop it")
        self._update(led)
        if led.ended:
            raise JobError(f"the job {led.record.name} is {led.record.state} already")
        led.record = replace(led.record, state="stopped", message="stopped by whoever launched it")
        self._stopped(job)
        return led

    async def _tell_owners(self, record: JobRecord) -> None:
        """The owners of the other stages need not wait for their next heartbeat to learn that the job has ended."""
        claims = await asyncio.gather(
            *(self._context.directory.claims(record.job, s) for s in range(1, min(record.stages, TOLD_PEERS)))
        )
        owners = {owner.peer for owner in map(winner, claims) if owner is not None}
        owners.discard(self._context.peer_id)
        await asyncio.gather(*(self._tell(peer, "launch", {"job": record.job}) for peer in owners))

    async def _tell_standbys(self, record: JobRecord) -> None:
        """They bring the snapshot to themselves now, and not when they look into the directory next."""
        self._snapshotted(record)
        stages = range(min(record.stages, TOLD_PEERS))
        known = [claim for stage in stages for claim in self._context.leases.recent(record.job, stage)]
        standbys = {claim.peer for claim in known if claim.role == "standby"} - {self._context.peer_id}
        sealed = self._context.directory.sealed(record, ttl_seconds=RECORD_TTL_SECONDS)
        await asyncio.gather(*(self._tell(peer, "snapshot", {"record": sealed}) for peer in standbys))

    async def _tell(self, peer: PeerId, kind: str, header: Mapping[str, Any]) -> None:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await call(self._context.transport, peer, JOB.name, kind, header)


def _over(led: _Led) -> bool:
    return not led.leading and led.record.state in CONCLUDED


def stop_request(job: JobId, at: float) -> bytes:
    """What the launcher signs to stop a job."""
    return f"fusion-peer stop {job} {at!r}".encode()
