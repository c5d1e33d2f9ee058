"""A stage in memory, as a loader returns it to a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from fusion.runtime.planes.plane import TrainingStage
from fusion.runtime.training.compute.inbox import StagePlan
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.snapshots.stage_files import StageFiles
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.faults import Faults
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.runtime.training.step.history import Version
from fusion.runtime.training.step.run_statistics import CLEAN, RunStatistics


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A loaded stage: its part of the plan, its plane, data and blobs, and the version of its state."""

    plan: StagePlan
    plane: TrainingStage
    batches: Batches
    files: StageFiles
    start: Checkpoint  # the newest snapshot, perhaps without its ledger
    # See `fusion.compression.error_feedback`
    residuals: Mapping[str, torch.Tensor] = field(default_factory=dict)
    faults: Faults = ()  # of the job, as this peer remembers them
    remember: Callable[[Faults], None] = lambda faults: None  # stores faults for the next start
    handover: HandoverState | None = None  # from the previous owner: the state is that of its step

    @property
    def statistics(self) -> RunStatistics:
        """Run statistics of the job, as handed over with the state."""
        return CLEAN if self.handover is None else self.handover.statistics

    @property
    def version(self) -> Version:
        """The version of the state."""
        return self.start.version if self.handover is None else self.handover.version

    @property
    def step(self) -> int:
        """The step of the state."""
        return self.version.step
