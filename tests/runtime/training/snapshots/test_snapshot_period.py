from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.training.snapshots.snapshot_period import (
    FIRST_COST_SECONDS,
    GIVE_UP,
    GIVE_UP_SECONDS,
    LONGEST_SECONDS,
    OVERHEAD,
    PRIOR_SECONDS,
    USUAL_SECONDS,
    SnapshotPeriod,
    first_cost_seconds,
    period_seconds,
    share,
)

NEW = SnapshotPeriod(began=100.0, taken=100.0)
seconds = st.floats(1e-3, 1e4)


def test_the_rule_of_young_minimises_what_is_lost() -> None:
    cost, between = 0.2, 90.0

    def waste(period: float) -> float:
        return cost / period + period / (2 * between)

    best = period_seconds(cost, between)
    assert best == pytest.approx(6.0) and all(waste(best) <= waste(best * k) for k in (0.5, 0.9, 1.1, 2.0))


@given(seconds, seconds)
def test_snapshots_never_cost_more_than_their_share(cost: float, between: float) -> None:
    assert cost / period_seconds(cost, between) <= OVERHEAD * 1.0001
    assert period_seconds(cost, between) >= math.sqrt(2 * cost * between)


def test_before_anything_was_seen_one_loss_a_minute_is_expected() -> None:
    first = math.sqrt(2 * FIRST_COST_SECONDS * PRIOR_SECONDS)
    assert NEW.period(100.0) == pytest.approx(first)
    assert not NEW.due(100.0 + 0.9 * first) and NEW.due(100.0 + 1.2 * first)


@given(st.integers(0, 50), st.integers(0, 50))
def test_more_losses_never_make_snapshots_rarer(one: int, more: int) -> None:
    assert NEW.seen(500.0, 400.0, one + more).period(500.0) <= NEW.seen(500.0, 400.0, one).period(500.0)


def test_quiet_hours_make_snapshots_rarer() -> None:
    assert NEW.period(3700.0) > 4 * NEW.period(100.0)


@pytest.mark.parametrize("seconds", [1e18, math.inf])
def test_no_word_of_a_stage_makes_snapshots_much_rarer(seconds: float) -> None:
    quiet = NEW.seen(100.0, seconds, 0)
    assert quiet.period(100.0) == period_seconds(FIRST_COST_SECONDS, LONGEST_SECONDS)
    slow = NEW.request(200.0).durable(203.0, seconds)
    assert slow.cost_seconds == pytest.approx((FIRST_COST_SECONDS + 3.0) / 2)


def test_none_is_begun_while_one_is_under_way_until_it_is_given_up() -> None:
    under_way = NEW.request(200.0)
    assert not under_way.due(1e6) and not NEW.overdue(1e6)
    assert not under_way.overdue(200.0 + 0.9 * GIVE_UP * USUAL_SECONDS)
    assert under_way.overdue(200.0 + 1.1 * GIVE_UP * USUAL_SECONDS)
    assert under_way.give_up().due(200.0)
    assert not under_way.restored(200.0).due(201.0)


def test_one_that_was_given_up_leaves_the_next_twice_the_time_up_to_a_day() -> None:
    period = NEW
    for doubled in range(40):  # a stage that never answers
        limit = min(GIVE_UP * USUAL_SECONDS * 2**doubled, GIVE_UP_SECONDS)
        under_way = period.request(200.0)
        assert not under_way.overdue(200.0 + 0.9 * limit) and under_way.overdue(200.0 + 1.1 * limit)
        period = under_way.give_up_overdue()
        assert period.due(1e6)
    quick = period.request(200.0).durable(201.0, 0.1).request(300.0)
    assert quick.overdue(300.0 + GIVE_UP * USUAL_SECONDS)


@given(st.floats(0.1, 0.9 * GIVE_UP_SECONDS), st.floats(0.1, 100.0))
def test_however_long_a_copy_takes_one_becomes_durable_and_those_that_take_as_long_do(
    took: float, usual: float
) -> None:
    period = replace(NEW, usual_seconds=usual).request(0.0)
    while period.overdue(took):
        period = period.give_up_overdue().request(0.0)
    assert not period.durable(took, 0.1).request(0.0).overdue(took)


def test_the_period_counts_from_when_the_state_was_taken() -> None:
    done = NEW.request(200.0).durable(203.0, 0.1)
    assert done.taken == 200.0 and done.requested is None
    assert done.usual_seconds == pytest.approx((USUAL_SECONDS + 3.0) / 2)
    assert done.durable(204.0, 9.0) == done  # told twice


def test_the_cost_is_what_stages_computed_or_what_steps_were_late_by() -> None:
    period = NEW
    for _ in range(50):
        period = period.stepped(0.5)
    late = period.request(200.0).stepped(0.9).stepped(0.7)
    assert late.durable(203.0, 0.1).cost_seconds == pytest.approx((FIRST_COST_SECONDS + 0.6) / 2)
    # A recovery in the middle is no cost of the snapshot.
    stalled = period.request(200.0).stepped(60.0)
    assert stalled.durable(200.4, 0.1).cost_seconds == pytest.approx((FIRST_COST_SECONDS + 0.4) / 2)
    quick = period.request(200.0).stepped(0.4).stepped(0.4)
    assert quick.durable(201.0, 0.3).cost_seconds == pytest.approx((FIRST_COST_SECONDS + 0.3) / 2)
    assert quick.step_seconds == pytest.approx(0.5)


def test_the_step_that_it_became_durable_in_is_late_as_well() -> None:
    """It was not counted: a snapshot that took 3 s of a step of 2.5 cost nothing where it was held before that step's commit."""
    period = NEW
    for _ in range(50):
        period = period.stepped(2.5)
    held = period.request(200.0).durable(203.0, 0.3)
    assert held.cost_seconds == pytest.approx((FIRST_COST_SECONDS + 0.3) / 2), "until that step has ended"
    late = held.stepped(5.0)
    assert late.cost_seconds == pytest.approx((FIRST_COST_SECONDS + 2.5) / 2)
    assert late.step_seconds == pytest.approx(2.5) and late.stepped(9.0).cost_seconds == late.cost_seconds
    assert held.stepped(60.0).cost_seconds == pytest.approx((FIRST_COST_SECONDS + 3.0) / 2), (
        "a stall is none of it"
    )
    assert held.restored(204.0).stepped(60.0).cost_seconds == held.cost_seconds
    assert held.request(204.0).stepped(60.0).cost_seconds == held.cost_seconds


def test_a_large_state_is_believed_to_be_dear_before_it_was_saved_once() -> None:
    assert first_cost_seconds(0) == first_cost_seconds(1 << 20) == FIRST_COST_SECONDS
    large = 300_000_000
    late = SnapshotPeriod(began=0.0, taken=0.0, cost_seconds=first_cost_seconds(large))
    assert not late.due(30.0) and late.due(45.0)
    assert share(0) < share(large) == pytest.approx(OVERHEAD)
