"""A step that stands still: how long it may, and which stage has to go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.training import config

from fusion.runtime.training.step import events as e
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.dismissal import NEVER_JOINED
from fusion.runtime.training.step.faults import HOLDS_JOB_UP
from fusion.runtime.training.step.lead import LeadState, lead
from fusion.runtime.training.step.stage import StageState, stage
from fusion.runtime.training.step.stalls import (
    LEAD,
    LOST_STALLS,
    PACED,
    UNKNOWN_PACE,
    USUAL_STEPS,
    StallClock,
    culprits,
)
from fusion.swarm.transport import PeerId

A, B, C, D = (PeerId(name) for name in ("A", "B", "C", "D"))
CONFIG = config(steps=5, microbatches=1, microbatch_size=1, snapshot_every=100)


# --- how long


def test_a_step_may_stand_still_for_as_long_as_several_usual_steps_take() -> None:
    clock = StallClock(least_seconds=60.0, since=0.0)
    assert clock.patience(running=True) == UNKNOWN_PACE * 60.0, "the first step may have to be compiled"
    for at in (100.0, 105.0, 110.0, 900.0, 905.0):
        clock = clock.commit(at)
    assert clock.patience(running=True) == 60.0, "one step of them was interrupted"
    slow = StallClock(least_seconds=60.0, since=0.0)
    for at in range(0, 500, 50):
        slow = slow.commit(float(at))
    assert slow.patience(running=True) == USUAL_STEPS * 50.0


def test_what_came_before_a_begin_is_no_step() -> None:
    clock = StallClock(least_seconds=1.0, since=0.0).commit(0.0).begin().commit(100.0).commit(100.5)
    assert clock.steps == (0.5,)


def test_large_tensors_and_states_take_their_time_over_slow_links() -> None:
    clock = StallClock(least_seconds=1.0, since=0.0, tensor_bytes=10**8, state_bytes=10**10, steps=(1.0,))
    assert clock.patience(running=True) == 800.0
    assert clock.patience(running=False) == 10_000.0


def test_who_gets_something_or_has_something_to_do_does_not_stand_still() -> None:
    clock = StallClock(least_seconds=10.0, since=0.0, steps=(1.0,)).see(0.0, "a", busy=False)
    assert not clock.see(9.0, "a", busy=False).stands_still(9.9, running=True)
    assert clock.see(9.0, "a", busy=False).stands_still(10.0, running=True)
    assert not clock.see(10.0, "a", busy=False).stands_still(19.0, running=True, times=2.0)
    assert not clock.see(9.0, "b", busy=False).stands_still(18.0, running=True)
    assert not clock.see(9.0, "a", busy=True).stands_still(18.0, running=True)


def paced(*durations: float) -> StallClock:
    """After steps that took so long, in an attempt of its own."""
    clock = StallClock(least_seconds=10.0, since=0.0).begin().commit(0.0)
    for number in range(len(durations)):
        clock = clock.commit(sum(durations[: number + 1]))
    return clock


def test_steps_that_drag_on_stall_though_they_make_progress() -> None:
    usual = [1.0] * PACED
    clock, began = paced(*usual), float(PACED)
    limit = began + LOST_STALLS * 10.0 + USUAL_STEPS
    assert not clock.see(limit - 0.1, "a", busy=True).stands_still(limit - 0.1, running=True)
    seen = clock.see(limit, "a", busy=True)
    assert seen.stands_still(limit, running=True) and not seen.stands_still(limit, running=False)
    assert not seen.stands_still(limit, running=True, times=2.0)
    # Several slow steps count together, and steps that take as long as usual make up for it little by little.
    assert paced(*usual, 24.0, 23.0).drags_on(began + 47.0 + 5.1)
    assert not paced(*usual, 24.0, *[1.0] * 7, 23.0).drags_on(began + 54.0 + 5.1)


def test_no_step_drags_on_whose_usual_duration_is_not_known() -> None:
    assert not paced(*[1.0] * (PACED - 1)).drags_on(999.0)
    assert not paced(*[1.0] * PACED).begin().drags_on(999.0), "others may own the stages"
    assert not paced(*[1.0] * PACED).commit(40.0, evaluates=True).drags_on(999.0)
    # A job may be slower in one step of several: it saves a snapshot, say.
    assert not paced(*([*[1.0] * 9, 30.0] * 20)).drags_on(20 * 39.0)


# --- which stage


@pytest.mark.parametrize(
    ("waits", "needed", "found"),
    [
        ({0: 1, 1: 2, 3: 2}, (0, 1, 2, 3), (2,)),  # it computes nothing, and says nothing
        ({0: 1, 1: 2, 3: LEAD}, (0, 1, 2), (2,)),  # the last one had nothing more to wait for
        ({1: LEAD, 2: LEAD}, (3,), (3,)),  # it never joins
        ({0: 2, 1: 2, 3: 2}, (1, 2, 3), (2,)),  # nobody is linked to it
        ({0: 1, 1: 2}, (0, 1, 2, 3), ()),  # the third may be at work
        ({}, (0, 1, 2, 3), ()),
        ({0: 1, 1: 2, 2: LEAD, 3: 2}, (0, 1, 2, 3), (2,)),  # not one from whom the lead still needs something
        ({0: 1, 1: 2, 2: 2, 3: 2}, (0, 1, 2, 3), (2,)),  # nobody waits for itself
        ({0: 1, 1: 2, 2: 1, 3: 2}, (0, 1, 2, 3), (2, 1)),  # one of them lies
        ({0: 1, 1: 2, 2: LEAD, 3: 2}, (0, 1, 3), (2, 1)),  # it is ready, and has sent nothing
        ({0: 1, 1: 2, 2: 3, 3: 1}, (0, 1, 2, 3), (3, 2, 1)),
        ({0: 1, 1: 2, 2: 3, 3: 77}, (0, 1, 2, 3), (3, 2)),  # for a stage that there is not
        ({1: LEAD, 2: LEAD, 3: LEAD}, (), ()),
    ],
)
def test_the_stage_that_others_wait_for_and_that_waits_for_nobody(
    waits: dict[int, int], needed: tuple[int, ...], found: tuple[int, ...]
) -> None:
    assert culprits(4, waits, needed) == found


def test_after_longer_one_of_several_that_say_nothing_has_to_go() -> None:
    assert culprits(4, {0: 1, 3: 2}, (0, 1, 2, 3)) == ()
    assert culprits(4, {0: 1, 3: 2}, (0, 1, 2, 3), unanimous=False) == (1, 2)


def test_of_two_that_contradict_each_other_the_other_goes_next() -> None:
    waits = {0: 1, 1: 2, 2: 1, 3: 2}
    assert culprits(4, waits, range(4)) == (2, 1)
    assert culprits(4, waits, range(4), moved={2}) == (1, 2)


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_in_a_chain_whoever_does_nothing_goes_or_one_beside_it_whatever_it_says(data: st.DataObject) -> None:
    """All are honest but one, which does nothing and says anything."""
    stages = data.draw(st.integers(2, 6))
    idle = data.draw(st.integers(1, stages - 1))
    # Who is before it has done its forward and waits for gradients from there; who is behind it has got nothing.
    waits = {stage: stage + 1 if stage < idle else stage - 1 for stage in range(stages) if stage != idle}
    said = data.draw(st.none() | st.integers(-2, stages))
    if said is not None:
        waits[idle] = said
    needed = set(range(stages)) - ({idle} if said == LEAD and data.draw(st.booleans()) else set())
    gone: set[int] = set()
    for _ in range(stages):
        found = culprits(stages, waits, needed, gone)
        assert found, "the step stands still for ever"
        gone.add(found[0])
        if found[0] == idle:
            break
    assert idle in gone


# --- what the lead does


def gathered(*owners: PeerId) -> LeadState:
    state = LeadState(config=CONFIG, stages=len(owners), term=1, peers=dict(enumerate(owners)))
    for i in range(len(owners)):
        state, _ = lead(state, m.Join(step=0, join_id=(1, i, 1)), i)
    return state


def dismissed(actions: tuple[e.LeadAction, ...]) -> list[tuple[int, int, int]]:
    return [each for a in actions if isinstance(a, m.Discard) for each in a.give_up]


def test_whoever_the_step_stands_still_with_is_told_to_leave_and_joins_no_more() -> None:
    state, actions = lead(gathered(A, B, C), e.StandsStill(1, B, 1))
    assert dismissed(actions) == [(1, 1, 1)]
    assert state.missing == (1,) and state.faults == ()
    again, actions = lead(state, m.Join(step=0, join_id=(1, 1, 2)), 1)
    assert again == state and actions == ()
    state, actions = lead(state, m.Join(step=0, join_id=(2, 9, 1)), 1)
    assert any(isinstance(action, m.Begin) for action in actions)


def test_one_that_never_joined_is_told_so_while_no_step_is_under_way_and_may_still_join() -> None:
    state = LeadState(config=CONFIG, stages=2, term=1, peers={0: A})
    state, _ = lead(state, m.Join(step=0, join_id=(1, 0, 1)), 0)
    state, actions = lead(state, e.StandsStill(1, B, 3))
    assert dismissed(actions) == [(1, 3, NEVER_JOINED)]
    _, actions = lead(state, m.Join(step=0, join_id=(3, 5, 1)), 1)
    assert any(isinstance(action, m.Begin) for action in actions), "it was only slow"


def test_owners_that_stand_still_one_after_the_other_never_fail_the_job() -> None:
    state = gathered(A, B)
    for term in range(2, 12):
        state, actions = lead(state, e.StandsStill(1, PeerId(f"idle-{term}"), term - 1))
        assert not any(isinstance(action, e.Fail) for action in actions)
        state, _ = lead(state, m.Join(step=0, join_id=(term, 0, 1)), 1)
    state, actions = lead(state, m.Failed(state.attempt, "no memory"), 1)
    assert not any(isinstance(action, e.Fail) for action in actions), "that is the first fault"


def test_whoever_was_moved_at_this_step_is_believed_next_time() -> None:
    state = gathered(A, B, C)
    waits = {0: 1, 1: 2, 2: 1}
    assert state.culprits(waits, unanimous=True) == (2, 1)
    state, _ = lead(state, e.StandsStill(2, C, 1))
    state, _ = lead(replace(state, peers={**state.peers, 2: D}), m.Join(step=0, join_id=(2, 0, 1)), 2)
    assert state.culprits(waits, unanimous=True) == (1, 2)


def test_an_owner_that_is_told_so_gives_its_stage_up() -> None:
    state = StageState(step=3, stage=1, term=2, incarnation=7, linked=True, attempt=(1, 1), phase="running")
    _, actions = stage(state, m.Discard((1, 1), (), ((1, 2, 7),)))
    assert actions[-1] == e.GiveUp(HOLDS_JOB_UP)
    _, actions = stage(state, m.Discard((1, 1), (), ((1, 2, NEVER_JOINED),)))
    assert not any(isinstance(action, e.GiveUp) for action in actions)


def test_that_a_stage_waits_is_no_loss_of_it() -> None:
    """Not to a lead of the release before either, which knows no `waits_for`."""
    state = gathered(A, B)
    for waits in (m.Suspect(m.NO_JOIN, waits_for=0), m.Suspect(m.NO_JOIN)):
        assert lead(state, waits, 1) == (state, ())
    assert "waits_for" not in m.encode(m.Suspect((1, 0, 1), "gone"), 1)[1]
