"""The job records that a peer publishes.

It publishes records of the jobs that it leads. Of those that it does not lead but holds, or held, stages of, it republishes
the newest record while nobody else publishes it: a job without any record could never find another lead. A new snapshot is
published at once, and sent straight to the job's standbys. A record that has not changed is published again at every other
heartbeat: each time the peers that store it check a signature, and there may be dozens of jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from cachetools import TTLCache

from fusion.runtime.hosting.jobs.board import CONCLUDED, JobBoard, advanced
from fusion.runtime.hosting.jobs.files import MAX_AGE_SECONDS, KeptJobRecords
from fusion.runtime.hosting.jobs.recalled_blobs import blobs_of
from fusion.runtime.hosting.jobs.record_proofs import RecordProofs
from fusion.runtime.hosting.jobs.service import Service
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import JOB
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.job_order import ENDED, JOB_TTL_SECONDS, job_order
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId, call

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25  # between two readings of our services' progress
REPUBLISH_SECONDS = 1.5 * HEARTBEAT_SECONDS  # after which a record that has not changed is published again
PUBLISHED_JOBS = 1024  # whose last published record is remembered
LEADERLESS = "waiting for a peer to take the lead"
NOTIFY_SECONDS = 2.0
NOTIFIED_PEERS = 256


class JobGossip:
    """Publishes the jobs on `board`. `snapshotted` is called with the record of a job that has come to a new snapshot. `files`
    None: nothing is kept on disk."""

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        board: JobBoard,
        snapshotted: Callable[[JobRecord], None] = lambda record: None,
        files: KeptJobRecords | None = None,
    ) -> None:
        # Confines an error of a service to one job (`fusion.runtime.hosting.job_faults`).
        self.isolated: Callable[[JobId], AbstractContextManager[None]] = lambda job: nullcontext()
        self._context = context
        self._services = services
        self._board = board
        self._snapshotted = snapshotted
        self._files = files
        self._proofs = RecordProofs(context, board)
        # As signed, for as long as it need not be published again.
        self._published: TTLCache[JobId, JobRecord] = TTLCache(
            PUBLISHED_JOBS, REPUBLISH_SECONDS, timer=context.clock.monotonic
        )
        self._publishing: WeakValueDictionary[JobId, asyncio.Lock] = WeakValueDictionary()
        # Blobs of jobs from our disk that we have no part in yet: the other peers of these jobs may come back later.
        self._recalled: dict[JobId, frozenset[Digest]] = {}
        self._recalled_until = context.clock.monotonic() + MAX_AGE_SECONDS

    async def start(self) -> None:
        """Publish the records on our disk: after a cold start there may be no others."""
        if self._files is not None:
            for record in await self._files.load():
                self._board.remember(record)
                store = self._context.blobs.store
                self._recalled[record.job] = await asyncio.to_thread(blobs_of, record, store)
        self._hold()
        self._board.update_from_directory((), (), ())
        await self._publish_all(*self._republished())

    # --- what our own stages know

    def lead(self, claim: ClaimRecord, manifest: Manifest, before: JobRecord | None) -> None:
        """We own the first stage from now on; `before` is the job's record until now."""
        known = [self._newest(r) for r in (before, self._board.record(claim.job)) if r is not None]
        self._board.lead(claim, manifest, max(known, key=job_order, default=None))

    def progress(self, job: JobId) -> Progress | None:
        """Of a job that we run a stage of, or ran one of to its end: what watchers get."""
        record = self._board.record(job)
        progress = None if record is None else self._progress(record)
        self._board.update(job, progress)
        return self._board.final(job) or progress

    def _update(self) -> None:
        for record in self._board.led:
            self._board.update(record.job, self._progress(record))

    def _progress(self, record: JobRecord) -> Progress | None:
        """From our own stage of the job."""
        with self.isolated(record.job):
            return self._services[record.kind].progress(record.job)
        return None

    def _newest(self, record: JobRecord) -> JobRecord:
        """The record of a job that goes on, with the newest snapshot that our own stage knows of."""
        return record if record.state in ENDED else advanced(record, self._progress(record))

    async def conclude(self, record: JobRecord, progress: Progress | None = None) -> None:
        """A stage of the job ran here to the job's end, with `progress`. If its lead vanishes now, nobody else may ever publish
        the end: publish it before the stage is released, and from now on wherever a record states that the job goes on."""
        if progress is None or progress.state not in CONCLUDED:
            return
        self._board.conclude(record, progress, record.term)
        with suppress(TimeoutError):
            async with asyncio.timeout(NOTIFY_SECONDS):
                await self.publish_job(record.job)

    def concludes(self, record: JobRecord) -> bool:
        """Whether our own lead has ended the job, and may have messages left to send. It has not where we took the lead while the
        one before us was ending the job, as another stage of ours learned from it."""
        progress = self._progress(record)
        own = record.author == self._context.peer_id and self._board.leads(record.job)
        return own and progress is not None and progress.finished

    # --- what goes into the directory

    def _as_own(self, record: JobRecord) -> JobRecord:
        """The newest record of a job that we do not lead, with us as its author."""
        us = self._context.peer_id
        record = replace(self._newest(record), author=us)
        if record.state not in ENDED:
            return replace(record, lead=None, message=LEADERLESS)
        # The lead of a job that has ended is a peer that has its final figures.
        return replace(record, lead=None if self._board.final(record.job) is None else us)

    def _republished(self) -> list[JobRecord]:
        return [self._as_own(record) for record in self._board.republished]

    async def publish(self) -> None:
        """Publish the records of our jobs that have changed or are due again."""
        self._update()
        await asyncio.gather(self._publish_if_due(*self._board.led, *self._republished()), self._keep())

    async def publish_all(self) -> None:
        """Publish all that we know, for the next leads. Before our claims are released, or others would see a job without a lead
        and without its newest snapshot."""
        self._update()
        led = [self._as_own(record) for record in self._board.led]
        await asyncio.gather(self._publish_all(*led, *self._republished()), self._keep())

    async def poll(self) -> None:
        """`publish_changes`, for ever."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.publish_changes()

    async def publish_changes(self) -> None:
        """Publish the jobs that we lead that have come to a new snapshot or to their end, and notify their standbys."""
        self._update()
        changed = self._board.changed()
        running = [record for record in changed if record.state not in ENDED]
        await asyncio.gather(
            self._keep(), self._publish_if_due(*changed), *map(self._notify_standbys, running)
        )

    async def publish_job(self, job: JobId) -> None:
        """Publish our record of one job, if it has changed or is due again: any peer may cause this, as often as it likes."""
        record = self._board.record(job)
        if record is None:
            return
        await self._publish_if_due(record if self._board.leads(job) else self._as_own(record))

    def _hold(self) -> None:
        """Protect the blobs that our jobs need from deletion."""
        board, late = self._board, self._context.clock.monotonic() >= self._recalled_until
        for job in [
            j for j in self._recalled if late or j in board.concerned or board.leads(j) or board.gone(j)
        ]:
            del self._recalled[job]
        self._context.blobs.hold(self, board.needed_blobs().union(*self._recalled.values()))

    async def _keep(self) -> None:
        self._hold()
        if self._files is not None:
            records = (self._proofs.republished(self._newest(record)) for record in self._board.to_keep())
            await self._files.keep(records, self._board.gone)

    async def _publish_all(self, *records: JobRecord) -> None:
        await asyncio.gather(*map(self._publish, map(self._proofs.signed, records)))

    async def _publish_if_due(self, *records: JobRecord) -> None:
        await asyncio.gather(*map(self._publish_one_if_due, records))

    async def _publish_one_if_due(self, record: JobRecord) -> None:
        """Where the record has changed, or is due again. Waits for a publication of the same job that is under way."""
        async with self._publishing.setdefault(record.job, asyncio.Lock()):
            signed = self._proofs.signed(record)
            if self._published.get(signed.job) != signed:
                await self._publish(signed)

    async def _publish(self, signed: JobRecord) -> None:
        try:
            await self._context.directory.publish(signed, ttl_seconds=JOB_TTL_SECONDS)
        except SwarmError as error:
            log.warning("job %s (%s): not published: %s", signed.name, signed.job[:12], error)
        else:
            self._published[signed.job] = signed

    # --- what single peers are sent

    async def notify_owners(self, record: JobRecord) -> None:
        """Have the owners of the other stages look at the job now: it has ended, and their next heartbeat may be seconds away."""
        stages = range(1, min(record.stages, NOTIFIED_PEERS))
        claims = await asyncio.gather(
            *(self._context.directory.claims(record.job, stage) for stage in stages)
        )
        owners = {owner.peer for owner in map(winner, claims) if owner is not None}
        owners.discard(self._context.peer_id)
        await asyncio.gather(*(self._notify(peer, "launch", {"job": record.job}) for peer in owners))

    async def _notify_standbys(self, record: JobRecord) -> None:
        """Send them the record, so that they fetch the snapshot now and not when they read the directory next."""
        self._snapshotted(record)
        stages = range(min(record.stages, NOTIFIED_PEERS))
        known = [claim for stage in stages for claim in self._context.leases.recent(record.job, stage)]
        standbys = sorted(
            {claim.peer for claim in known if claim.role == "standby"} - {self._context.peer_id}
        )
        if len(standbys) > NOTIFIED_PEERS:
            # Anybody may stand by, under any number of ids; the others read it in the directory.
            standbys = self._context.random.sample(standbys, NOTIFIED_PEERS)
        sealed = self._context.directory.sealed(self._proofs.signed(record), ttl_seconds=JOB_TTL_SECONDS)
        await asyncio.gather(*(self._notify(peer, "snapshot", {"record": sealed}) for peer in standbys))

    async def forward_revocation(self, job: JobId, revocation: bytes) -> None:
        """Send a revocation that was new to us to all owners and standbys of the job: it may be of the lead's own grants."""
        law = self._context.access.law(job)
        stages = range(0 if law is None else min(law.stages, NOTIFIED_PEERS))
        known = {claim.peer for stage in stages for claim in self._context.leases.recent(job, stage)}
        header = {"job": job, "revocation": revocation}
        known.discard(self._context.peer_id)
        await asyncio.gather(
            *(self._notify(peer, "revoke", header) for peer in sorted(known)[:NOTIFIED_PEERS])
        )

    def receive_snapshot(self, sender: PeerId, data: object) -> None:
        """The lead sent us, its standby, the sealed record with a new snapshot. Raises RecordError, ValueError. Ignored from
        any peer but the lead that we know of: the directory decides there. Ignored where it states that the job has ended:
        that takes more than the lead."""
        record = self._context.directory.unsealed(data) if isinstance(data, bytes) else None
        if not isinstance(record, JobRecord) or record.author != sender:
            raise ValueError("snapshot needs the sealed job record of whoever sends it")
        lead = self._context.leases.known_tenure(record.job, 0)
        if lead is None or lead.holding != (sender, record.term) or record.state in ENDED:
            return
        if not lead.lives(self._context.directory.now()):
            return
        if record.job in self._board.concerned and not self._board.leads(record.job):
            self._board.remember(record)
        self._snapshotted(record)

    async def _notify(self, peer: PeerId, kind: str, header: Mapping[str, Any]) -> None:
        with suppress(SwarmError, TimeoutError):
            async with asyncio.timeout(NOTIFY_SECONDS):
                await call(self._context.transport, peer, JOB.name, kind, header)
