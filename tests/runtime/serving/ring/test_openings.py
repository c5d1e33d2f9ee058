"""Who may open sessions, and how many, while others open them and run none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.ring.openings import (
    ALL_BURST,
    ALL_PER_SECOND,
    BURST,
    EARNED,
    FIRST,
    MOST_EARNED,
    PARTS_BYTES,
    PER_SECOND,
    Openings,
    WaitingParts,
)
from fusion.swarm.transport import PeerId

A, B = PeerId("a"), PeerId("b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(openings: Openings, gateway: PeerId, asked: int = 10_000) -> int:
    return sum(openings.spend(gateway) for _ in range(asked))


def test_a_gateway_may_open_some_at_once_and_then_a_few_a_second() -> None:
    clock = Clock()
    openings = Openings(clock)
    assert opened(openings, A) == BURST
    clock.now += 3
    assert opened(openings, A) == 3 * PER_SECOND


def test_sessions_that_run_are_never_counted_against_their_gateway() -> None:
    openings = Openings(Clock())
    for _ in range(1000):
        assert openings.spend(A)
        openings.earn(A)
    assert opened(openings, A) == BURST - 1 + MOST_EARNED  # the first of them was not earned


def test_a_gateway_that_moves_many_sessions_here_is_let_in_as_fast_as_they_run() -> None:
    """Its peers have just lost the stage to us: nobody has earned anything here."""
    openings, left, rounds = Openings(Clock()), 256, 0
    while left and rounds < 4:
        let_in = opened(openings, A, left)
        left, rounds = left - let_in, rounds + 1
        for _ in range(let_in):
            openings.earn(A)
    assert not left


@given(st.integers(1, 64), st.floats(1.0, 60.0))
def test_many_names_open_no_more_than_a_bound_and_keep_nobody_out_who_runs_sessions(
    names: int, seconds: float
) -> None:
    clock = Clock()
    openings = Openings(clock)
    openings.earn(A)
    total = 0
    for _ in range(10):
        total += sum(opened(openings, PeerId(f"squatter {name}"), 100) for name in range(names))
        clock.now += seconds / 10
    assert total <= ALL_BURST + seconds * ALL_PER_SECOND
    assert opened(openings, A, EARNED) == EARNED


def test_a_gateway_that_comes_after_squatters_is_let_in_ahead_of_them() -> None:
    openings = Openings(Clock())
    for name in range(12):
        opened(openings, PeerId(f"squatter {name}"))
    assert opened(openings, A) == FIRST


def test_of_what_waits_for_other_stages_whoever_has_most_loses_its_largest_session() -> None:
    parts, mib = WaitingParts[str](), 1 << 20
    assert parts.set("ours", B, 40 * mib) is None
    assert parts.set("one", A, 28 * mib) is parts.set("two", A, PARTS_BYTES - 68 * mib) is None
    assert parts.set("three", A, 1) == "two"
    assert parts.set("two", A, 0) is None  # it has ended
    assert parts.set("ours", B, 41 * mib) is parts.set("one", A, 0) is parts.set("three", A, 0) is None
    assert parts.set("ours", B, PARTS_BYTES + 1) == "ours"
    assert parts.set("ours", B, 0) is None and not parts._waiting and not parts._size_bytes
