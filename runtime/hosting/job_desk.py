"""What a peer says about jobs: the records that it publishes of them, and its answers to whoever asks.

It speaks for the jobs that it leads, and repeats the last word on jobs whose stages it holds while nobody leads them:
a job that no record names any more could never find another lead.

/fusion/job/1   launch {job}                     look at this job now, do not wait for the next heartbeat
                watch  {job}                     a stream of `progress` frames until the job ends, or one
                                                 `redirect` {lead} from a peer that does not lead the job
                stop   {job, time, signature}    end the job; signed by the key of whoever launched it
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from fusion.runtime.context import Context
from fusion.runtime.errors import JobError
from fusion.runtime.job import Manifest
from fusion.runtime.progress import Progress
from fusion.swarm.election import winner
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import verify
from fusion.swarm.records import ClaimRecord, JobId, JobRecord, one_line
from fusion.swarm.transport import PeerId, Stream, call

log = logging.getLogger(__name__)

PROTOCOL = "/fusion/job/1"
ENDED = frozenset({"done", "stopped", "failed"})
REMEMBERED_JOBS = 100
WATCH_SECONDS = 0.25
STOP_WINDOW_SECONDS = 300.0  # how far the clock of whoever stops a job may be from ours
TELL_SECONDS = 2.0
TOLD_PEERS = 256


class Service(Protocol):
    """What runs the stages of one kind of job."""

    async def host(self, job: JobId, manifest: Manifest, stage: int, term: int) -> None: ...

    def progress(self, job: JobId) -> Progress | None: ...


@dataclass
class _Led:
    """A job that we lead, or led until it ended."""

    record: JobRecord
    trainer: str
    leading: bool = True

    @property
    def ended(self) -> bool:
        return self.record.state in ENDED


class JobDesk:
    """`nudged` is called when somebody asks us to look at the jobs now, `stopped` when a job that we lead was stopped
    by whoever launched it. `now` gives unix seconds."""

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        nudged: Callable[[], None],
        stopped: Callable[[JobId], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._context = context
        self._services = services
        self._nudged = nudged
        self._stopped = stopped
        self._now = now
        self._led: dict[JobId, _Led] = {}
        self._heard: dict[
            JobId, JobRecord
        ] = {}  # the last word on jobs of which we hold, or held, other stages
        self._repeated: list[JobRecord] = []  # what the next `publish` says of them

    async def start(self) -> None:
        await self._context.transport.serve(PROTOCOL, self._handle)

    # --- the jobs we lead

    def lead(self, claim: ClaimRecord, manifest: Manifest, before: JobRecord | None) -> None:
        """We own the first stage from now on; `before` is what the swarm said of the job."""
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
        self._heard.pop(claim.job, None)
        self._led.pop(claim.job, None)
        self._led[claim.job] = _Led(record, manifest.trainer)
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
        self, records: Sequence[JobRecord], hosted: Collection[JobId], leaderless: Collection[JobId]
    ) -> None:
        """What the directory says of all jobs, which of them we hold stages of, and which of those nobody leads."""
        said = {record.job: record for record in records}
        for job in {*hosted, *self._heard} - set(self._led):
            before, latest = self._heard.pop(job, None), said.get(job)
            if latest is None or (before is not None and before.term > latest.term):
                latest = before  # what is there now is an older word
            if latest is not None:
                self._heard[job] = latest
        while len(self._heard) > REMEMBERED_JOBS:
            del self._heard[next(iter(self._heard))]
        us = self._context.peer_id
        self._repeated = [
            record
            for job, record in self._heard.items()
            if said.get(job) != record
            or record.author == us
            or (job in leaderless and record.state not in ENDED)
        ]

    def _repeat(self, record: JobRecord) -> JobRecord:
        """The last word on a job, as we say it ourselves; our own stage may know of a newer snapshot, and the one
        before may be deleted already."""
        record = replace(record, lead=None, author=self._context.peer_id)
        if record.state in ENDED:
            return record
        record = replace(record, message="waiting for a peer to take the lead")
        progress = self._services[record.kind].progress(record.job)
        if progress is None or progress.snapshot is None or progress.snapshot_step <= record.snapshot_step:
            return record
        return replace(
            record,
            step=max(record.step, progress.step),
            snapshot=progress.snapshot,
            snapshot_step=progress.snapshot_step,
        )

    async def publish(self) -> None:
        """Say how the jobs stand that we speak for."""
        for led in self._led.values():
            if led.leading:
                self._update(led)
        await asyncio.gather(*(self._say(record) for record in self._spoken_for()))

    def _spoken_for(self) -> list[JobRecord]:
        return [*(led.record for led in self._led.values()), *map(self._repeat, self._repeated)]

    async def _say(self, record: JobRecord) -> None:
        try:
            await self._context.directory.publish(record)
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
        else:
            raise ValueError(f"{PROTOCOL} knows launch, watch and stop, not {frame.kind[:40]!r}")

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
        await asyncio.gather(*(self._tell(peer, record.job) for peer in owners))

    async def _tell(self, peer: PeerId, job: JobId) -> None:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await call(self._context.transport, peer, PROTOCOL, "launch", {"job": job})


def stop_request(job: JobId, at: float) -> bytes:
    """What the launcher signs to stop a job."""
    return f"fusion-peer stop {job} {at!r}".encode()
