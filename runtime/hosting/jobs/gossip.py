"""What a peer says about jobs without being asked: the records that it publishes of them.

It speaks for the jobs that it leads. On those that it does not lead but holds, or held, stages of, it repeats the
newest word while nobody else says it: a job that no record names any more could never find another lead. A new
snapshot is said at once, to the directory and straight to the job's standbys. What has not changed is said again by every other
heartbeat: each time costs whoever keeps the record a signature to check, and there may be dozens of jobs.
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

FOLLOW_SECONDS = 0.25  # between two looks at what our services know
RENEWED_SECONDS = 1.5 * HEARTBEAT_SECONDS  # after which a record is said again that has not changed
SAID_JOBS = 1024  # of which we know what we said last
LEADERLESS = "waiting for a peer to take the lead"
TELL_SECONDS = 2.0
TOLD_PEERS = 256


class JobGossip:
    """Of the jobs on `board`. `snapshotted` is called with the record of a job that has come to a new snapshot. `files`
    None: nothing is kept on disk."""

    def __init__(
        self,
        context: Context,
        services: Mapping[str, Service],
        board: JobBoard,
        snapshotted: Callable[[JobRecord], None] = lambda record: None,
        files: KeptJobRecords | None = None,
    ) -> None:
        # Within it, what a service does wrong concerns one job (`fusion.runtime.hosting.job_faults`).
        self.isolated: Callable[[JobId], AbstractContextManager[None]] = lambda job: nullcontext()
        self._context = context
        self._services = services
        self._board = board
        self._snapshotted = snapshotted
        self._files = files
        self._proofs = RecordProofs(context, board)
        # As signed, for as long as it need not be said again.
        self._said: TTLCache[JobId, JobRecord] = TTLCache(
            SAID_JOBS, RENEWED_SECONDS, timer=context.clock.monotonic
        )
        self._saying: WeakValueDictionary[JobId, asyncio.Lock] = WeakValueDictionary()
        # What jobs need that our disk told us of and in which we have no part yet: whoever else has one may come back later.
        self._recalled: dict[JobId, frozenset[Digest]] = {}
        self._recalled_until = context.clock.monotonic() + MAX_AGE_SECONDS

    async def start(self) -> None:
        """Say what our disk knows of: after a cold start nobody else may."""
        if self._files is not None:
            for record in await self._files.load():
                self._board.remember(record)
                store = self._context.blobs.store
                self._recalled[record.job] = await asyncio.to_thread(blobs_of, record, store)
        self._hold()
        self._board.update_from_directory((), (), ())
        await self._publish_all(*self._repeated())

    # --- what our own stages know

    def lead(self, claim: ClaimRecord, manifest: Manifest, before: JobRecord | None) -> None:
        """We own the first stage from now on; `before` is what the swarm said of the job."""
        known = [self._newest(r) for r in (before, self._board.record(claim.job)) if r is not None]
        self._board.lead(claim, manifest, max(known, key=job_order, default=None))

    def figures(self, job: JobId) -> Progress | None:
        """How a job stands of which we run a stage, or ran one to its end: what a watcher is told."""
        record = self._board.record(job)
        progress = None if record is None else self._progress(record)
        self._board.update(job, progress)
        return self._board.final(job) or progress

    def _update(self) -> None:
        for record in self._board.led:
            self._board.update(record.job, self._progress(record))

    def _progress(self, record: JobRecord) -> Progress | None:
        """How the job stands, as our own stage says."""
        with self.isolated(record.job):
            return self._services[record.kind].progress(record.job)
        return None

    def _newest(self, record: JobRecord) -> JobRecord:
        """What a word on a job that goes on says with what our own stage knows."""
        return record if record.state in ENDED else advanced(record, self._progress(record))

    async def conclude(self, record: JobRecord, progress: Progress | None = None) -> None:
        """A stage of the job ran here to the job's end, which `progress` tells of. If its lead vanishes now, nobody
        else may ever say so: say it before the stage is free, and from now on against all who believe that the job
        goes on."""
        if progress is None or progress.state not in CONCLUDED:
            return
        self._board.conclude(record, progress, record.term)
        with suppress(TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await self.publish_job(record.job)

    def concludes(self, record: JobRecord) -> bool:
        """Whether our own lead has ended the job, and may have last words to say. It has not where we took the lead
        while the one before us was ending the job, which another stage of ours heard of."""
        progress = self._progress(record)
        ours = record.author == self._context.peer_id and self._board.leads(record.job)
        return ours and progress is not None and progress.finished

    # --- what the directory gets to hear

    def _repeat(self, record: JobRecord) -> JobRecord:
        """The newest word on a job, as we say it ourselves."""
        us = self._context.peer_id
        record = replace(self._newest(record), author=us)
        if record.state not in ENDED:
            return replace(record, lead=None, message=LEADERLESS)
        # The lead of a job that has ended is whoever can tell how it went.
        return replace(record, lead=None if self._board.final(record.job) is None else us)

    def _repeated(self) -> list[JobRecord]:
        return [self._repeat(record) for record in self._board.repeated]

    async def publish(self) -> None:
        """Say how the jobs stand that we speak for, where that was not said lately."""
        self._update()
        await asyncio.gather(self._publish_if_due(*self._board.led, *self._repeated()), self._keep())

    async def publish_all(self) -> None:
        """We leave: say what we know of every job, so that whoever leads next knows it too. Before our claims are
        released, or others would see a job without a lead and without its newest snapshot."""
        self._update()
        ours = [self._repeat(record) for record in self._board.led]
        await asyncio.gather(self._publish_all(*ours, *self._repeated()), self._keep())

    async def follow(self) -> None:
        """Say at once, for ever, when a job that we lead has come to a new snapshot or to its end."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            await self.catch_up()

    async def catch_up(self) -> None:
        """What `follow` does each time."""
        self._update()
        changed = self._board.changed()
        running = [record for record in changed if record.state not in ENDED]
        await asyncio.gather(
            self._keep(), self._publish_if_due(*changed), *map(self._notify_standbys, running)
        )

    async def publish_job(self, job: JobId) -> None:
        """What we have to say of one job, where that was not said lately: anybody may ask for it, as often as they like."""
        record = self._board.record(job)
        if record is None:
            return
        await self._publish_if_due(record if self._board.leads(job) else self._repeat(record))

    def _hold(self) -> None:
        """What the jobs need that we speak for is not deleted."""
        board, late = self._board, self._context.clock.monotonic() >= self._recalled_until
        for job in [
            j for j in self._recalled if late or j in board.concerned or board.leads(j) or board.gone(j)
        ]:
            del self._recalled[job]
        self._context.blobs.hold(self, board.needed_blobs().union(*self._recalled.values()))

    async def _keep(self) -> None:
        self._hold()
        if self._files is not None:
            records = (self._proofs.repeated(self._newest(record)) for record in self._board.to_keep())
            await self._files.keep(records, self._board.gone)

    async def _publish_all(self, *records: JobRecord) -> None:
        await asyncio.gather(*map(self._publish, map(self._proofs.signed, records)))

    async def _publish_if_due(self, *records: JobRecord) -> None:
        await asyncio.gather(*map(self._publish_one_if_due, records))

    async def _publish_one_if_due(self, record: JobRecord) -> None:
        """Where what we say of the job has changed, or was said too long ago. Whoever is on the way of saying it is waited for."""
        async with self._saying.setdefault(record.job, asyncio.Lock()):
            signed = self._proofs.signed(record)
            if self._said.get(signed.job) != signed:
                await self._publish(signed)

    async def _publish(self, signed: JobRecord) -> None:
        try:
            await self._context.directory.publish(signed, ttl_seconds=JOB_TTL_SECONDS)
        except SwarmError as error:
            log.warning("job %s (%s): not published: %s", signed.name, signed.job[:12], error)
        else:
            self._said[signed.job] = signed

    # --- what single peers get to hear

    async def notify_owners(self, record: JobRecord) -> None:
        """The owners of the other stages need not wait for their next heartbeat to learn that the job has ended."""
        claims = await asyncio.gather(
            *(self._context.directory.claims(record.job, s) for s in range(1, min(record.stages, TOLD_PEERS)))
        )
        owners = {owner.peer for owner in map(winner, claims) if owner is not None}
        owners.discard(self._context.peer_id)
        await asyncio.gather(*(self._notify(peer, "launch", {"job": record.job}) for peer in owners))

    async def _notify_standbys(self, record: JobRecord) -> None:
        """They bring the snapshot to themselves now, and not when they look into the directory next."""
        self._snapshotted(record)
        stages = range(min(record.stages, TOLD_PEERS))
        known = [claim for stage in stages for claim in self._context.leases.recent(record.job, stage)]
        standbys = sorted(
            {claim.peer for claim in known if claim.role == "standby"} - {self._context.peer_id}
        )
        if len(standbys) > TOLD_PEERS:
            # Anybody may stand by, under any number of ids; whom we do not tell reads it in the directory.
            standbys = self._context.random.sample(standbys, TOLD_PEERS)
        sealed = self._context.directory.sealed(self._proofs.signed(record), ttl_seconds=JOB_TTL_SECONDS)
        await asyncio.gather(*(self._notify(peer, "snapshot", {"record": sealed}) for peer in standbys))

    async def pass_on(self, job: JobId, revocation: bytes) -> None:
        """All who have to do with the job learn of a revocation that was new to us: its lead may be whom it is about."""
        law = self._context.access.law(job)
        stages = range(0 if law is None else min(law.stages, TOLD_PEERS))
        known = {claim.peer for stage in stages for claim in self._context.leases.recent(job, stage)}
        header = {"job": job, "revocation": revocation}
        known.discard(self._context.peer_id)
        await asyncio.gather(*(self._notify(peer, "revoke", header) for peer in sorted(known)[:TOLD_PEERS]))

    def follow_lead(self, sender: PeerId, data: object) -> None:
        """A lead told us, its standby, of a new snapshot. Raises RecordError, ValueError. Others than the lead as we
        know it may be right, but the directory will say so. That the job has ended is not for the lead alone to say."""
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
            async with asyncio.timeout(TELL_SECONDS):
                await call(self._context.transport, peer, JOB.name, kind, header)
