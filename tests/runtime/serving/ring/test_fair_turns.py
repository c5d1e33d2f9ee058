from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.ring.fair_turns import MORE_ROWS, fair_rows, in_turns

WAITING = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 99)), unique=True)


def user_of(item: tuple[str, int]) -> str:
    return item[0]


def test_a_users_first_comes_before_anybodys_second() -> None:
    waiting = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("a", 3), ("b", 1)]
    assert in_turns(waiting, user_of) == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]


def test_one_user_alone_has_every_row_in_the_order_that_they_came_in() -> None:
    waiting = [("a", i) for i in range(40)]
    assert fair_rows(waiting, user_of, {"a": 40}) == waiting


def test_one_answer_beside_many_of_somebody_else_is_in_the_next_turn_and_that_turn_is_short() -> None:
    waiting = [("a", i) for i in range(64)]
    decoding = {"a": 64, "b": 1}
    assert fair_rows([*waiting, ("b", 0)], user_of, decoding) == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert len(fair_rows(waiting, user_of, decoding)) == MORE_ROWS, "also while that one is at another stage"


def test_users_with_as_many_sessions_are_not_held_up() -> None:
    waiting = [(user, i) for user in "abcd" for i in range(8)]
    assert sorted(fair_rows(waiting, user_of, dict.fromkeys("abcd", 8))) == waiting


@given(WAITING, st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_rows_are_fair(waiting: list[tuple[str, int]], elsewhere: list[int]) -> None:
    here = Counter(map(user_of, waiting))
    decoding = {
        user: count for user, more in zip("abcd", elsewhere, strict=True) if (count := here[user] + more)
    }
    chosen = fair_rows(waiting, user_of, decoding)
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
