"""The side of a stage, the lead's own included, of the commit protocol (`fusion.runtime.training.step`). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.faults import HOLDS_JOB_UP, Faults, overcome
from fusion.runtime.training.step.history import UNKNOWN, Version, extend
from fusion.runtime.training.step.run_statistics import CLEAN, NO_ATTEMPT, Attempt, RunStatistics


@dataclass(frozen=True, kw_only=True)
class StageState:
    step: int  # of the parameters; -1: none
    history: str = UNKNOWN  # of the parameters
    stage: int = 0
    term: int = 1  # of our claim on the stage
    incarnation: int = 0  # drawn at random; distinguishes hosts under the same term
    joins: int = 0
    attempt: Attempt = NO_ATTEMPT  # the newest that we have received
    loading: Attempt = NO_ATTEMPT  # the restore under way, in phase "restoring"
    relinked: bool = False  # since that restore: another lead, which never asked for it, may have followed
    linked: bool = False
    links: m.Links = ()  # to our partners, while linked
    phase: Literal["idle", "running", "ready", "restoring", "handing over"] = "idle"
    leaving: bool = False
    loss: float | None = None  # of the step that is ready, where we compute it
    abandoned: bool = False  # we dropped a step of `attempt` before the lead discarded it
    statistics: RunStatistics = CLEAN
    faults: Faults = ()  # as the last lead sent them

    @property
    def join_id(self) -> m.JoinId:
        """The id of our newest join."""
        return (self.term, self.incarnation, self.joins)

    @property
    def version(self) -> Version:
        return Version(self.step, self.history)


def stage(state: StageState, event: e.StageEvent) -> tuple[StageState, tuple[e.StageAction, ...]]:
    match event:
        case e.Linked(links):
            if state.linked:
                return state, ()
            state = replace(state, linked=True, links=links, relinked=True)
            return (state, ()) if state.phase in ("restoring", "handing over") else _join(state)
        case e.Unlinked():
            return _unlink(state)
        case m.Begin():
            return _begin(state, event)
        case e.Completed(ready):
            if state.phase != "running" or (ready.attempt, ready.step) != (state.attempt, state.step):
                return state, ()
            return replace(state, phase="ready", loss=ready.loss), (ready,)
        case m.Commit():
            return _commit(state, event)
        case m.Discard(attempt, faults, give_up):
            if attempt < state.attempt:
                return state, ()
            state, actions = _idle(state)
            statistics = state.statistics.discard(attempt)
            state = replace(state, attempt=attempt, abandoned=False, statistics=statistics, faults=faults)
            if (state.stage, state.term, state.incarnation) not in give_up:
                return state, actions
            own = (fault.text for fault in reversed(faults) if fault.stage == state.stage)
            text = next(own, HOLDS_JOB_UP)
            return state, (*actions, e.GiveUp(text))
        case m.Hold(attempt, target, join_id):
            due = (target, join_id) == (state.stage, state.join_id)
            if attempt <= state.attempt or not due or state.phase != "idle":
                return state, ()
            state = replace(state, attempt=attempt)
            if not state.leaving:  # it stays after all; for the lead it is away until it joins again
                return _join(state) if state.linked else (state, ())
            return replace(state, phase="handing over"), (e.HandOver(state.step),)
        case m.Restore(attempt, checkpoint):
            if attempt <= state.attempt or state.phase == "handing over":
                return state, ()
            state, actions = _idle(state)
            state = replace(
                state, attempt=attempt, loading=attempt, relinked=False, abandoned=False, phase="restoring"
            )
            return state, (*actions, e.Load(attempt, checkpoint))
        case e.Restored(attempt, step, history):
            if state.phase != "restoring" or attempt != state.loading:
                return state, ()
            state = replace(state, step=step, history=history, phase="idle")
            return _join(state) if state.linked else (state, ())
        case e.LoadFailed(attempt, text):
            if state.phase != "restoring" or attempt != state.loading:
                return state, ()
            # A partly loaded state is no state.
            state = replace(state, step=-1, history=UNKNOWN, phase="idle")
            if not state.linked:
                return state, ()
            return _join(state) if state.relinked else (state, (m.Lack(attempt, text),))
        case e.Leave():
            state = replace(state, leaving=True)
            return state, ((m.Leaving(state.join_id),) if state.linked else ())
        case e.Stay():
            away = state.phase == "handing over"
            state = replace(state, leaving=False, phase="idle" if away else state.phase)
            return _join(state) if away and state.linked else (state, ())


def _join(state: StageState) -> tuple[StageState, tuple[e.StageAction, ...]]:
    state = replace(state, joins=state.joins + 1)
    join = m.Join(
        step=state.step, history=state.history, join_id=state.join_id, links=state.links, attempt=state.attempt,
        abandoned=state.abandoned, statistics=state.statistics, faults=state.faults,
    )  # fmt: skip
    return state, (join, m.Leaving(state.join_id)) if state.leaving else (join,)


def _unlink(state: StageState) -> tuple[StageState, tuple[e.StageAction, ...]]:
    if not state.linked:
        return state, ()
    working = state.phase in ("running", "ready")
    state, actions = _idle(replace(state, linked=False, abandoned=state.abandoned or working))
    return state, (*actions, m.Suspect(state.join_id))


def _begin(state: StageState, event: m.Begin) -> tuple[StageState, tuple[e.StageAction, ...]]:
    attempt, step = event.attempt, event.step
    if attempt <= state.attempt or state.phase == "handing over":
        return state, ()
    state, actions = _idle(state)
    # Noted whether we can follow or not: a late duplicate must not begin a step that is over by then.
    state = replace(
        state,
        attempt=attempt,
        abandoned=False,
        statistics=state.statistics.merge(event.statistics),
        faults=event.faults,
    )
    if not state.linked or state.phase == "restoring":
        return state, ()
    if not state.version.matches(Version(step, event.history)):
        # The lead took us for the previous owner: join again with our own state.
        state, more = _join(state)
        return state, (*actions, *more)
    return replace(state, phase="running"), (*actions, e.Run(attempt, step, event.after))


def _commit(state: StageState, event: m.Commit) -> tuple[StageState, tuple[e.StageAction, ...]]:
    attempt, step, following = event.attempt, event.step, event.after
    if state.phase != "ready" or (attempt, step) != (state.attempt, state.step):
        return state, ()
    history = extend(state.history, step, event.learning_rate, event.clip_factor, event.made_of)
    loss = None if state.loss is None or not math.isfinite(state.loss) else state.loss
    statistics = state.statistics.commit(step, loss)
    faults = overcome(state.faults, step)
    state = replace(state, step=step + 1, history=history, statistics=statistics, faults=faults)
    apply = e.Apply(event.learning_rate, event.clip_factor)
    if state.stage in following.hold:
        return replace(state, phase="handing over"), (apply, e.HandOver(step + 1))
    if following.hold:
        return replace(state, phase="idle"), (apply,)
    return replace(state, phase="running"), (apply, e.Run(attempt, step + 1, following))


def _idle(state: StageState) -> tuple[StageState, tuple[e.StageAction, ...]]:
    if state.phase in ("idle", "restoring", "handing over"):
        return state, ()
    return replace(state, phase="idle"), (e.Drop(),)
