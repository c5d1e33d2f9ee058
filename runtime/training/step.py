"""The ready/commit/discard protocol of one training step, as two pure state machines.

    lead                                         every stage (the lead's own too)
    ----                                         --------------------------------
    has `join` of every stage at one step   <-   join      linked to its neighbours, state of step s
    begin (attempt, s)                      ->   runs its microbatches of step s
                                            <-   ready     gradients of step s are complete, squared norm
    commit (s, rate, clip), all ready       ->   applies them: step s + 1, which begins at once
    discard, when a stage or a link is lost ->   drops gradients; state is still that of step s
    restore (snapshot)                      ->   joined at unlike steps: everybody back to the newest snapshot
    finish                                  ->   the last snapshot is held; the job has ended

Nothing is applied before commit, so a failed step costs one step. An attempt is (term of the lead, counter): a
higher one always wins, and what belongs to a lower one is dropped wherever it arrives.

Each machine is `step(state, event) -> (state, actions)`. The shells are `fusion.runtime.training.lead` and
`fusion.runtime.training.stage_host`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fusion.runtime.job import TrainConfig
from fusion.runtime.planes.optimizer import clip_factor, learning_rate

Attempt = tuple[int, int]
NO_ATTEMPT: Attempt = (0, 0)


@dataclass(frozen=True, kw_only=True)
class After:
    """What every stage does once its state is that of a step, before it begins the step."""

    evaluate: bool = False
    snapshot: bool = False
    finish: bool = False  # no further step begins


def after(config: TrainConfig, step: int, *, stopping: bool = False) -> After:
    """What follows the commit that makes the state that of `step`."""
    finish = stopping or step >= config.steps
    every = config.evaluate_every
    held_out = config.data.held_out is not None
    return After(
        evaluate=held_out and step > 0 and (finish or (every > 0 and step % every == 0)),
        snapshot=finish or (step > 0 and step % config.snapshot_every == 0),
        finish=finish,
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a stage tells the lead when its gradients of a step are complete."""

    squared_norm: float = 0.0
    loss: float | None = None  # mean over the microbatches, from the stage that makes it
    busy: float = 0.0  # share of the step's time that the stage computed
    sent_bytes: int = 0  # payload since the stage was loaded
    received_bytes: int = 0


# --- events and actions, both sides


@dataclass(frozen=True)
class Joined:
    stage: int
    step: int


@dataclass(frozen=True)
class Lost:
    """A stage, or a link that it needs, is gone."""

    stage: int


@dataclass(frozen=True)
class Ready:
    stage: int
    attempt: Attempt
    step: int
    report: Report


@dataclass(frozen=True)
class Stop:
    """End the job after the step that is under way."""


@dataclass(frozen=True)
class Begin:
    attempt: Attempt
    step: int
    after: After


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
class Restore:
    """Everybody back to the newest snapshot that all stages hold (the initial weights where there is none)."""


@dataclass(frozen=True)
class Committed:
    """For the lead's own books: a step was committed."""

    step: int
    reports: Mapping[int, Report]


@dataclass(frozen=True)
class Fail:
    message: str


@dataclass(frozen=True)
class Linked:
    """All streams to and from the stages that this one works with are up."""


@dataclass(frozen=True)
class Unlinked:
    """A stream that this stage needs broke."""


@dataclass(frozen=True)
class Completed:
    """The stage's own microbatches of a step are done and its gradients are summed over its tie-groups."""

    attempt: Attempt
    step: int
    report: Report


@dataclass(frozen=True)
class Restored:
    step: int


@dataclass(frozen=True)
class Join:
    step: int


@dataclass(frozen=True)
class Suspect:
    """Tell the lead that a link is broken, so that it discards the step."""


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
    report: Report


@dataclass(frozen=True)
class Apply:
    learning_rate: float
    clip_factor: float


@dataclass(frozen=True)
class Drop:
    """Stop computing, drop gradients and stashes."""


@dataclass(frozen=True)
class Load:
    """Load the state of the newest snapshot, then report Restored."""


# --- the lead


@dataclass(frozen=True, kw_only=True)
class LeadState:
    config: TrainConfig
    stages: int
    term: int
    count: int = 0  # attempts begun by this lead
    phase: Literal["gathering", "running", "ended"] = "gathering"
    step: int = 0  # committed; meaningful while running
    joined: Mapping[int, int] = field(default_factory=dict)  # stage -> the step its state is of
    ready: Mapping[int, Report] = field(default_factory=dict)
    stopping: bool = False

    @property
    def attempt(self) -> Attempt:
        return (self.term, self.count)

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that the job waits for."""
        return tuple(s for s in range(self.stages) if s not in self.joined)


LeadEvent = Joined | Lost | Ready | Stop
LeadAction = Begin | Commit | Discard | Restore | Committed | Fail


def lead(state: LeadState, event: LeadEvent) -> tuple[LeadState, tuple[LeadAction, ...]]:
    if state.phase == "ended":
        return state, ()
    match event:
        case Joined(stage, step):
            # A stage that joins again has been away: what it had of the running step is lost.
            state, actions = _lose(state, stage)
            state = replace(state, joined={**state.joined, stage: step})
            state, more = _gather(state)
            return state, (*actions, *more)
        case Lost(stage):
            return _lose(state, stage)
        case Ready(stage, attempt, step, report):
            if state.phase != "running" or attempt != state.attempt or step != state.step:
                return state, ()
            state = replace(state, ready={**state.ready, stage: report})
            return _commit(state) if len(state.ready) == state.stages else (state, ())
        case Stop():
            return replace(state, stopping=True), ()


def _lose(state: LeadState, stage: int) -> tuple[LeadState, tuple[LeadAction, ...]]:
    left = {s: step for s, step in state.joined.items() if s != stage}
    running = state.phase == "running"
    state = replace(state, phase="gathering", joined=left, ready={})
    return state, ((Discard(state.attempt),) if running else ())


def _gather(state: LeadState) -> tuple[LeadState, tuple[LeadAction, ...]]:
    if state.missing:
        return state, ()
    steps = set(state.joined.values())
    if len(steps) > 1:
        return replace(state, joined={}), (Restore(),)
    step = steps.pop()
    state = replace(state, phase="running", step=step, count=state.count + 1)
    return state, (Begin(state.attempt, step, after(state.config, step, stopping=state.stopping)),)


def _commit(state: LeadState) -> tuple[LeadState, tuple[LeadAction, ...]]:
    # Summed in stage order, so that every lead finds the same float.
    squared_norm = sum(state.ready[s].squared_norm for s in range(state.stages))
    if not math.isfinite(squared_norm):
        return replace(state, phase="ended"), (
            Fail(
                f"the gradients of step {state.step} are not finite: a lower optimizer.learning_rate may help"
            ),
        )
    config = state.config
    commit = Commit(
        state.attempt,
        state.step,
        learning_rate(config.optimizer, state.step, config.steps),
        clip_factor(config.optimizer, squared_norm),
        after(config, state.step + 1, stopping=state.stopping),
    )
    committed = Committed(state.step, state.ready)
    step = state.step + 1
    joined = dict.fromkeys(range(state.stages), step)
    return replace(state, step=step, joined=joined, ready={}), (commit, committed)


# --- every stage


@dataclass(frozen=True, kw_only=True)
class StageState:
    step: int  # the step that the parameters are of
    attempt: Attempt = NO_ATTEMPT
    linked: bool = False
    phase: Literal["idle", "running", "ready", "restoring"] = "idle"


StageEvent = Linked | Unlinked | Begin | Completed | Commit | Discard | Restore | Restored
StageAction = Join | Suspect | Run | SendReady | Apply | Drop | Load


def stage(state: StageState, event: StageEvent) -> tuple[StageState, tuple[StageAction, ...]]:
    match event:
        case Linked():
            state, actions = _idle(replace(state, linked=True))
            return state, (*actions, *(() if state.phase == "restoring" else (Join(state.step),)))
        case Unlinked():
            state, actions = _idle(replace(state, linked=False))
            return state, (*actions, Suspect())
        case Begin(attempt, step, first):
            if attempt <= state.attempt or not state.linked or state.phase == "restoring":
                return state, ()
            state, actions = _idle(replace(state, attempt=attempt))
            if step != state.step:  # the lead has mistaken us: tell it again where we are
                return state, (*actions, Join(state.step))
            return replace(state, phase="running"), (*actions, Run(attempt, step, first))
        case Completed(attempt, step, report):
            if state.phase != "running" or (attempt, step) != (state.attempt, state.step):
                return state, ()
            return replace(state, phase="ready"), (SendReady(attempt, step, report),)
        case Commit(attempt, step, rate, clip, following):
            if state.phase != "ready" or (attempt, step) != (state.attempt, state.step):
                return state, ()
            state = replace(state, step=step + 1, phase="running")
            return state, (Apply(rate, clip), Run(attempt, step + 1, following))
        case Discard(attempt):
            return _idle(state) if attempt >= state.attempt else (state, ())
        case Restore():
            state, actions = _idle(state)
            return replace(state, phase="restoring"), (*actions, Load())
        case Restored(step):
            state = replace(state, step=step, phase="idle")
            return state, ((Join(step),) if state.linked else ())


def _idle(state: StageState) -> tuple[StageState, tuple[StageAction, ...]]:
    if state.phase in ("idle", "restoring"):
        return state, ()
    return replace(state, phase="idle"), (Drop(),)
