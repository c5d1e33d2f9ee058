from __future__ import annotations

from itertools import accumulate, pairwise

from fusion.runtime.serving.answers.slowdown import RECENT, SETTLED, Slowdown


def told(*gaps: float) -> list[int]:
    """After which tokens it is said that they come slower."""
    slowdown = Slowdown()
    return [i for i, now in enumerate(accumulate(gaps, initial=0.0)) if slowdown.token(now)]


def test_a_pace_that_falls_is_told_soon() -> None:
    (at,) = told(*[0.02] * 40, *[0.05] * 30)
    assert 40 < at <= 40 + RECENT


def test_it_is_told_ever_more_seldom() -> None:
    found = told(*[0.02] * 40, *[0.05] * 800)  # 40 s
    seconds = [0.05 * (b - a) for a, b in pairwise(found)]
    assert [round(s) for s in seconds] == [2, 4, 8, 16]


def test_what_was_slow_and_is_over_does_not_make_the_next_time_later() -> None:
    before = [*[0.02] * 40, *[0.05] * 200, *[0.02] * 40]
    (*_, at) = [token for token in told(*before, *[0.05] * 30) if token > len(before)]
    assert at <= len(before) + RECENT + 1


def test_single_pauses_and_what_is_hardly_slower_are_not() -> None:
    assert not told(*([0.02] * 9 + [0.5]) * 10)
    assert not told(*[0.02] * 40, *[0.026] * 40)
    assert not told(*[0.0001] * 40, *[0.001] * 40), "slower by nothing to speak of"


def test_a_new_way_has_a_pace_of_its_own() -> None:
    slowdown = Slowdown()
    for i in range(40):
        assert not slowdown.token(0.02 * i)
    slowdown.begin()
    for i in range(2 * SETTLED):
        assert not slowdown.token(10 + 0.2 * i)
