"""How far it is worth drafting: less where guesses are wrong or trips are short, down to none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.drafts.draft_length import (
    FIRST_DRAFTED,
    HOPEFUL,
    LEAST_ACCEPTANCE,
    MOST_DRAFTED,
    STEPS_A_TRIP,
    Acceptance,
    Trips,
    worth_drafting,
)

shares = st.floats(LEAST_ACCEPTANCE, 1.0)
times = st.floats(1e-6, 10.0)


@given(share=shares, trip=times, step=times)
def test_each_guess_saves_more_than_its_step_may_cost(share: float, trip: float, step: float) -> None:
    depth = worth_drafting(share, trip, step)
    assert 0 <= depth <= MOST_DRAFTED
    if depth:
        assert share**depth * trip >= STEPS_A_TRIP * step * 0.999
    if depth < MOST_DRAFTED:
        assert share ** (depth + 1) * trip <= STEPS_A_TRIP * step * 1.001 or share == 1.0


@given(share=shares, trip=times, step=times)
def test_longer_trips_and_better_guesses_are_drafted_further(share: float, trip: float, step: float) -> None:
    depth = worth_drafting(share, trip, step)
    assert worth_drafting(share, 2 * trip, step) >= depth
    assert worth_drafting(min(1.0, share * 1.1), trip, step) >= depth
    assert worth_drafting(share, trip, 2 * step) <= depth


def test_on_a_fast_network_nothing_is_drafted_and_over_a_slow_one_a_lot() -> None:
    assert worth_drafting(0.9, 0.004, 0.002) == 0
    assert worth_drafting(0.9, 0.4, 0.002) > 20
    assert worth_drafting(LEAST_ACCEPTANCE, 0.4, 0.002) == 1


def test_what_is_not_known_yet_is_tried() -> None:
    assert worth_drafting(0.5, None, 0.1) == worth_drafting(0.5, 0.1, None) == FIRST_DRAFTED


def test_the_acceptance_follows_what_becomes_of_guesses_and_is_never_given_up() -> None:
    acceptance = Acceptance()
    for _ in range(3):
        acceptance.add(False)
    assert acceptance.share < HOPEFUL
    acceptance.add(True)
    assert acceptance.share > HOPEFUL
    for _ in range(100):
        acceptance.add(False)
    assert acceptance.share == LEAST_ACCEPTANCE
    for _ in range(100):
        acceptance.add(True)
    assert acceptance.share > 0.99


def test_a_trip_is_from_the_chunk_to_the_token_behind_it() -> None:
    trips = Trips()
    trips.fed(10, 1.0)
    trips.fed(14, 1.1)
    trips.returned(12, 1.3)  # of tokens that were guessed and came at once, only the last one's trip is known
    assert trips.seconds.value is None
    trips.returned(14, 1.6)
    assert trips.seconds.value == 0.5
    for end in range(1000):  # whoever never answers does not fill the memory
        trips.fed(end, 2.0)
    trips.returned(10, 9.0)
    assert trips.seconds.value == 0.5
