"""What the lead does about a stage that fails (`fusion.runtime.training.step.faults` decides). Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.faults import (
    GRADIENTS_RECEIVED,
    PATIENCE,
    RECEIVED,
    REMEMBERED,
    Verdict,
    add,
    at,
    culprit,
    failure_line,
    judge,
)
from fusion.runtime.training.step.gathering import gather, lose, restore
from fusion.runtime.training.step.lead_state import LeadState, Result

NEVER_JOINED = -1  # in place of an incarnation: none is negative
PATIENCE_WITH_NUMBERS = (
    2  # as PATIENCE, where one peer runs the whole job: it computes the same numbers again
)


def refuse(state: LeadState, stage: int) -> Result:
    """All stages are ready, but `stage` read other samples than the plan's."""
    state, verdict = fault(state, stage, "fed other samples than the plan has", least=PATIENCE)
    return _follow(state, stage, verdict, gather)


def not_finite(state: LeadState, reports: Sequence[m.Ready]) -> Result:
    """Run the step again with every tensor checked, to find the stage at fault; if it was, that stage has failed."""
    step = state.step
    if not state.checks(step):
        return _run_again(replace(state, checked_step=step), gather)
    contradicted = {
        fault.stage
        for fault in state.faults
        if fault.step == step
        and fault.text.startswith((RECEIVED, GRADIENTS_RECEIVED))
        and fault.peer != state.owner(fault.stage)
    }
    stage, what = culprit(reports, contradicted)
    text = f"{what} not finite, a lower optimizer.learning_rate may help"
    # In the first seconds of a job there is no standby: the owner gives the stage up all the same, for another to claim.
    elsewhere = {state.owner(other) for other in range(state.stages)} - {state.owner(stage)}
    patience = PATIENCE if elsewhere else PATIENCE_WITH_NUMBERS
    state, verdict = fault(state, stage, text, patience=patience)
    if verdict == "again" and elsewhere:
        return dismiss(state, stage)
    return _follow(state, stage, verdict, restore)


def fault(
    state: LeadState, stage: int, text: str, *, patience: int = PATIENCE, least: int = 1
) -> tuple[LeadState, Verdict]:
    """The owner of the stage has failed. The fault counts from its `least`-th time on."""
    peer = state.owner(stage)
    state = replace(state, faults=add(state.faults, stage, state.step, peer, text))
    here = tuple(fault for fault in at(state.faults, stage, state.step) if fault.times >= least)
    if not any(fault.peer == peer for fault in here):
        return state, "again"
    # In a job of one stage no other owner would remember the fault.
    others = state.spare(stage) if state.stages > 1 else frozenset()
    return state, judge(here, peer, others, patience)


def _follow(state: LeadState, stage: int, verdict: Verdict, again: Callable[[LeadState], Result]) -> Result:
    match verdict:
        case "fail":
            return fail(state, stage)
        case "move":
            return dismiss(state, stage)
        case "again":
            return _run_again(state, again)


def fail(state: LeadState, stage: int) -> Result:
    text = failure_line(at(state.faults, stage, state.step), state.step)
    return replace(state, phase="ended"), (e.Fail(text),)


def dismiss(state: LeadState, stage: int) -> Result:
    """Tell the owner to give its stage up to another peer."""
    term, incarnation, _ = state.here.join_ids[stage]
    return _give_up(state, stage, term, incarnation)


def stand_still(state: LeadState, event: e.StandsStill) -> Result:
    """As `dismiss`, for the owner of a stalled stage, which may never have joined. It never fails the job."""
    stage, term = event.stage, event.term
    joined = state.here.join_ids.get(stage)
    incarnation = joined[1] if joined is not None and joined[0] == term else NEVER_JOINED
    seen = (*state.stood_still, (state.step, stage, event.peer))[-REMEMBERED:]
    return _give_up(replace(state, stood_still=seen), stage, term, incarnation)


def _give_up(state: LeadState, stage: int, term: int, incarnation: int) -> Result:
    dismissed = {**state.dismissed, stage: (term, incarnation)}
    state, actions = lose(replace(state, dismissed=dismissed), stage)
    if not any(isinstance(action, m.Discard) for action in actions):  # no step is under way
        actions = (m.Discard(state.attempt, state.faults), *actions)
    give_up = ((stage, term, incarnation),)
    actions = tuple(
        replace(action, give_up=give_up) if isinstance(action, m.Discard) else action for action in actions
    )
    return state, actions


def _run_again(state: LeadState, gather: Callable[[LeadState], Result]) -> Result:
    """All stages are ready, but the step cannot be committed."""
    discard = m.Discard(state.attempt, state.faults)
    interruptions = replace(state.interruptions.discard(state.attempt), broken=True)
    state, actions = gather(replace(state, phase="gathering", ready={}, interruptions=interruptions))
    return state, (discard, *actions)
