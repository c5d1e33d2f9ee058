from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.training.step.history import INITIAL, UNKNOWN, Version, contents, extend

numbers = st.floats(allow_nan=False)
steps = st.tuples(
    st.text(max_size=4),
    st.lists(numbers, min_size=1, max_size=3).map(tuple),
    st.lists(numbers, max_size=1).map(tuple),
    numbers,
    numbers,
)
runs = st.lists(steps, max_size=4)


def history(run: list[tuple[str, tuple[float, ...], tuple[float, ...], float, float]]) -> str:
    head = INITIAL
    for step, (fed, norms, losses, rate, clip) in enumerate(run):
        head = extend(head, step, rate, clip, contents(fed, norms, losses))
    return head


def bits(run: list[tuple[str, tuple[float, ...], tuple[float, ...], float, float]]) -> list[object]:
    """0.0 is not -0.0."""
    packed = [
        [struct.pack(f"{len(part)}d", *part) for part in (norms, losses, (rate, clip))]
        for _, norms, losses, rate, clip in run
    ]
    return [(step[0], *part) for step, part in zip(run, packed, strict=True)]


@given(runs, runs)
def test_histories_are_equal_where_the_same_was_computed_and_nowhere_else(first: list, second: list) -> None:  # type: ignore[type-arg]
    assert (history(first) == history(second)) == (bits(first) == bits(second))


def test_a_number_of_one_stage_is_not_that_of_another() -> None:
    assert contents("a", (1.0, 2.0), ()) != contents("a", (1.0,), (2.0,))
    assert contents("a", (1.0, 2.0), ()) != contents("a", (2.0, 1.0), ())


def test_what_follows_an_unknown_history_is_unknown() -> None:
    made_of = contents("a", (1.0,), ())
    assert extend(UNKNOWN, 0, 0.5, 1.0, made_of) == UNKNOWN == extend(INITIAL, 0, 0.5, 1.0, UNKNOWN)


def test_states_agree_unless_they_are_known_not_to() -> None:
    one, other, unsaid = Version(3, "a" * 64), Version(3, "b" * 64), Version(3)
    assert one.matches(one) and one.matches(unsaid) and unsaid.matches(one)
    assert not one.matches(other) and not one.matches(Version(4, "a" * 64)) and not unsaid.matches(Version(4))
    assert Version.agree([unsaid, one, unsaid]) and not Version.agree([unsaid, one, other])
