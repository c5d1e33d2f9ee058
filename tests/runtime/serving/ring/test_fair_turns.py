from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.serving.ring.fair_turns import (
    AWAY_TIMES,
    MORE_ROWS,
    REST_TIMES,
    PromptTurns,
    Rests,
    fair_rows,
    in_turns,
    with_fewest,
)

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
    assert fair_rows([*waiting, ("b", 0)], user_of, decoding) == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("a", 2),
    ]
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


def test_others_alone_take_a_part_of_the_time_while_a_user_with_fewer_is_away_for_a_moment() -> None:
    rests = Rests()
    rests.ran(False, 1.0, 10.0)
    rests.ran(True, 1.0, 11.0)
    assert rests.left(11.0) == REST_TIMES
    assert rests.left(11.0 + REST_TIMES) == 0.0
    rests.ran(True, 1.0, 10.0 + AWAY_TIMES)
    assert rests.left(10.0 + AWAY_TIMES) == 0.0, "it is away for long"
    assert Rests().left(0.0) == 0.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=40))
def test_nobody_rests_for_long(turns: list[tuple[bool, float, float]]) -> None:
    rests, now = Rests(), 0.0
    for alone, pause, seconds in turns:
        now += pause + seconds
        rests.ran(alone, seconds, now)
        if alone:
            assert 0.0 <= rests.left(now) <= REST_TIMES * seconds + 1e-9


def test_who_has_the_fewest() -> None:
    assert with_fewest({"a": 3, "b": 1, "c": 1}) == {"b", "c"}
    assert not with_fewest({"a": 2, "b": 2})
    assert not with_fewest({"a": 2})
    assert not with_fewest({})


def test_prompts_go_by_who_had_one_longest_ago() -> None:
    prompts = PromptTurns()
    waiting = [("a", i) for i in range(4)]
    prompts.ran("a")
    assert prompts.ranked([*waiting, ("b", 0)], user_of)[0] == ("b", 0)
    prompts.ran("b")
    assert prompts.ranked([*waiting, ("b", 0)], user_of) == [("a", 0), ("b", 0), *waiting[1:]]
    prompts.forget("b"), prompts.forget("nobody")
    assert prompts.ranked([*waiting, ("b", 0)], user_of)[0] == ("b", 0)
