"""Loads training stages into this peer's memory: a stage that it runs, now, and one that it is a standby of, ahead of time, so
that a takeover costs no more than connecting to the partners.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial

from cachetools import FIFOCache

from fusion.runtime.belief.reading import newest
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.planes.plane import Plane
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.snapshots.stage_files import StageFiles
from fusion.runtime.training.stage_builder import StageBuilder
from fusion.runtime.training.stage_source import StageParts, StageSource, trained
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.faults import Faults
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.swarm.directory.records import JobId, JobRecord, Place
from fusion.swarm.transport import PeerId

REMEMBERED_JOBS = 1024


@dataclass
class _Ahead:
    """A stage that this peer is a standby of: on disk, and in memory where there is room."""

    files: StageFiles
    memory_bytes: int
    checkpoint: Checkpoint | None = None  # what is on disk
    loaded: Loaded | None = None
    taken: bool = False  # hosted or forgotten: no longer ours to change
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the worker writes into the plane


class StageLoader:
    def __init__(self, context: Context, plane: Plane, source: StageSource) -> None:
        self._context = context
        self._source = source
        self._builder = StageBuilder(context, plane)
        self._ahead: dict[Place, _Ahead] = {}
        self._running: set[Place] = set()
        # As the last stage of the job that ran here knew them
        self._faults: FIFOCache[JobId, Faults] = FIFOCache(REMEMBERED_JOBS)

    def is_ahead(self, job: JobId, index: int) -> bool:
        """Whether this peer is a standby of the stage."""
        return (job, index) in self._ahead

    # --- ahead of time

    async def prepare(self, job: JobId, manifest: Manifest, index: int, record: JobRecord) -> int:
        """Fetch the stage's newest snapshot, into memory if there is room. Returns its step. Idempotent. Raises SwarmError, JobError,
        JobFailed."""
        place = (job, index)
        if place in self._running:
            raise JobError(f"stage {index} of {manifest.name} runs here")
        plan = await self._source.plan(job, manifest, index)
        ahead = self._ahead.get(place)
        if ahead is None:
            files = self._source.files(job, manifest, plan)
            ahead = self._ahead[place] = _Ahead(files, manifest.needed_bytes(index))
        checkpoint = _newest(_checkpoint(record), ahead.checkpoint)
        near = self._source.owners(job, manifest)
        await ahead.files.fetch(checkpoint, near)
        parts = await self._source.parts(job, manifest, plan, ahead.files, near)
        ahead.checkpoint = checkpoint
        async with ahead.lock:
            if not ahead.taken and (ahead.loaded is None or not _same(ahead.loaded.start, checkpoint)):
                await self._warm(place, ahead, parts, checkpoint)
        if not ahead.taken:
            await ahead.files.forget_before(checkpoint)
        return checkpoint.step

    def _keep(self, place: Place, ahead: _Ahead) -> bool:
        """Reserve memory for it if there is room. A running stage may take it away at any moment."""

        def give_up() -> None:
            ahead.loaded = None

        return self._context.memory.keep(place, ahead.memory_bytes, give_up)

    async def _warm(self, place: Place, ahead: _Ahead, parts: StageParts, checkpoint: Checkpoint) -> None:
        before, ahead.loaded = ahead.loaded, None  # never seen half written
        if before is None and not self._keep(place, ahead):
            return
        try:
            if before is None:
                loaded = await self._builder.build(parts, checkpoint)
            else:
                loaded = await self._builder.advance(before, checkpoint, parts.near)
            if not ahead.taken:
                ahead.loaded = loaded
                if not self._context.memory.keeps(place):  # it was given up meanwhile
                    ahead.loaded = None
        finally:
            if ahead.loaded is None and self._ahead.get(place) is ahead:
                self._context.memory.forget(place)

    def forget(self, job: JobId, index: int) -> None:
        """Stop being a standby of the stage. Its blobs stay until the store needs the room."""
        ahead = self._ahead.pop((job, index), None)
        if ahead is not None:
            ahead.taken, ahead.loaded = True, None
            self._context.memory.forget((job, index))

    # --- now

    async def load(
        self,
        job: JobId,
        manifest: Manifest,
        index: int,
        handover: HandoverState | None = None,
        peer: PeerId | None = None,
    ) -> Loaded:
        """Load the stage: in the state of `handover`, whose blob `peer` has, or else of the newest snapshot that is known here (the
        lead has it restored if there is a newer one). `release` it in the end. Raises SwarmError, JobError, JobFailed,
        MemoryError."""
        trained(manifest, index)  # or it cannot be loaded at all
        place = (job, index)
        self._context.memory.hold(place, manifest.needed_bytes(index))
        self._running.add(place)
        ahead = self._ahead.pop(place, None)
        loaded = None
        if ahead is not None:
            try:
                async with ahead.lock:
                    loaded = ahead.loaded
            finally:  # we may be cancelled while it is loading, and no longer have it in `_ahead`
                ahead.taken, ahead.loaded = True, None
                self._context.memory.forget(place)  # the reservation becomes that of the running stage
        near = self._source.owners(job, manifest)
        if loaded is None:
            plan, record = await asyncio.gather(
                self._source.plan(job, manifest, index), newest(self._context, job, manifest)
            )
            files = ahead.files if ahead is not None else self._source.files(job, manifest, plan)
            checkpoint = _newest(_checkpoint(record), ahead.checkpoint if ahead is not None else None)
            parts = await self._source.parts(job, manifest, plan, files, near)
            loaded = await self._builder.resume(parts, checkpoint)
        loaded = replace(
            loaded, faults=self._faults.get(job, ()), remember=partial(self._faults.__setitem__, job)
        )
        return loaded if handover is None else await self._builder.take_over(loaded, handover, peer)

    def release(self, job: JobId, index: int) -> None:
        """The stage no longer runs here."""
        self._running.discard((job, index))
        self._context.memory.release((job, index))


def _checkpoint(record: JobRecord | None) -> Checkpoint:
    if record is None or record.snapshot is None or record.snapshot_step < 0:
        return Checkpoint()
    return Checkpoint(step=record.snapshot_step, digest=record.snapshot)


def _newest(checkpoint: Checkpoint, other: Checkpoint | None) -> Checkpoint:
    return checkpoint if other is None else max(checkpoint, other, key=lambda each: each.rank)


def _same(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    return (checkpoint.step, checkpoint.digest) == (other.step, other.digest)
