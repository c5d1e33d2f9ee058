"""The state of the lead. Frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fusion.runtime.job.manifest import EdgeCodecs, TrainConfig
from fusion.runtime.training.data.ledger import UNTRAINED, Ledger
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.attendance import Attendance
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.faults import Faults
from fusion.runtime.training.step.handover_state import HandoverState
from fusion.runtime.training.step.history import UNKNOWN, Version
from fusion.runtime.training.step.run_statistics import (
    NO_ATTEMPT,
    Attempt,
    Interruptions,
    RunStatistics,
)
from fusion.runtime.training.step.snapshot_state import SnapshotState
from fusion.runtime.training.step.stalls import culprits
from fusion.swarm.transport import PeerId


def no_spares(stage: int) -> frozenset[PeerId]:
    return frozenset()


@dataclass(frozen=True, kw_only=True)
class LeadState:
    config: TrainConfig
    stages: int
    term: int
    samples: int | None = None  # in the training data; None: the lead's stage reads none
    count: int = 0  # attempts made by this lead
    phase: Literal["gathering", "running", "ended"] = "gathering"
    ledger: Ledger = UNTRAINED  # of the state of our own stage: the next step is ledger.steps
    history: str = UNKNOWN  # of that state
    here: Attendance = field(default_factory=Attendance)
    ready: Mapping[int, m.Ready] = field(default_factory=dict)
    snapshots: SnapshotState = field(default_factory=SnapshotState)
    interruptions: Interruptions = field(default_factory=Interruptions)
    codecs: EdgeCodecs | None = None  # chosen since the job began; None: the initial ones
    codecs_changed: bool = False  # not yet sent to the stages
    stopping: bool = False
    faults: Faults = ()  # at steps that are not committed
    # stage -> its owner and the faults of earlier leads that it remembers
    remembered: Mapping[int, tuple[PeerId, Faults]] = field(default_factory=dict)
    # stage -> (term, incarnation) of the owner that was told to give it up: its joins are ignored
    dismissed: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    # (step, stage, owner) of those that were replaced because the step stalled
    stood_still: tuple[tuple[int, int, PeerId], ...] = ()
    skipped: int = 0  # steps in a row that were committed without an update (float16)
    checked_step: int = -1  # the step that is run with every tensor checked
    peers: Mapping[int, PeerId] = field(default_factory=dict)  # stage -> its owner
    spare: Callable[[int], frozenset[PeerId]] = (
        no_spares  # peers that could take a stage; called only when one fails
    )
    restoring: Attempt = NO_ATTEMPT  # the last restore that was requested; handovers may follow it

    @property
    def step(self) -> int:
        """Committed steps."""
        return self.ledger.steps

    @property
    def version(self) -> Version:
        return Version(self.step, self.history)

    @property
    def attempt(self) -> Attempt:
        return (self.term, self.count)

    @property
    def statistics(self) -> RunStatistics:
        return self.interruptions.statistics

    def with_statistics(self, statistics: RunStatistics) -> LeadState:
        return replace(self, interruptions=replace(self.interruptions, statistics=statistics))

    def owner(self, stage: int) -> PeerId:
        return self.peers.get(stage) or PeerId(f"an owner of term {self.here.join_ids[stage][0]}")

    def culprits(self, waits: Mapping[int, int], *, unanimous: bool) -> tuple[int, ...]:
        """The stages of which one owner is to be replaced (`fusion.runtime.training.step.stalls`)."""
        here = self.here.joined if self.phase == "gathering" else self.ready
        needed = tuple(stage for stage in range(self.stages) if stage not in here)
        moved = {
            stage
            for step, stage, peer in self.stood_still
            if step == self.step and peer != self.peers.get(stage)
        }
        return culprits(self.stages, waits, needed, moved, unanimous=unanimous)

    def checks(self, step: int) -> bool:
        """Whether every tensor of the step is checked for numbers that are not finite."""
        return step == self.checked_step or any(fault.step == step for fault in self.faults)

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that have not joined."""
        return tuple(s for s in range(self.stages) if s not in self.here.joined)


Result = tuple[LeadState, tuple[e.LeadAction, ...]]


def initial_state(
    config: TrainConfig,
    stages: int,
    term: int,
    newest: Checkpoint,
    handover: HandoverState | None = None,
    *,
    samples: int | None,
    faults: Faults = (),
) -> LeadState:
    """The state of a lead that starts from the snapshot `newest`, or with `handover`."""
    begun = LeadState(
        config=config,
        stages=stages,
        term=term,
        samples=samples,
        faults=faults,
        ledger=newest.ledger,
        history=newest.version.history,
        snapshots=SnapshotState.begin(newest),
    )
    if handover is None:
        return begun
    return replace(
        begun,
        ledger=handover.ledger,
        history=handover.history,
        interruptions=Interruptions(statistics=handover.statistics, counted=True),
        codecs=handover.codecs,
    )
