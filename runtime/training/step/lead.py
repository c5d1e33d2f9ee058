"""The lead's side of the commit protocol (`fusion.runtime.training.step`), pure."""

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
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.attendance import Attendance, supersedes
from fusion.runtime.training.step.history import UNKNOWN, Version, contents, extend
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
    history: str = UNKNOWN  # of that state
    here: Attendance = field(default_factory=Attendance)
    ready: Mapping[int, m.Ready] = field(default_factory=dict)
    snapshots: SnapshotBooks = field(default_factory=SnapshotBooks)
    interruptions: Interruptions = field(default_factory=Interruptions)
    codecs: EdgeCodecs | None = None  # chosen since the job began; None: those that it began with
    codecs_changed: bool = False  # nobody has been told yet
    stopping: bool = False
    restoring: Attempt = NO_ATTEMPT  # the restore that was asked for last: others may hand over meanwhile

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

    def count_on(self, statistics: RunStatistics) -> LeadState:
        """With those statistics of the job so far."""
        return replace(self, interruptions=replace(self.interruptions, statistics=statistics))

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that the job waits for."""
        return tuple(s for s in range(self.stages) if s not in self.here.joined)


Result = tuple[LeadState, tuple[e.LeadAction, ...]]


def lead(state: LeadState, event: e.LeadEvent, stage: int = 0) -> Result:
    """`stage`: that a message is from."""
    if state.phase == "ended":
        return state, ()
    match event:
        case m.Join():
            return _join(state, stage, event)
        case m.Suspect(join_id):
            if join_id != state.here.join_ids.get(stage):  # it has joined again since
                return state, ()
            return _lose(state, stage)
        case m.Ready(attempt, step):
            if state.phase != "running" or (attempt, step) != (state.attempt, state.step):
                return state, ()
            state = replace(state, ready={**state.ready, stage: event})
            return _commit(state) if len(state.ready) == state.stages else (state, ())
        case m.Failed(attempt, text):
            if state.phase != "running" or attempt != state.attempt:
                return state, ()
            state = state.count_on(state.statistics.fail(state.step))
            if state.statistics.failed[1] >= MAX_FAILURES:
                return replace(state, phase="ended"), (e.Fail(f"stage {stage}: {text}"),)
            return _lose(state, stage)
        case m.Leaving(join_id):
            # It asks again whenever it joins.
            if stage in state.here.held or join_id != state.here.join_ids.get(stage):
                return state, ()
            return _hold(replace(state, here=state.here.leave(stage)))
        case m.Lack(attempt):
            return _lack(state, stage, attempt)
        case m.Saved(checkpoint):
            return replace(state, snapshots=state.snapshots.saved(checkpoint)), ()
        case e.SnapshotLost():
            return replace(state, snapshots=replace(state.snapshots, saving=False)), ()
        case e.SnapshotDue():
            return replace(state, snapshots=replace(state.snapshots, due=True)), ()
        case e.ChangeCodecs(codecs):
            return replace(state, codecs=codecs, codecs_changed=True), ()
        case e.Stop():
            return replace(state, stopping=True), ()


def after(config: TrainConfig, step: int, *, stopping: bool = False, due: bool = False) -> m.After:
    """What follows the commit that makes the state that of `step`; `due`: a snapshot is."""
    finish = stopping or step >= config.steps
    held_out = config.data.held_out is not None
    return m.After(
        evaluate=held_out and step > 0 and (finish or _every(config.evaluate_every, step)),
        snapshot=finish or (step > 0 and (due or _every(config.snapshot_every, step))),
        finish=finish,
    )


def _every(period: int, step: int) -> bool:
    return period > 0 and step % period == 0


# --- who is here


def _join(state: LeadState, stage: int, join: m.Join) -> Result:
    known = state.here.join_ids.get(stage)
    if known is not None and not supersedes(join.join_id, known):
        return state, ()
    # A stage that joins again has been away: what it had of the running step is lost.
    state, actions = _lose(replace(state, here=state.here.stay(stage)), stage)
    interruptions = state.interruptions.merge(join.statistics)
    if state.here.replaced(stage, join.join_id):
        interruptions = interruptions.lose()
    if 0 < join.attempt[0] < state.term:
        interruptions = interruptions.lose_lead()
    if join.abandoned:  # nobody told it so: the lead of that attempt is no more
        interruptions = interruptions.discard(join.attempt)
    state = replace(
        state,
        here=state.here.join(stage, join),
        snapshots=state.snapshots.learn(join.newest).learn(join.before),
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
    discard = m.Discard(state.attempt)
    interruptions = replace(state.interruptions.discard(state.attempt), broken=True)
    state, actions = _hold(replace(state, interruptions=interruptions))
    return state, (discard, *actions)


def _gather(state: LeadState) -> Result:
    """Begin when everybody is here, or go back to where everybody can be."""
    if state.missing or state.phase != "gathering" or not state.here.agree:
        return state, ()
    if not Version.agree((state.version, *state.here.joined.values())):
        return _restore(state)
    step, config, snapshots = state.step, state.config, state.snapshots
    # What was asked for at this step and is not whole yet will not be: the others have begun anew.
    due = snapshots.newest.step != step and (snapshots.due or snapshots.asked == step)
    following = after(config, step, stopping=state.stopping, due=due)
    if snapshots.newest.step == step and not following.finish:
        following = replace(following, snapshot=False)  # we have just come back to it
    # A new owner knows only what the job began with, and others may have heard of a choice of the lead before us.
    following = replace(following, codecs=config.codecs if state.codecs is None else state.codecs)
    state = replace(
        state,
        phase="running",
        count=state.count + 1,
        codecs_changed=False,
        snapshots=replace(snapshots, saving=False),
        interruptions=state.interruptions.recover(),
    )
    state = _asked(state, following)
    return state, (m.Begin(state.attempt, step, following, state.statistics, state.history),)


def _restore(state: LeadState) -> Result:
    checkpoint = state.snapshots.newest
    state = replace(
        state,
        here=replace(state.here, joined={}),
        count=state.count + 1,
        ledger=checkpoint.ledger,
        history=checkpoint.version.history,
        interruptions=replace(state.interruptions, broken=True),
    )
    return replace(state, restoring=state.attempt), (m.Restore(state.attempt, checkpoint),)


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
    rate, clip = (
        learning_rate(config.optimizer, step, config.steps),
        clip_factor(config.optimizer, squared_norm),
    )
    ordered = [reports[s] for s in range(state.stages)]
    losses = [report.loss for report in ordered if report.loss is not None]
    made_of = contents(fed, [report.squared_norm for report in ordered], losses)
    loss = losses[0] if losses else None
    state = replace(
        state,
        ledger=ledger,
        history=extend(state.history, step, rate, clip, made_of),
        ready={},
    )
    joined = dict.fromkeys(range(state.stages), state.version)
    state = replace(state, here=replace(state.here, joined=joined)).count_on(
        state.statistics.commit(step, loss)
    )
    following = after(config, step + 1, stopping=state.stopping, due=state.snapshots.due)
    if following.snapshot and state.snapshots.saving and not following.finish:
        # One after the other: a job whose steps are quicker than its disks would never get one whole.
        following = replace(following, snapshot=False)
        state = replace(state, snapshots=replace(state.snapshots, due=True))
    if state.here.leaving and not following.finish:
        # What is due now is due when the next attempt begins.
        following = m.After(hold=tuple(sorted(state.here.leaving)))
        state = replace(state, here=state.here.part(), phase="gathering")
    elif state.codecs_changed:
        following = replace(following, codecs=state.codecs)
        state = replace(state, codecs_changed=False)
    state = _asked(state, following)
    commit = m.Commit(state.attempt, step, rate, clip, following, made_of)
    return state, (commit, e.Committed(step, reports))


def _asked(state: LeadState, following: m.After) -> LeadState:
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
    statistics = state.statistics.discard(state.attempt).fail(state.step)
    if statistics.failed[1] >= MAX_FAILURES:
        return replace(state.count_on(statistics), phase="ended"), (e.Fail(text),)
    discard = m.Discard(state.attempt)
    interruptions = replace(state.interruptions, statistics=statistics, broken=True)
    state, actions = _gather(replace(state, phase="gathering", ready={}, interruptions=interruptions))
    return state, (discard, *actions)


# --- handing over


def _hold(state: LeadState) -> Result:
    """Nothing is under way: those who want to leave may go, once our own stage is linked to them and can say so."""
    here = state.here
    if state.phase != "gathering" or not here.leaving or 0 not in here.joined:
        return state, ()
    state = replace(state, here=here.part(), count=state.count + 1)
    return state, tuple(m.Hold(state.attempt, s, here.join_ids[s]) for s in sorted(here.leaving))
