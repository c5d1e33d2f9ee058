"""Training stages on their way into this peer's memory: for a stage that it has to run, now, and ahead of time for one
that it stands by for, so that taking it over costs no more than connecting to its neighbours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest, TrainConfig
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.planes.torch_plane import TorchTrainingStage
from fusion.runtime.training.compute.inbox import StagePlan
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.lead.tuning import state_bytes
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.snapshots.stage_files import StageFiles
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

BATON_SECONDS = 5.0  # for the state that an owner hands over; a snapshot is as good, some steps ago
BATON_BYTES_PER_SECOND = 125e3  # and more, for what takes longer at the rate of a slow uplink

Place = tuple[JobId, int]


@dataclass
class _Ahead:
    """A stage that we stand by for: on disk, and in memory where there is room."""

    files: StageFiles
    memory_bytes: int
    point: Checkpoint | None = None  # what is on disk
    loaded: Loaded | None = None
    taken: bool = False  # hosted or forgotten: nobody else touches it any more
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the worker writes into the plane


class StageLoader:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._ahead: dict[Place, _Ahead] = {}
        self._running: set[Place] = set()
        self._graphs = StageGraphs(context)

    def is_ahead(self, job: JobId, index: int) -> bool:
        """Whether we stand by for the stage."""
        return (job, index) in self._ahead

    # --- ahead of time

    async def prepare(self, job: JobId, manifest: Manifest, index: int, record: JobRecord) -> int:
        """Bring the stage's newest snapshot here, and into memory if there is room; the step that is here then.
        Idempotent. Raises SwarmError, JobError, JobFailed."""
        config, place = _training(manifest, index), (job, index)
        if place in self._running:
            raise JobError(f"stage {index} of {manifest.name} runs here")
        plan = await self._plan(manifest, config, index)
        ahead = self._ahead.get(place)
        if ahead is None:
            files = StageFiles(self._context, job, manifest, plan.stage)
            ahead = self._ahead[place] = _Ahead(files, manifest.needed_bytes(index))
        point = _newest(_point(record), ahead.point)
        near = self._owners(job, manifest)
        await ahead.files.fetch(point, near)
        batches = await self._batches(manifest, config, plan.stage, near)
        ahead.point = point
        async with ahead.lock:
            if not ahead.taken and (ahead.loaded is None or not _same(ahead.loaded.start, point)):
                await self._warm(place, ahead, plan, config, batches, point, near)
        if not ahead.taken:
            await ahead.files.forget_before(point)
        return point.step

    def _keep(self, place: Place, ahead: _Ahead) -> bool:
        """Set memory aside for it if there is room. Whatever runs here may take it away at any moment."""

        def give_up() -> None:
            ahead.loaded = None

        return self._context.memory.keep(place, ahead.memory_bytes, give_up)

    async def _warm(
        self, place: Place, ahead: _Ahead, plan: StagePlan, config: TrainConfig, batches: Batches, point: Checkpoint,
        near: Mapping[int, PeerId],
    ) -> None:  # fmt: skip
        before, ahead.loaded = ahead.loaded, None  # nobody may have it half written
        if before is None and not self._keep(place, ahead):
            return
        try:
            if before is None:
                loaded = await self._build(plan, config, batches, ahead.files, point, near)
            else:
                state = await ahead.files.load(point, near)
                await self._context.compute.run(before.plane.load_state, state)
                loaded = replace(before, start=point, residuals=snapshot.residuals(state))
            if not ahead.taken:
                ahead.loaded = loaded
                if not self._context.memory.keeps(place):  # it was given up meanwhile
                    ahead.loaded = None
        finally:
            if ahead.loaded is None and self._ahead.get(place) is ahead:
                self._context.memory.forget(place)

    def forget(self, job: JobId, index: int) -> None:
        """No longer stand by for the stage. Its blobs stay until the store needs the room."""
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
        baton: HandoverState | None = None,
        peer: PeerId | None = None,
    ) -> Loaded:
        """The stage in memory: in the state of `baton`, whose blob `peer` has, or else of the newest snapshot that we
        know of (the lead says if there is a newer one). `release` it in the end. Raises SwarmError, JobError, JobFailed,
        MemoryError."""
        config, place = _training(manifest, index), (job, index)
        self._context.memory.hold(place, manifest.needed_bytes(index))
        self._running.add(place)
        ahead = self._ahead.pop(place, None)
        loaded = None
        if ahead is not None:
            async with ahead.lock:
                ahead.taken, loaded = True, ahead.loaded
            self._context.memory.forget(place)  # what was kept ready is what runs
        near = self._owners(job, manifest)
        if loaded is None:
            plan, record = await asyncio.gather(
                self._plan(manifest, config, index), self._context.directory.job(job)
            )
            files = ahead.files if ahead is not None else StageFiles(self._context, job, manifest, plan.stage)
            point = _newest(_point(record), ahead.point if ahead is not None else None)
            batches = await self._batches(manifest, config, plan.stage, near)
            loaded = await self._resume(plan, config, batches, files, point, near)
        return loaded if baton is None else await self._taken_over(loaded, baton, peer)

    def release(self, job: JobId, index: int) -> None:
        """The stage runs here no more."""
        self._running.discard((job, index))
        self._context.memory.release((job, index))

    async def _taken_over(self, loaded: Loaded, baton: HandoverState, peer: PeerId | None) -> Loaded:
        try:
            size = state_bytes(loaded.plan.stage)
            async with asyncio.timeout(BATON_SECONDS + size / BATON_BYTES_PER_SECOND):
                near = [peer] if peer is not None else []
                state = await loaded.files.load_shard(baton.shard, baton.step, near)
        except (SwarmError, JobError, TimeoutError) as error:
            stage = loaded.plan.stage.index
            log.warning(
                "stage %d goes on from a snapshot, not from what its last owner left: %s", stage, error
            )
            return loaded
        await self._context.compute.run(loaded.plane.load_state, state)
        return replace(loaded, start=baton.point, baton=baton, residuals=snapshot.residuals(state))

    # --- the parts of it

    async def _plan(self, manifest: Manifest, config: TrainConfig, index: int) -> StagePlan:
        stages, ties = await self._graphs.of(manifest)
        return StagePlan(
            stage=stages[index],
            stages=len(stages),
            ties=tuple(group for group in ties if index in group.stages),
            sizes={"batch": config.microbatch_size, "sequence": config.sequence},
            memory_bytes=manifest.memory_bytes,
            whole=stages if index == 0 else (),
        )

    async def _resume(
        self, plan: StagePlan, config: TrainConfig, batches: Batches, files: StageFiles, point: Checkpoint,
        near: Mapping[int, PeerId],
    ) -> Loaded:  # fmt: skip
        try:
            return await self._build(plan, config, batches, files, point, near)
        except (SwarmError, JobError) as error:
            if point.digest is None:
                raise
            # The lead takes everybody back to one that can be had, this one again or the one before.
            log.warning("stage %d begins anew, without step %d: %s", plan.stage.index, point.step, error)
            return await self._build(plan, config, batches, files, Checkpoint(), near)

    async def _build(
        self, plan: StagePlan, config: TrainConfig, batches: Batches, files: StageFiles, point: Checkpoint,
        near: Mapping[int, PeerId],
    ) -> Loaded:  # fmt: skip
        state = await files.load(point, near)
        plane = await self._context.compute.run(
            TorchTrainingStage,
            plan.stage,
            snapshot.variables(state),
            config.optimizer,
            device=self._context.device,
        )
        if point.digest is not None:
            await self._context.compute.run(plane.load_state, state)
        return Loaded(
            plan=plan,
            plane=plane,
            batches=batches,
            files=files,
            start=point,
            residuals=snapshot.residuals(state),
        )

    async def _batches(
        self, manifest: Manifest, config: TrainConfig, stage: Stage, near: Mapping[int, PeerId]
    ) -> Batches:
        received = {edge.name for edge in stage.receives}
        inputs = [i.name for i in stage.graph.inputs if i.name not in received]
        train = held_out = None
        if Batches.needs_blobs(config, inputs):
            hints = list(dict.fromkeys([*near.values(), *(peer for peer in manifest.proposed if peer)]))
            train = await self._context.blobs.fetch(config.data.train, hints)
            if config.data.held_out is not None:
                held_out = await self._context.blobs.fetch(config.data.held_out, hints)
        return await asyncio.to_thread(Batches, config, inputs, train, held_out)

    def _owners(self, job: JobId, manifest: Manifest) -> dict[int, PeerId]:
        """Who held each stage when we last looked."""
        found = {stage: winner(self._context.leases.recent(job, stage)) for stage in range(manifest.stages)}
        us = self._context.peer_id
        return {stage: owner.peer for stage, owner in found.items() if owner is not None and owner.peer != us}


def _training(manifest: Manifest, index: int) -> TrainConfig:
    if manifest.train is None or not 0 <= index < manifest.stages:
        raise JobError(f"stage {index} of {manifest.name} is no stage of a training job")
    return manifest.train


def _point(record: JobRecord | None) -> Checkpoint:
    if record is None or record.snapshot is None:
        return Checkpoint()
    return Checkpoint(step=record.snapshot_step, digest=record.snapshot)


def _newest(point: Checkpoint, other: Checkpoint | None) -> Checkpoint:
    return point if other is None else max(point, other, key=lambda each: each.rank)


def _same(point: Checkpoint, other: Checkpoint) -> bool:
    return (point.step, point.digest) == (other.step, other.digest)
