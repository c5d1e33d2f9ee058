"""The lead's side of the commit protocol (`fusion.runtime.training.step.protocol`), pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fusion.runtime.job.manifest import EdgeCodecs, TrainConfig
from fusion.runtime.planes.learning_rate import clip_factor, learning_rate
from fusion.runtime.training.data.ledger import UNTRAINED, Ledger, fed_digest
from fusion.runtime.training.data.samples import sample_indices
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step.attendance import Attendance
from fusion.runtime.training.step.run_statistics import NO_ATTEMPT, Attempt, Interruptions, RunStatistics
from fusion.runtime.training.step.snapshot_books import SnapshotBooks

MAX_FAILURES = 3  # of one step, at any stage, before the job fails


@dataclass(frozen=True, kw_only=True)
class LeadState:
    config: TrainConfig
    stages: int
    term: int
    samples: int | None = None  # in the training data; None: the lead's stage reads none
    count: int = 0  # attempts made by this lead
    phase: Literal["gathering", "running", "ended"] = "gathering"
    ledger: Ledger = UNTRAINED  # of the state that our own stage has: the next step is ledger.steps
    here: Attendance = field(default_factory=Attendance)
    ready: Mapping[int, e.StageReport] = field(default_factory=dict)
    snapshots: SnapshotBooks = field(default_factory=SnapshotBooks)
    interruptions: Interruptions = field(default_factory=Interruptions)
    wires: EdgeCodecs | None = None  # chosen since the job began; None: those that it began with
    rewired: bool = False  # nobody has been told yet
    stopping: bool = False
    restoring: Attempt = NO_ATTEMPT  # the restore that was asked for last: others may hand over meanwhile

    @property
    def step(self) -> int:
        """Committed steps."""
        return self.ledger.steps

    @property
    def attempt(self) -> Attempt:
        return (self.term, self.count)

    @property
    def tally(self) -> RunStatistics:
        return self.interruptions.tally

    def count_on(self, tally: RunStatistics) -> LeadState:
        """With those statistics of the job so far."""
        return replace(self, interruptions=replace(self.interruptions, tally=tally))

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that the job waits for."""
        return tuple(s for s in range(self.stages) if s not in self.here.joined)


Result = tuple[LeadState, tuple[e.LeadAction, ...]]


def lead(state: LeadState, event: e.LeadEvent) -> Result:
    if state.phase == "ended":
        return state, ()
    match event:
        case e.Joined():
            return _join(state, event)
        case e.Lost(stage, entry):
            if entry != state.here.entries.get(stage):  # it has joined again since
                return state, ()
            return _lose(state, stage)
        case e.Ready(stage, attempt, step, report):
            if state.phase != "running" or (attempt, step) != (state.attempt, state.step):
                return state, ()
            state = replace(state, ready={**state.ready, stage: report})
            return _commit(state) if len(state.ready) == state.stages else (state, ())
        case e.Failed(stage, attempt, text):
            if state.phase != "running" or attempt != state.attempt:
                return state, ()
            state = state.count_on(state.tally.fail(state.step))
            if state.tally.failed[1] >= MAX_FAILURES:
                return replace(state, phase="ended"), (e.Fail(f"stage {stage}: {text}"),)
            return _lose(state, stage)
        case e.Leaving(stage, entry):
            # It asks again whenever it joins.
            if stage in state.here.held or entry != state.here.entries.get(stage):
                return state, ()
            return _hold(replace(state, here=state.here.leave(stage)))
        case e.Lacking(stage, attempt):
            return _lack(state, stage, attempt)
        case e.Saved(point):
            return replace(state, snapshots=state.snapshots.saved(point)), ()
        case e.SnapshotLost():
            return replace(state, snapshots=replace(state.snapshots, saving=False)), ()
        case e.SnapshotDue():
            return replace(state, snapshots=replace(state.snapshots, due=True)), ()
        case e.ChangeCodecs(wires):
            return replace(state, wires=wires, rewired=True), ()
        case e.Stop():
            return replace(state, stopping=True), ()


# --- who is here


def _join(state: LeadState, event: e.Joined) -> Result:
    stage, known = event.stage, state.here.entries.get(event.stage)
    if known is not None and not e.supersedes(event.entry, known):
        return state, ()
    # A stage that joins again has been away: what it had of the running step is lost.
    state, actions = _lose(replace(state, here=state.here.stay(stage)), stage)
    interruptions = state.interruptions.merge(event.tally)
    if state.here.replaced(event):
        interruptions = interruptions.lose()
    if 0 < event.attempt[0] < state.term:
        interruptions = interruptions.lose_lead()
    if event.abandoned:  # nobody told it so: the lead of that attempt is no more
        interruptions = interruptions.discard(event.attempt)
    state = replace(
        state,
        here=state.here.join(event),
        snapshots=state.snapshots.learn(event.newest).learn(event.before),
        interruptions=interruptions,
    )
    state, more = _gather(state)
    state, held = _hold(state)
    return state, (*actions, *more, *held)


def _lose(state: LeadState, stage: int) -> Result:
    running = state.phase == "running"
    state = replace(state, phase="gathering", here=state.here.lose(stage), ready={})
    if not running:
        return state, ()
    discard = e.Discard(state.attempt)
    interruptions = replace(state.interruptions.discard(state.attempt), broken=True)
    state, actions = _hold(replace(state, interruptions=interruptions))
    return state, (discard, *actions)


def _gather(state: LeadState) -> Result:
    """Begin when everybody is here, or go back to where everybody can be."""
    if state.missing or state.phase != "gathering" or not state.here.agree:
        return state, ()
    if set(state.here.joined.values()) != {state.ledger.steps}:
        return _restore(state)
    step, config, snapshots = state.step, state.config, state.snapshots
    # What was asked for at this step and is not whole yet will not be: the others have begun anew.
    due = snapshots.newest.step != step and (snapshots.due or snapshots.asked == step)
    following = e.after(config, step, stopping=state.stopping, due=due)
    if snapshots.newest.step == step and not following.finish:
        following = replace(following, snapshot=False)  # we have just come back to it
    # A new owner knows only what the job began with, and others may have heard of a choice of the lead before us.
    following = replace(following, wires=config.wires if state.wires is None else state.wires)
    state = replace(
        state,
        phase="running",
        count=state.count + 1,
        rewired=False,
        snapshots=replace(snapshots, saving=False),
        interruptions=state.interruptions.recover(),
    )
    state = _asked(state, following)
    return state, (e.Begin(state.attempt, step, following, state.tally),)


def _restore(state: LeadState) -> Result:
    point = state.snapshots.newest
    state = replace(
        state,
        here=replace(state.here, joined={}),
        count=state.count + 1,
        ledger=point.ledger,
        interruptions=replace(state.interruptions, broken=True),
    )
    return replace(state, restoring=state.attempt), (e.Restore(state.attempt, point),)


def _lack(state: LeadState, stage: int, attempt: Attempt) -> Result:
    # One that has joined since has another owner now.
    if state.phase != "gathering" or attempt != state.restoring or stage in state.here.joined:
        return state, ()
    lost = state.snapshots.newest
    state, actions = _restore(replace(state, snapshots=state.snapshots.lack()))
    fell_back = state.snapshots.newest != lost
    return state, (e.FellBack(lost), *actions) if fell_back else actions


# --- steps


def _commit(state: LeadState) -> Result:
    step, config = state.step, state.config
    # Summed in stage order, so that every lead finds the same float.
    squared_norm = sum(state.ready[s].squared_norm for s in range(state.stages))
    if not math.isfinite(squared_norm):
        text = f"the gradients of step {step} are not finite: a lower optimizer.learning_rate may help"
        return replace(state, phase="ended"), (e.Fail(text),)
    fed, wrong = _fed(state)
    if wrong:
        return _refuse(state, f"stage {wrong[0]} fed other samples than those of step {step}")
    ledger = state.ledger.commit(step, fed, config.microbatches * config.microbatch_size)
    reports = state.ready
    loss = next((report.loss for report in reports.values() if report.loss is not None), None)
    state = replace(
        state,
        ledger=ledger,
        here=replace(state.here, joined=dict.fromkeys(range(state.stages), step + 1)),
        ready={},
    ).count_on(state.tally.commit(step, loss))
    following = e.after(config, step + 1, stopping=state.stopping, due=state.snapshots.due)
    if following.snapshot and state.snapshots.saving and not following.finish:
        # One after the other: a job whose steps are quicker than its disks would never get one whole.
        following = replace(following, snapshot=False)
        state = replace(state, snapshots=replace(state.snapshots, due=True))
    if state.here.leaving and not following.finish:
        # What is due now is due when the next attempt begins.
        following = e.After(hold=tuple(sorted(state.here.leaving)))
        state = replace(state, here=state.here.part(), phase="gathering")
    elif state.rewired:
        following = replace(following, wires=state.wires)
        state = replace(state, rewired=False)
    state = _asked(state, following)
    commit = e.Commit(
        state.attempt,
        step,
        learning_rate(config.optimizer, step, config.steps),
        clip_factor(config.optimizer, squared_norm),
        following,
    )
    return state, (commit, e.Committed(step, reports))


def _asked(state: LeadState, following: e.After) -> LeadState:
    if not following.snapshot:
        return state
    return replace(state, snapshots=state.snapshots.ask(state.step))


def _fed(state: LeadState) -> tuple[str, tuple[int, ...]]:
    """The digest of the samples of the step, and the stages that fed others."""
    reported = {s: state.ready[s].fed for s in range(state.stages)}
    if state.samples is None:
        right = next((fed for fed in reported.values() if fed is not None), "")
    else:
        right = expected(state.config, state.step, state.samples)
    return right, tuple(s for s, fed in reported.items() if fed is not None and fed != right)


def expected(config: TrainConfig, step: int, samples: int) -> str:
    """The digest of the samples that the plan has for a step, out of so many."""
    return fed_digest(
        sample_indices(config.seed, step, m, config, samples) for m in range(config.microbatches)
    )


def _refuse(state: LeadState, text: str) -> Result:
    """Everybody is here and ready, but the step is wrong: run it again."""
    tally = state.tally.discard(state.attempt).fail(state.step)
    if tally.failed[1] >= MAX_FAILURES:
        return replace(state.count_on(tally), phase="ended"), (e.Fail(text),)
    discard = e.Discard(state.attempt)
    interruptions = replace(state.interruptions, tally=tally, broken=True)
    state, actions = _gather(replace(state, phase="gathering", ready={}, interruptions=interruptions))
    return state, (discard, *actions)


# --- handing over


def _hold(state: LeadState) -> Result:
    """Nothing is under way: those who want to leave may go, once our own stage is linked to them and can say so."""
    here = state.here
    if state.phase != "gathering" or not here.leaving or 0 not in here.joined:
        return state, ()
    state = replace(state, here=here.part(), count=state.count + 1)
    return state, tuple(e.Hold(state.attempt, s, here.entries[s]) for s in sorted(here.leaving))
