"""Token buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.dht.request_budget import BudgetConfig, RequestBudget, refilled

CONFIG = BudgetConfig(per_second=10.0, burst=100.0, accounts=3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 150)), max_size=60))
def test_nobody_spends_more_than_a_burst_and_what_came_since(steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    budget = RequestBudget(CONFIG, clock)
    spent = 0.0
    for passed, tokens in steps:
        clock.now += passed
        if budget.spend("a", tokens):
            spent += tokens
        assert spent <= CONFIG.burst + clock.now * CONFIG.per_second + 1e-6


def test_one_does_not_pay_for_another() -> None:
    clock = Clock()
    budget = RequestBudget(CONFIG, clock)
    assert budget.spend("a", 100.0) and not budget.spend("a", 1.0)
    assert budget.spend("b", 100.0)
    clock.now = 0.5
    assert budget.spend("a", 5.0) and not budget.spend("a", 1.0)
    assert not budget.spend("c", 101.0)  # never


@given(st.floats(0, 100), st.floats(-10, 1e6))
def test_a_bucket_holds_a_burst(left: float, seconds: float) -> None:
    assert left <= refilled(left, seconds, CONFIG) <= CONFIG.burst


def test_what_is_remembered_is_bounded() -> None:
    budget = RequestBudget(CONFIG, Clock())
    for n in range(100):
        budget.spend(str(n), 1.0)
    assert len(budget._left) == 3


def test_a_bad_setting_is_named() -> None:
    with pytest.raises(ValueError, match="burst"):
        BudgetConfig(burst=0)
