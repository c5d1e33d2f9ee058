from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.ring.fair_turns import MORE_ROWS, PromptTurns, TurnTimes, fair_rows, in_turns

WAITING = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 99)), unique=True)


def user_of(item: tuple[str, int]) -> str:
    return item[0]


def test_a_users_first_comes_before_anybodys_second() -> None:
    waiting = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("a", 3), ("b", 1)]
    assert in_turns(waiting, user_of) == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]


def test_one_user_alone_has_every_row_in_the_order_that_they_came_in() -> None:
    waiting = [("a", i) for i in range(40)]
    assert fair_rows(waiting, user_of, {"a": 40}, MORE_ROWS) == waiting


def test_one_answer_beside_many_of_somebody_else_is_in_the_next_turn_and_that_turn_is_short() -> None:
    waiting = [("a", i) for i in range(64)]
    decoding = {"a": 64, "b": 1}
    assert fair_rows([*waiting, ("b", 0)], user_of, decoding, MORE_ROWS) == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("a", 2),
    ]
    assert len(fair_rows(waiting, user_of, decoding, 2)) == 2, "also while that one is at another stage"


def test_users_with_as_many_sessions_are_not_held_up() -> None:
    waiting = [(user, i) for user in "abcd" for i in range(8)]
    assert sorted(fair_rows(waiting, user_of, dict.fromkeys("abcd", 8), 1)) == waiting


@given(WAITING, st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_rows_are_fair(waiting: list[tuple[str, int]], elsewhere: list[int]) -> None:
    here = Counter(map(user_of, waiting))
    decoding = {
        user: count for user, more in zip("abcd", elsewhere, strict=True) if (count := here[user] + more)
    }
    chosen = fair_rows(waiting, user_of, decoding, MORE_ROWS)
    assert set(chosen) <= set(waiting) and len(set(chosen)) == len(chosen)
    assert bool(chosen) == bool(waiting)
    fewest = min(decoding.values(), default=0)
    rows = Counter(map(user_of, chosen))
    if len(decoding) > 1:
        for user in decoding:
            assert rows[user] == min(here[user], MORE_ROWS * fewest)
    for user in rows:  # a user's own stay in order
        assert [item for item in chosen if item[0] == user] == [i for i in waiting if i[0] == user][
            : rows[user]
        ]


def timed(row_seconds: float, turn_seconds: float, sizes: str, every: float = 1.0) -> TurnTimes:
    """After turns of these sizes; every tenth takes `every` times as long."""
    times = TurnTimes()
    for number, rows in enumerate(map(int, sizes)):
        seconds = turn_seconds + row_seconds * rows
        times.took(rows, seconds * (every if number % 10 == 9 else 1.0))
    return times


def test_others_have_as_many_rows_as_a_users_own_turn_can_bear() -> None:
    mixed = "141314241" * 30
    assert timed(0.0, 1.0, mixed).more_rows(1) == MORE_ROWS, "weights are what takes the time"
    assert timed(0.1, 1.0, mixed).more_rows(1) == MORE_ROWS
    assert timed(0.25, 1.0, mixed).more_rows(1) == 2
    assert timed(0.5, 1.0, mixed).more_rows(1) == 1
    assert timed(1.0, 0.0, mixed).more_rows(1) == 1, "never none"
    assert timed(0.1, 1.0, mixed).more_rows(8) == 1, "eight of its own take longer for as many of others"


def test_turns_of_one_size_say_nothing_of_what_a_row_takes() -> None:
    assert timed(1.0, 0.0, "4" * 100).more_rows(1) == MORE_ROWS
    assert TurnTimes().more_rows(1) == MORE_ROWS


def test_a_turn_that_something_interrupted_is_no_reason() -> None:
    assert timed(0.02, 1.0, "14411" * 80, every=50.0).more_rows(1) >= 2


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0.0, 1e3)), max_size=60), st.integers(1, 512))
def test_any_times_leave_somebody_a_row(turns: list[tuple[int, float]], own: int) -> None:
    times = TurnTimes()
    for rows, seconds in turns:
        times.took(rows, seconds)
    assert 1 <= times.more_rows(own) <= MORE_ROWS


def test_prompts_go_by_who_had_one_longest_ago() -> None:
    prompts = PromptTurns()
    waiting = [("a", i) for i in range(4)]
    prompts.ran("a")
    assert prompts.ranked([*waiting, ("b", 0)], user_of)[0] == ("b", 0)
    prompts.ran("b")
    assert prompts.ranked([*waiting, ("b", 0)], user_of) == [("a", 0), ("b", 0), *waiting[1:]]
    prompts.forget("b"), prompts.forget("nobody")
    assert prompts.ranked([*waiting, ("b", 0)], user_of)[0] == ("b", 0)
