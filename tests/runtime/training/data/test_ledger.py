from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.training.data.ledger import GENESIS, UNTRAINED, Ledger, fed_digest

samples = st.lists(st.integers(0, 2**40), max_size=4)
steps = st.lists(samples, max_size=6)


def chained(run: list[list[int]]) -> Ledger:
    ledger = UNTRAINED
    for step, fed in enumerate(run):
        ledger = ledger.commit(step, fed_digest([fed]), len(fed))
    return ledger


@given(steps, steps)
def test_two_runs_have_one_ledger_only_if_they_fed_the_same(
    one: list[list[int]], other: list[list[int]]
) -> None:
    assert (chained(one) == chained(other)) == (one == other)
    assert chained(one).samples == sum(map(len, one))


@given(steps)
def test_a_step_is_committed_once_and_in_its_turn(run: list[list[int]]) -> None:
    ledger = chained(run)
    for step in (len(run) - 1, len(run) + 1):
        with pytest.raises(ValueError, match=f"after {len(run)} steps"):
            ledger.commit(step, "", 1)


def test_samples_count_by_microbatch() -> None:
    assert fed_digest([[1, 2], [3]]) != fed_digest([[1], [2, 3]])
    assert UNTRAINED.head == GENESIS and UNTRAINED.commit(0, "", 0).head != GENESIS
