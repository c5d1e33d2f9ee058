from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.training.lead.moves import Move
from fusion.runtime.training.lead.promises import REQUESTED_SECONDS, SETTLING_SECONDS, WITNESSES, Promises

MOVE = Move(stage=1, peer="liar", before_seconds=2.0, after_seconds=1.0, cost_seconds=3.0)
SETTLED = MOVE.cost_seconds + SETTLING_SECONDS
THERE, BEFORE = ("a", "liar"), ("a", "b")


def test_a_peer_whose_figures_were_too_good_gets_no_second_stage() -> None:
    promises = Promises().made(MOVE, 0.0)
    for _ in range(WITNESSES):
        assert not promises.broken
        promises = promises.observed(THERE, 2.1, SETTLED)
    assert promises.broken == {"liar"} and promises.pending is None
    again = promises.made(Move(stage=0, peer="c", before_seconds=2, after_seconds=1, cost_seconds=1), 9.0)
    assert again.observed(("c", "liar"), 1.0, 99.0).broken == {"liar"}, "and stays so"


def test_one_slow_step_is_no_lie_and_half_of_what_was_promised_is_enough() -> None:
    promises = Promises().made(MOVE, 0.0)
    for _ in range(WITNESSES - 1):
        promises = promises.observed(THERE, 9.0, SETTLED)
    assert promises.observed(THERE, 1.5, SETTLED) == Promises(made_at=0.0, seen=WITNESSES - 1)


def test_steps_that_the_move_itself_held_up_count_for_nothing() -> None:
    promises = Promises().made(MOVE, 0.0)
    for _ in range(9):
        assert promises.observed(THERE, 60.0, SETTLED - 0.1) == promises


def test_a_move_that_was_not_made_is_forgotten() -> None:
    promises = Promises().made(MOVE, 0.0)
    assert promises.observed(BEFORE, 9.0, REQUESTED_SECONDS - 1) == promises
    assert promises.observed(BEFORE, 9.0, REQUESTED_SECONDS).pending is None


@given(st.lists(st.tuples(st.sampled_from([THERE, BEFORE]), st.floats(0.0, 1.5))))
def test_who_keeps_it_is_never_blamed(looks: list[tuple[tuple[str, str], float]]) -> None:
    promises = Promises().made(MOVE, 0.0)
    for owners, seconds in looks:
        promises = promises.observed(owners, seconds, SETTLED)
    assert not promises.broken
