"""The lead's side of the commit protocol (`fusion.runtime.training.step.protocol`), pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from fusion.runtime.job.manifest import EdgeCodecs, TrainConfig
from fusion.runtime.planes.optimizer import clip_factor, learning_rate
from fusion.runtime.training.data.batches import sample_indices
from fusion.runtime.training.data.ledger import UNTRAINED, Ledger, fed_digest
from fusion.runtime.training.step import events as e
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.run_statistics import CLEAN, NO_ATTEMPT, Attempt, RunStatistics

K = TypeVar("K")
V = TypeVar("V")

MAX_FAILURES = 3  # of one step, at any stage, before the job fails
LACKS = 3  # times that a stage finds nobody with its shard of a snapshot, before the one before it is taken


@dataclass(frozen=True, kw_only=True)
class LeadState:
    config: TrainConfig
    stages: int
    term: int
    samples: int | None = None  # in the training data; None: the lead's stage reads none
    count: int = 0  # attempts made by this lead
    phase: Literal["gathering", "running", "ended"] = "gathering"
    ledger: Ledger = UNTRAINED  # of the state that our own stage has: the next step is ledger.steps
    newest: Checkpoint = START  # never an older one than any that was announced, unless nobody holds it
    before: Checkpoint = START  # the one before it
    gone: frozenset[Checkpoint] = frozenset()  # nobody holds them
    joined: Mapping[int, int] = field(default_factory=dict)  # stage -> the step its state is of
    entries: Mapping[int, e.Entry] = field(default_factory=dict)  # stage -> its newest join
    ready: Mapping[int, e.StageReport] = field(default_factory=dict)
    links: Mapping[int, e.Links] = field(default_factory=dict)  # stage -> whom it was linked to then
    leaving: frozenset[int] = frozenset()  # want to be handed over
    held: frozenset[int] = frozenset()  # handed over: their next owner is no loss
    wires: EdgeCodecs | None = None  # chosen since the job began; None: those that it began with
    rewired: bool = False  # nobody has been told yet
    stopping: bool = False
    due: bool = False  # a snapshot
    asked: int = -1  # the step of which a snapshot was asked for last
    saving: bool = False  # it is under way: no other one is asked for
    restoring: Attempt = NO_ATTEMPT  # the restore that was asked for last: others may hand over meanwhile
    lacks: int = 0
    broken: bool = False  # work was interrupted and has not gone on yet
    heir: bool = False  # whether the loss of the lead before us needs no counting (any more)
    tally: RunStatistics = CLEAN

    @property
    def step(self) -> int:
        """Committed steps."""
        return self.ledger.steps

    @property
    def attempt(self) -> Attempt:
        return (self.term, self.count)

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that the job waits for."""
        return tuple(s for s in range(self.stages) if s not in self.joined)


Result = tuple[LeadState, tuple[e.LeadAction, ...]]


def lead(state: LeadState, event: e.LeadEvent) -> Result:
    if state.phase == "ended":
        return state, ()
    match event:
        case e.Joined():
            return _join(state, event)
        case e.Lost(stage, entry):
            if entry != state.entries.get(stage):  # it has joined again since
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
            state = replace(state, tally=state.tally.fail(state.step))
            if state.tally.failed[1] >= MAX_FAILURES:
                return replace(state, phase="ended"), (e.Fail(f"stage {stage}: {text}"),)
            return _lose(state, stage)
        case e.Leaving(stage, entry):
            # It asks again whenever it joins.
            if stage in state.held or entry != state.entries.get(stage):
                return state, ()
            return _hold(replace(state, leaving=state.leaving | {stage}))
        case e.Lacking(stage, attempt):
            return _lack(state, stage, attempt)
        case e.Saved(point):
            return replace(_learn(state, point), saving=state.saving and point.step != state.asked), ()
        case e.SnapshotLost():
            return replace(state, saving=False), ()
        case e.SnapshotDue():
            return replace(state, due=True), ()
        case e.ChangeCodecs(wires):
            return replace(state, wires=wires, rewired=True), ()
        case e.Stop():
            return replace(state, stopping=True), ()


# --- who is here


def _join(state: LeadState, event: e.Joined) -> Result:
    stage, known = event.stage, state.entries.get(event.stage)
    if known is not None and not e.supersedes(event.entry, known):
        return state, ()
    # A stage that joins again has been away: what it had of the running step is lost.
    state, actions = _lose(replace(state, leaving=state.leaving - {stage}), stage)
    tally, broken, heir = state.tally.merge(event.tally), state.broken, state.heir
    fresh = known is not None and event.entry[:2] != known[:2]
    if fresh and stage not in state.held:
        tally, broken = tally.lose(), True
    if 0 < event.attempt[0] < state.term and not heir:
        tally, broken, heir = tally.lose(), True, True
    if event.abandoned:  # nobody told it so: the lead of that attempt is no more
        tally = tally.discard(event.attempt)
    state = replace(
        _learn(_learn(state, event.newest), event.before),
        tally=tally,
        broken=broken,
        heir=heir,
        joined={**state.joined, stage: event.step},
        entries={**state.entries, stage: event.entry},
        links={**state.links, stage: event.links},
        held=state.held - {stage},
    )
    state, more = _gather(state)
    state, held = _hold(state)
    return state, (*actions, *more, *held)


def _lose(state: LeadState, stage: int) -> Result:
    running = state.phase == "running"
    state = replace(
        state,
        phase="gathering",
        joined=_without(state.joined, stage),
        ready={},
    )
    if not running:
        return state, ()
    state = replace(state, broken=True, tally=state.tally.discard(state.attempt))
    discard = e.Discard(state.attempt)
    state, actions = _hold(state)
    return state, (discard, *actions)


def _gather(state: LeadState) -> Result:
    """Begin when everybody is here, or go back to where everybody can be."""
    if state.missing or state.phase != "gathering" or not _agree(state):
        return state, ()
    if set(state.joined.values()) != {state.ledger.steps}:
        return _restore(state)
    step, config = state.step, state.config
    if state.broken:
        state = replace(state, broken=False, tally=state.tally.recover())
    # What was asked for at this step and is not whole yet will not be: the others have begun anew.
    due = state.newest.step != step and (state.due or state.asked == step)
    following = e.after(config, step, stopping=state.stopping, due=due)
    if state.newest.step == step and not following.finish:
        following = replace(following, snapshot=False)  # we have just come back to it
    # A new owner knows only what the job began with, and others may have heard of a choice of the lead before us.
    following = replace(following, wires=config.wires if state.wires is None else state.wires)
    state = replace(state, phase="running", count=state.count + 1, heir=True, saving=False, rewired=False)
    state = _asked(state, following)
    return state, (e.Begin(state.attempt, step, following, state.tally),)


def _agree(state: LeadState) -> bool:
    """Whether every stage is linked to the owners that have joined: one that still has a link to the owner before will
    lose it, and with it whatever had begun."""
    return all(state.entries[partner][0] == term for links in state.links.values() for partner, term in links)


def _restore(state: LeadState) -> Result:
    state = replace(state, joined={}, count=state.count + 1, ledger=state.newest.ledger, broken=True)
    state = replace(state, restoring=state.attempt)
    return state, (e.Restore(state.attempt, state.newest),)


def _lack(state: LeadState, stage: int, attempt: Attempt) -> Result:
    # One that has joined since has another owner now.
    if state.phase != "gathering" or attempt != state.restoring or stage in state.joined:
        return state, ()
    state = replace(state, lacks=state.lacks + 1)
    if state.lacks < LACKS or state.newest.digest is None:
        return _restore(state)
    lost = state.newest
    state = replace(state, newest=state.before, before=START, gone=state.gone | {lost}, lacks=0)
    state, actions = _restore(state)
    return state, (e.FellBack(lost), *actions)


def _learn(state: LeadState, point: Checkpoint) -> LeadState:
    """The newest snapshot never gets older."""
    if not point.sound or point in state.gone:
        return state
    if point.rank <= state.newest.rank:
        between = state.before.rank < point.rank < state.newest.rank
        return replace(state, before=point) if between else state
    return replace(state, newest=point, before=state.newest, lacks=0)


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
        tally=state.tally.commit(step, loss),
        joined=dict.fromkeys(range(state.stages), step + 1),
        ready={},
    )
    following = e.after(config, step + 1, stopping=state.stopping, due=state.due)
    if following.snapshot and state.saving and not following.finish:
        # One after the other: a job whose steps are quicker than its disks would never get one whole.
        following = replace(following, snapshot=False)
        state = replace(state, due=True)
    if state.leaving and not following.finish:
        # What is due now is due when the next attempt begins.
        following = e.After(hold=tuple(sorted(state.leaving)))
        state = replace(_part(state), phase="gathering")
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
    return replace(state, asked=state.step, saving=True, due=False) if following.snapshot else state


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
        return replace(state, phase="ended", tally=tally), (e.Fail(text),)
    discard = e.Discard(state.attempt)
    state, actions = _gather(replace(state, phase="gathering", ready={}, tally=tally, broken=True))
    return state, (discard, *actions)


# --- handing over


def _hold(state: LeadState) -> Result:
    """Nothing is under way: those who want to leave may go, once our own stage is linked to them and can say so."""
    if state.phase != "gathering" or not state.leaving or 0 not in state.joined:
        return state, ()
    going = tuple(sorted(state.leaving))
    state = replace(_part(state), count=state.count + 1)
    return state, tuple(e.Hold(state.attempt, stage, state.entries[stage]) for stage in going)


def _part(state: LeadState) -> LeadState:
    """The stages that leave have not joined any more. Those beside them have; but their links lead to the owner that
    leaves, so that nothing begins until they have joined again (`_agree`), each at a time of its own."""
    joined = {s: step for s, step in state.joined.items() if s not in state.leaving}
    return replace(state, joined=joined, held=state.held | state.leaving, leaving=frozenset())


def _without(mapping: Mapping[K, V], key: K) -> dict[K, V]:
    return {k: v for k, v in mapping.items() if k != key}
