"""A stage in memory, with its draft model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusion.runtime.planes.plane import DecodingStage
from fusion.runtime.serving.drafts.draft_model import DraftModel
from fusion.runtime.serving.ring.frames import RingPlan
from fusion.runtime.serving.ring.stage_session import StageRunner


@dataclass(eq=False)
class LoadedStage:
    """A stage in memory, hosted or on standby. The first stage may have a draft model, whose memory counts as the stage's."""

    plan: RingPlan
    plane: DecodingStage
    stage_bytes: int  # of its own weights
    draft: DraftModel | None = None

    @property
    def weights_bytes(self) -> int:
        return self.stage_bytes + (0 if self.draft is None else self.draft.weights_bytes)

    @property
    def kv_bytes(self) -> int:
        """Reserved for sessions, and retained prefixes."""
        return self.plane.used_bytes() + (0 if self.draft is None else self.draft.used_bytes())

    def runner(self, max_sequence: int, account: Callable[[], None]) -> StageRunner:
        return StageRunner(self.plane, self.plan, max_sequence, account, self.draft)
