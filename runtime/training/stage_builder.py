"""From the parts of a training stage and a state to the stage in memory."""

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

HANDOVER_SECONDS = 5.0  # for the state that an owner hands over; a snapshot is as good, some steps ago
HANDOVER_BYTES_PER_SECOND = 125e3  # and more, for what takes longer at the rate of a slow uplink


class StageBuilder:
    """Stages of `plane`, which computes in the context's worker thread."""

    def __init__(self, context: Context, plane: Plane) -> None:
        self._context = context
        self._plane = plane

    async def build(self, parts: StageParts, checkpoint: Checkpoint) -> Loaded:
        """In the state of the snapshot `checkpoint`, or as the job begins where it names none. Raises BlobError, JobError."""
        state = await parts.files.load(checkpoint, parts.near)
        compute = self._context.compute.of(parts.whose)
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
        """As `build`; as the job begins where the snapshot cannot be had. QuotaExceeded where this disk does not take it: others
        may have the room."""
        try:
            return await self.build(parts, checkpoint)
        except QuotaExceeded:
            raise
        except (SwarmError, JobError) as error:
            if checkpoint.digest is None:
                raise
            # The lead takes everybody back to one that can be had, this one again or the one before.
            log.warning(
                "stage %d begins anew, without step %d: %s", parts.plan.stage.index, checkpoint.step, error
            )
            return await self.build(parts, Checkpoint())

    async def advance(self, loaded: Loaded, checkpoint: Checkpoint, near: Mapping[int, PeerId]) -> Loaded:
        """The stage at another snapshot, in the same memory. Raises BlobError, JobError."""
        state = await loaded.files.load(checkpoint, near)
        await self._context.compute.run(loaded.plane.load_state, state)
        return replace(loaded, start=checkpoint, residuals=snapshot.residuals(state))

    async def take_over(self, loaded: Loaded, handover: HandoverState, peer: PeerId | None) -> Loaded:
        """The stage in the state of `handover`, whose blob `peer` has; as it is where that cannot be had in time."""
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
