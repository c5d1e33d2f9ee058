"""What happens to the two machines of `fusion.runtime.training.step.protocol`, and what they decide: frozen values, one each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusion.runtime.job.manifest import EdgeCodecs, TrainConfig
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.run_statistics import CLEAN, NO_ATTEMPT, Attempt, RunStatistics

# (term of the stage's owner, the number that its host drew when it was loaded, how often it has joined since). A peer
# that starts anew may find its claim still its own: then another host follows under the same term.
Entry = tuple[int, int, int]
NO_ENTRY: Entry = (0, 0, 0)
Links = tuple[tuple[int, int], ...]  # (stage, term of its owner) at the other end of each link of a stage


@dataclass(frozen=True, kw_only=True)
class After:
    """What every stage does once its state is that of a step, before it begins the step."""

    evaluate: bool = False
    snapshot: bool = False
    finish: bool = False  # no further step begins
    hold: tuple[int, ...] = ()  # stages that are handed over now: nothing begins until they have joined anew
    wires: EdgeCodecs | None = None  # what tensors are sent as from now on; None: as before


def supersedes(entry: Entry, known: Entry) -> bool:
    """Whether a join is newer than another of the same stage. Of two hosts under one term the one that speaks last is
    the newer: the streams of the other have ended with its process."""
    if entry[0] != known[0]:
        return entry[0] > known[0]
    return entry[1] != known[1] or entry[2] > known[2]


def after(config: TrainConfig, step: int, *, stopping: bool = False, due: bool = False) -> After:
    """What follows the commit that makes the state that of `step`; `due`: a snapshot is."""
    finish = stopping or step >= config.steps
    held_out = config.data.held_out is not None
    return After(
        evaluate=held_out and step > 0 and (finish or _every(config.evaluate_every, step)),
        snapshot=finish or (step > 0 and (due or _every(config.snapshot_every, step))),
        finish=finish,
    )


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What a stage tells the lead when its gradients of a step are complete."""

    squared_norm: float = 0.0
    loss: float | None = None  # mean over the microbatches, from the stage that makes it
    fed: str | None = (
        None  # `fusion.runtime.training.data.ledger.fed_digest` of the samples it read; None where it reads none
    )
    busy: float = 0.0  # share of the step's time that the stage computed
    sent_bytes: int = 0  # payload since the stage was loaded
    received_bytes: int = 0


# --- the lead hears


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A stage is linked to its neighbours and has the state of `step`."""

    stage: int
    step: int  # -1: it has none
    entry: Entry
    links: Links = ()
    attempt: Attempt = NO_ATTEMPT  # the newest that it has heard of
    abandoned: bool = False  # it dropped a step of that attempt before the lead said so
    newest: Checkpoint = START  # the newest snapshot that the stage knows to be held
    before: Checkpoint = START  # the one before it
    tally: RunStatistics = CLEAN


@dataclass(frozen=True)
class Lost:
    """A stage, or a link that it needs, is gone, after its join `entry`."""

    stage: int
    entry: Entry


@dataclass(frozen=True)
class Ready:
    stage: int
    attempt: Attempt
    step: int
    report: StageReport


@dataclass(frozen=True)
class Failed:
    """A stage could not compute its part of the step."""

    stage: int
    attempt: Attempt
    text: str


@dataclass(frozen=True)
class Leaving:
    """The owner of a stage wants to hand it over at the next step boundary."""

    stage: int
    entry: Entry


@dataclass(frozen=True)
class Lacking:
    """A stage found nobody who holds what a restore asked it to load."""

    stage: int
    attempt: Attempt


@dataclass(frozen=True)
class Saved:
    """Every shard of a snapshot lies on two peers, where there are two."""

    point: Checkpoint


@dataclass(frozen=True)
class SnapshotDue:
    """The time has come for a snapshot."""


@dataclass(frozen=True)
class SnapshotLost:
    """The snapshot that was asked for takes so long that it is given up."""


@dataclass(frozen=True)
class ChangeCodecs:
    """Tensors are to be sent otherwise from the next step on."""

    wires: EdgeCodecs


@dataclass(frozen=True)
class Stop:
    """End the job after the step that is under way."""


# --- the lead tells everyone; every stage hears


@dataclass(frozen=True)
class Begin:
    attempt: Attempt
    step: int
    after: After
    tally: RunStatistics = CLEAN


@dataclass(frozen=True)
class Commit:
    """Apply the gradients of `step`; `after` says what precedes the next step, which begins at once."""

    attempt: Attempt
    step: int
    learning_rate: float
    clip_factor: float
    after: After


@dataclass(frozen=True)
class Discard:
    attempt: Attempt


@dataclass(frozen=True)
class Hold:
    """To a stage that leaves while no step is under way: hand over the state as it is."""

    attempt: Attempt
    stage: int
    entry: Entry  # its join that this answers: one that has joined again since asks again


@dataclass(frozen=True)
class Restore:
    """Everybody back to `point`."""

    attempt: Attempt
    point: Checkpoint


# --- for the lead's own books


@dataclass(frozen=True)
class Committed:
    step: int
    reports: Mapping[int, StageReport]


@dataclass(frozen=True)
class FellBack:
    """Nobody holds the shards of `lost` any more."""

    lost: Checkpoint


@dataclass(frozen=True)
class Fail:
    message: str


# --- every stage hears from its own peer


@dataclass(frozen=True)
class Linked:
    """All streams to and from the stages that this one works with are up."""

    links: Links = ()


@dataclass(frozen=True)
class Unlinked:
    """A stream that this stage needs broke."""


@dataclass(frozen=True)
class Completed:
    """The stage's own microbatches of a step are done and its gradients are summed over its tie-groups."""

    attempt: Attempt
    step: int
    report: StageReport


@dataclass(frozen=True)
class Restored:
    attempt: Attempt
    step: int


@dataclass(frozen=True)
class LoadFailed:
    """What `Load` asked for is nowhere to be had, or is not what it should be."""

    attempt: Attempt


@dataclass(frozen=True)
class Leave:
    """Our peer is leaving: hand the stage over at the next step boundary."""


@dataclass(frozen=True)
class Stay:
    """The state could not be handed over: go on."""


# --- every stage does


@dataclass(frozen=True)
class Join:
    step: int
    entry: Entry
    links: Links
    attempt: Attempt
    abandoned: bool
    tally: RunStatistics


@dataclass(frozen=True)
class Suspect:
    """Tell the lead that a link is broken, so that it discards the step."""

    entry: Entry


@dataclass(frozen=True)
class Run:
    """First what `after` asks for, then, unless it says finish, the microbatches of `step`."""

    attempt: Attempt
    step: int
    after: After


@dataclass(frozen=True)
class SendReady:
    attempt: Attempt
    step: int
    report: StageReport


@dataclass(frozen=True)
class Apply:
    learning_rate: float
    clip_factor: float


@dataclass(frozen=True)
class Drop:
    """Stop computing, drop gradients and stashes."""


@dataclass(frozen=True)
class Load:
    """Load the state of `point`, then report Restored or LoadFailed."""

    attempt: Attempt
    point: Checkpoint


@dataclass(frozen=True)
class SendLeaving:
    entry: Entry


@dataclass(frozen=True)
class Lack:
    attempt: Attempt


@dataclass(frozen=True)
class HandOver:
    """Store the state, that of `step`, for the next owner."""

    step: int


LeadEvent = (
    Joined
    | Lost
    | Ready
    | Failed
    | Leaving
    | Lacking
    | Saved
    | SnapshotDue
    | SnapshotLost
    | ChangeCodecs
    | Stop
)
LeadAction = Begin | Commit | Discard | Hold | Restore | Committed | FellBack | Fail
StageEvent = (
    Begin | Commit | Discard | Hold | Restore | Linked | Unlinked | Completed | Restored | LoadFailed | Leave | Stay
)  # fmt: skip
StageAction = Join | Suspect | Run | SendReady | Apply | Drop | Load | SendLeaving | Lack | HandOver
