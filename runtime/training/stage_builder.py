"""Builds a training stage in memory from its parts and a state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.plane import Plane, TrainingStage
from fusion.runtime.training.compute.loss_scale import LossScaled
from fusion.runtime.training.lead.tuning import state_bytes
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.stage_source import StageParts
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.swarm.errors import QuotaExceeded, SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

HANDOVER_SECONDS = 5.0  # to fetch the state of a handover; the fallback is a snapshot, some steps older
HANDOVER_BYTES_PER_SECOND = 125e3  # in addition: the rate of a slow uplink


class StageBuilder:
    """`plane` computes on the context's worker thread."""

    def __init__(self, context: Context, plane: Plane) -> None:
        self._context = context
        self._plane = plane

    async def build(self, parts: StageParts, checkpoint: Checkpoint) -> Loaded:
        """The stage in the state of the snapshot `checkpoint`, or the initial one where it names none. Raises BlobError, JobError."""
        state = await parts.files.load(checkpoint, parts.near)
        compute = self._context.compute.of(parts.caller)
        plane: TrainingStage = await compute.run(
            self._plane.training, parts.plan.stage, snapshot.variables(state), parts.config.optimizer
        )
        if parts.config.precision == "fp16":
            plane = LossScaled(plane)
        if checkpoint.digest is not None:
            await compute.run(plane.load_state, state)
        return Loaded(
            plan=parts.plan,
            plane=plane,
            batches=parts.batches,
            files=parts.files,
            start=checkpoint,
            residuals=snapshot.residuals(state),
        )

    async def resume(self, parts: StageParts, checkpoint: Checkpoint) -> Loaded:
        """As `build`, but in the initial state where the snapshot is unavailable. Raises QuotaExceeded where this disk has no room for it:
        other peers may."""
        try:
            return await self.build(parts, checkpoint)
        except QuotaExceeded:
            raise
        except (SwarmError, JobError) as error:
            if checkpoint.digest is None:
                raise
            # The lead will have all stages restore one that is available, this one again or an older one.
            log.warning(
                "stage %d begins anew, without step %d: %s", parts.plan.stage.index, checkpoint.step, error
            )
            return await self.build(parts, Checkpoint())

    async def advance(self, loaded: Loaded, checkpoint: Checkpoint, near: Mapping[int, PeerId]) -> Loaded:
        """Load another snapshot into the same stage. Raises BlobError, JobError."""
        state = await loaded.files.load(checkpoint, near)
        await self._context.compute.run(loaded.plane.load_state, state)
        return replace(loaded, start=checkpoint, residuals=snapshot.residuals(state))

    async def take_over(self, loaded: Loaded, handover: HandoverState, peer: PeerId | None) -> Loaded:
        """Load the state of `handover`, whose blob `peer` has; unchanged where that is unavailable in time."""
        try:
            size = state_bytes(loaded.plan.stage)
            async with asyncio.timeout(HANDOVER_SECONDS + size / HANDOVER_BYTES_PER_SECOND):
                near = [peer] if peer is not None else []
                state = await loaded.files.load_shard(handover.shard, handover.version, near)
        except (SwarmError, JobError, TimeoutError) as error:
            stage = loaded.plan.stage.index
            log.warning(
                "stage %d goes on from a snapshot, not from what its last owner left: %s", stage, error
            )
            return loaded
        await self._context.compute.run(loaded.plane.load_state, state)
        return replace(
            loaded, start=handover.checkpoint, handover=handover, residuals=snapshot.residuals(state)
        )
