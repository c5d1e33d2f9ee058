"""Inputs and outputs of the two state machines of this folder that stay within one peer; those that other stages send or
receive are messages (`fusion.runtime.training.step.messages`). Frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusion.runtime.job.manifest import EdgeCodecs
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.history import UNKNOWN
from fusion.runtime.training.step.run_statistics import Attempt
from fusion.swarm.transport import PeerId

# --- to the lead, from its own peer


@dataclass(frozen=True)
class SnapshotDue:
    """A snapshot is due."""


@dataclass(frozen=True)
class SnapshotLost:
    """The requested snapshot takes so long that it is given up."""


@dataclass(frozen=True)
class ChangeCodecs:
    """Use other codecs from the next step on."""

    codecs: EdgeCodecs


@dataclass(frozen=True)
class StandsStill:
    """The step has stalled at the owner of a stage for which a standby is ready."""

    stage: int
    peer: PeerId
    term: int


@dataclass(frozen=True)
class Stop:
    """End the job after the running step."""


# --- from the lead, to its own peer


@dataclass(frozen=True)
class Committed:
    step: int
    reports: Mapping[int, m.Ready]  # by stage


@dataclass(frozen=True)
class FellBack:
    """Nobody holds the shards of `lost` any more."""

    lost: Checkpoint


@dataclass(frozen=True)
class Fail:
    """The job has failed."""

    text: str


# --- every stage hears from its own peer


@dataclass(frozen=True)
class Linked:
    """All streams to and from the stages that this one works with are up."""

    links: m.Links = ()


@dataclass(frozen=True)
class Unlinked:
    """A stream that this stage needs broke."""


@dataclass(frozen=True)
class Completed:
    """The stage's own microbatches of a step are done: what to tell the lead, if it is still the step under way."""

    ready: m.Ready


@dataclass(frozen=True)
class Restored:
    attempt: Attempt
    step: int
    history: str = UNKNOWN


@dataclass(frozen=True)
class LoadFailed:
    """The checkpoint of `Load` is unavailable or invalid, and why."""

    attempt: Attempt
    text: str


@dataclass(frozen=True)
class Leave:
    """Our peer leaves: hand the stage over at the next step boundary."""


@dataclass(frozen=True)
class Stay:
    """The state could not be handed over: keep the stage."""


# --- from a stage, to its own peer


@dataclass(frozen=True)
class Run:
    """Do what `after` asks for, then, unless it finishes the job, run the microbatches of `step`."""

    attempt: Attempt
    step: int
    after: m.After


@dataclass(frozen=True)
class Apply:
    learning_rate: float
    clip_factor: float


@dataclass(frozen=True)
class Drop:
    """Stop computing, drop gradients and stashes."""


@dataclass(frozen=True)
class Load:
    """Load the state of `checkpoint`, then report Restored or LoadFailed."""

    attempt: Attempt
    checkpoint: Checkpoint


@dataclass(frozen=True)
class HandOver:
    """Store the state, that of `step`, for the next owner."""

    step: int


@dataclass(frozen=True)
class GiveUp:
    """Leave the stage to another peer: why."""

    text: str


LeadEvent = (
    m.Join | m.Suspect | m.Ready | m.Failed | m.Leaving | m.Lack | m.Saved | SnapshotDue | SnapshotLost | ChangeCodecs | StandsStill | Stop
)  # fmt: skip
LeadAction = m.Begin | m.Commit | m.Discard | m.Hold | m.Restore | Committed | FellBack | Fail
StageEvent = (
    m.Begin | m.Commit | m.Discard | m.Hold | m.Restore
    | Linked | Unlinked | Completed | Restored | LoadFailed | Leave | Stay
)  # fmt: skip
StageAction = (
    m.Join | m.Suspect | m.Ready | m.Leaving | m.Lack | Run | Apply | Drop | Load | HandOver | GiveUp
)
