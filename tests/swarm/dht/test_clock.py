"""Whose clock counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.dht.clock import correction, median
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS

seconds = st.floats(-1e9, 1e9)
honest = st.floats(-1.0, 1.0)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([], 0.0),
        ([0.4], 0.0),
        ([8.0], 0.0),  # one alone moves nothing, and not half of it
        ([8.0, 8.1], 8.0),  # nobody says that ours is right
        ([-70.0, -70.5, -71.0], -70.0),
        ([3600.0, 3600.0, 0.0], 0.0),
        ([3600.0, 3600.0, 3600.0, 0.0], CLOCK_TOLERANCE_SECONDS),
        ([3600.0, 3600.5, 3601.0, -9e9], 3600.0),  # one of them lies, and ours is wrong
        ([3600.0, 3600.5, 3601.0, 9e9, 9e9], CLOCK_TOLERANCE_SECONDS),
        ([3600.0, 3600.0, 3600.0, 3600.0, 8.0], CLOCK_TOLERANCE_SECONDS),  # one is nearly as ours
        ([3.0, 3.5, 0.0, 0.1], 0.0),
        ([0.1, 0.2, 9e9], 0.0),
    ],
)
def test_clocks_are_read_by_their_middle(offsets: list[float], expected: float) -> None:
    assert correction(offsets) == pytest.approx(expected, abs=1.0)


@given(st.lists(seconds, max_size=16), honest, st.randoms())
def test_one_honest_neighbour_holds_a_majority_of_liars(lies: list[float], truth: float, draw) -> None:  # type: ignore[no-untyped-def]
    offsets = [*lies, truth]
    draw.shuffle(offsets)
    assert abs(correction(offsets)) <= CLOCK_TOLERANCE_SECONDS + 1.0


@given(st.lists(honest, min_size=1, max_size=9), st.data())
def test_a_minority_moves_nothing(truths: list[float], data: st.DataObject) -> None:
    lies = data.draw(st.lists(seconds, max_size=len(truths) - 1))
    assert correction([*truths, *lies]) == 0.0


@given(st.lists(seconds, max_size=16))
def test_the_middle_is_one_of_them_and_in_the_middle(offsets: list[float]) -> None:
    found = median(offsets)
    if offsets:
        assert found in offsets
        assert sum(o < found for o in offsets) <= len(offsets) / 2 >= sum(o > found for o in offsets)
    else:
        assert found == 0.0
