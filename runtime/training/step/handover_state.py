"""What the leaving owner of a stage hands to the next one, so that no step is lost and no stage restores.

The leaving owner stops at a step boundary (`after.hold` of a commit, or `hold`), stores its state as a blob and names
it here; the others keep their state of that step and wait. The successor loads the blob and joins at that step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import build, plain
from fusion.runtime.job.manifest import EdgeCodecs
from fusion.runtime.training.data.ledger import UNTRAINED, Ledger
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.history import UNKNOWN, Version
from fusion.runtime.training.step.run_statistics import CLEAN, RunStatistics
from fusion.swarm.directory.records import MAX_STEP, Digest, is_digest


@dataclass(frozen=True, kw_only=True)
class HandoverState:
    step: int  # of the state
    shard: Digest  # blob: the stage's state at `step`, as in a snapshot; the leaving peer holds it
    checkpoint: Checkpoint  # the newest snapshot that all stages hold
    ledger: Ledger = UNTRAINED  # of `step`; from the lead only
    statistics: RunStatistics = CLEAN
    history: str = UNKNOWN  # of the state
    codecs: EdgeCodecs | None = None  # chosen since the job began; from the lead only

    @property
    def version(self) -> Version:
        return Version(self.step, self.history)

    def to_header(self) -> dict[str, Any]:
        return plain(self)

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> HandoverState:
        """JobError for anything that is not a handover state."""
        try:
            handover = build(cls, header, "handover", known_only=True)
        except ValueError as error:
            raise JobError(str(error)) from None
        if not 0 <= handover.step <= MAX_STEP or not is_digest(handover.shard):
            raise JobError("handover: a step of at least 0 and the digest of a blob")
        return replace(handover, statistics=CLEAN.merge(handover.statistics))
