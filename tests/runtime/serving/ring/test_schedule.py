from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.ring.fair_turns import REST_TIMES
from fusion.runtime.serving.ring.schedule import (
    MAX_SESSIONS,
    SHARED_POSITIONS,
    SHORT_POSITIONS,
    SHORT_SECONDS,
    TURN_COST_POSITIONS,
    TURN_POSITIONS,
    WAITING_POSITIONS,
    Schedule,
    Work,
)
from fusion.runtime.serving.ring.session import Chunk, SessionId


@dataclass(eq=False)
class Named:
    id: SessionId


def session(name: str) -> Named:
    return Named(SessionId(name))


def work(of: Named, start: int = 0, length: int = 1) -> Work[Named]:
    """One position that decodes, or a piece of a prompt."""
    return Work(of, Chunk(start, length, sample=length == 1), memoryview(b""))


def scheduled(stages: int, names: str) -> tuple[Schedule[Named], list[Named]]:
    schedule: Schedule[Named] = Schedule(stages=stages, bounded=False)
    sessions = [session(name) for name in names]
    assert all(schedule.admit(each) for each in sessions)
    return schedule, sessions


def test_tokens_of_all_sessions_run_together_one_chunk_of_each() -> None:
    schedule, (a, b) = scheduled(1, "ab")
    given = [work(a, 0), work(b, 0), work(a, 1)]
    for each in given:
        schedule.add(each)
    assert schedule.next_turn() == (given[0], given[1])
    assert schedule.next_turn() == (given[2],)
    assert schedule.next_turn() == ()


@pytest.mark.parametrize(("stages", "together"), [(1, 8), (2, 4), (3, 3), (8, 1), (20, 1)])
def test_sessions_are_shared_out_over_the_stages(stages: int, together: int) -> None:
    schedule, sessions = scheduled(stages, "abcdefgh")
    for each in sessions:
        schedule.add(work(each))
    assert [w.session.id for w in schedule.next_turn()] == list("abcdefgh")[:together]
    for each in sessions[:together]:  # they come again, behind those that wait
        schedule.add(work(each, 1))
    following = [w.session.id for w in schedule.next_turn()]
    assert following == list("abcdefghabcdefgh")[together : 2 * together]


def test_turns_are_shared_between_users_and_prompts_wait_behind_ones_own() -> None:
    schedule: Schedule[Named] = Schedule(stages=1, bounded=False, user_of=lambda each: each.id[0])
    many, one = [session(f"a{i}") for i in range(20)], session("b")
    assert all(schedule.admit(each) for each in (*many, one))
    for each in (*many, one):
        schedule.add(work(each, 0, SHARED_POSITIONS))
    prompts = [w.session.id for _ in range(3) for w in schedule.next_turn()]
    assert prompts.index("b") == 1
    while schedule.next_turn():
        pass
    for each in (*many, one):
        schedule.add(work(each, SHARED_POSITIONS))
    assert [w.session.id for w in schedule.next_turn()] == ["a0", "b", "a1", "a2"]
    assert schedule.remove(one)
    assert len(schedule.next_turn()) == 17, "nobody else is there"


def test_tokens_and_prompts_have_turns_by_turns_and_those_of_prompts_are_short_while_somebody_decodes() -> (
    None
):
    schedule, (a, b, c) = scheduled(1, "abc")
    prompts = [work(a, 0, SHARED_POSITIONS), work(b, 0, SHARED_POSITIONS)]
    for each in (*prompts, token := work(c, 9)):
        schedule.add(each)
    assert schedule.next_turn() == (token,)
    schedule.add(another := work(c, 10))
    assert schedule.next_turn() == (prompts[0],)
    assert schedule.next_turn() == (another,)
    assert schedule.next_turn() == (prompts[1],)
    for each in prompts:
        schedule.add(each)
    assert schedule.next_turn() == (prompts[0],), "a token may come at any moment"
    schedule.remove(c)
    schedule.add(prompts[0])
    assert schedule.next_turn() == (prompts[1], prompts[0])


def test_a_prompt_whose_link_is_full_enough_waits_while_others_decode_and_only_then() -> None:
    schedule, (a, b, c) = scheduled(1, "abc")
    for each in (full := work(a, 0, 16), clear := work(b, 0, 16), token := work(c, 9)):
        schedule.add(each)
    turns = [schedule.next_turn(in_window=lambda session: session is not a) for _ in range(3)]
    assert turns == [(token,), (clear,), ()]
    assert schedule.next_turn() == (full,)
    schedule.add(full)
    schedule.remove(c)
    assert schedule.next_turn(in_window=lambda session: False) == (full,)


def test_the_short_end_of_a_prompt_runs_with_tokens_and_its_short_chunks_do_not() -> None:
    schedule, (a, b, c) = scheduled(1, "abc")
    chunk = Work(a, Chunk(0, SHORT_POSITIONS, sample=False), memoryview(b""))
    end = Work(b, Chunk(0, SHORT_POSITIONS, sample=True), memoryview(b""))
    for each in (chunk, end, token := work(c, 9)):
        schedule.add(each)
    assert schedule.next_turn() == (end, token)
    assert schedule.next_turn() == (chunk,)


def test_prompts_run_together_as_far_as_a_turn_goes() -> None:
    schedule, (a, b, c) = scheduled(1, "abc")
    half = TURN_POSITIONS // 2
    given = [work(a, 0, half), work(b, 0, half), work(c, 0, half)]
    for each in given:
        schedule.add(each)
    assert schedule.next_turn() == (given[0], given[1])
    schedule.add(large := work(a, half, 2 * TURN_POSITIONS))
    assert schedule.next_turn() == (given[2],)
    assert schedule.next_turn() == (large,)  # more than a turn holds, and alone


def test_a_prompt_is_fed_in_smaller_chunks_beside_others_and_behind_a_long_prefix() -> None:
    schedule, (a, b) = scheduled(1, "ab")
    assert schedule.prefill_positions(a, 512, 0, 9000) == 512
    assert schedule.prefill_positions(a, 512, 4096, 9000) == 256
    schedule.add(work(a, 9))
    assert schedule.prefill_positions(a, 512, 0, 9000) == 512  # its own tokens are not others'
    assert schedule.prefill_positions(b, 512, 0, 9000) == SHARED_POSITIONS
    assert schedule.prefill_positions(b, 8, 0, 9000) == 8
    assert schedule.prefill_positions(b, 1, 10**6, 2 * 10**6) == 1
    schedule.remove(a)
    assert schedule.prefill_positions(b, 512, 0, 9000) == 512


def test_a_prompt_begins_in_small_chunks_where_a_round_trip_takes_longer_than_the_turns_that_they_cost() -> (
    None
):
    schedule, (a,) = scheduled(4, "a")

    def positions(fed: int, round_trip_seconds: float) -> int:
        return schedule.prefill_positions(a, 512, 0, 1000, fed=fed, round_trip_seconds=round_trip_seconds)

    whole = positions(0, 0.0)
    assert [positions(fed, math.inf) for fed in (0, 16, 32, 64, 128)] == [16, 16, 32, 64, whole]
    for chunk in (0, 512):  # a turn of 0.1 s: 6 ms for what it costs whatever it runs
        schedule.add(work(a, chunk, 512))
        schedule.took(schedule.next_turn(), 0.1, 1.0)
    assert positions(0, 0.012) == whole and positions(0, 0.013) == 16
    assert scheduled(1, "a")[0].prefill_positions(a, 512, 0, 300) == 300


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("total", [400, 1000, 8000])
def test_the_chunks_of_a_prompt_keep_all_stages_busy_soonest(stages: int, total: int) -> None:
    def turns(positions: int) -> float:
        chunks = -(-total // positions)
        return (chunks + stages - 1) * (total / chunks + TURN_COST_POSITIONS)

    schedule, (a,) = scheduled(stages, "a")
    found = schedule.prefill_positions(a, total, 0, total)
    assert TURN_COST_POSITIONS <= found <= total
    assert turns(found) <= 1.05 * min(map(turns, range(TURN_COST_POSITIONS, total + 1)))


def test_one_stage_runs_a_prompt_in_chunks_as_long_as_they_may_be() -> None:
    schedule, (a,) = scheduled(1, "a")
    assert schedule.prefill_positions(a, 512, 0, 1000) == 512


chunks = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 700)), max_size=40)


@given(stages=st.integers(1, 4), chunks=chunks)
def test_every_chunk_runs_once_and_those_of_a_session_in_order(
    stages: int, chunks: list[tuple[int, int]]
) -> None:
    schedule, sessions = scheduled(stages, "abcdef")
    given = [work(sessions[of], i, length) for i, (of, length) in enumerate(chunks)]
    for each in given:
        schedule.add(each)
    ran: list[Work[Named]] = []
    while turn := schedule.next_turn():
        assert len({each.session.id for each in turn}) == len(turn)
        assert len(turn) == 1 or sum(each.chunk.length for each in turn) <= TURN_POSITIONS
        ran += turn
    assert sorted(each.chunk.start for each in ran) == list(range(len(given)))
    for each in sessions:
        starts = [w.chunk.start for w in ran if w.session is each]
        assert starts == sorted(starts)


def test_what_waits_for_a_session_that_is_gone_does_not_run_in_another_of_its_name() -> None:
    schedule: Schedule[Named] = Schedule(stages=1, bounded=False)
    before, after = session("a"), session("a")
    assert schedule.admit(before)
    schedule.add(work(before))
    assert schedule.remove(before) and not schedule.remove(before)
    assert schedule.admit(after)
    schedule.add(mine := work(after, 7))
    assert schedule.next_turn() == (mine,) and not schedule.remove(before)


def test_a_name_is_taken_once_and_sessions_are_bounded() -> None:
    schedule: Schedule[Named] = Schedule(stages=1, bounded=True)
    assert all(schedule.admit(session(str(i))) for i in range(MAX_SESSIONS))
    assert not schedule.admit(session("one more"))
    with pytest.raises(JobError, match="a new name"):
        schedule.admit(session("0"))


def test_who_sends_chunks_waits_while_enough_of_them_wait_here() -> None:
    schedule: Schedule[Named] = Schedule(stages=1, bounded=True)
    a = session("a")
    schedule.admit(a)
    for start in range(0, WAITING_POSITIONS, TURN_POSITIONS):
        assert schedule.has_room
        schedule.add(work(a, start, TURN_POSITIONS))
    assert not schedule.has_room
    schedule.next_turn()
    assert schedule.has_room


def test_prompts_of_many_sessions_of_one_user_let_anothers_through() -> None:
    schedule: Schedule[Named] = Schedule(stages=1, bounded=False, user_of=lambda each: each.id[0])
    many, (one, token) = [session(f"a{i}") for i in range(8)], (session("b"), session("c"))
    assert all(schedule.admit(each) for each in (*many, one, token))
    for each in many:
        schedule.add(work(each, 0, SHARED_POSITIONS))
    ran: list[str] = []
    for turn in range(6):
        schedule.add(work(token, turn))
        if turn == 2:
            schedule.add(work(one, 0, SHARED_POSITIONS))
        assert [w.session for w in schedule.next_turn()] == [token]
        (prompt,) = schedule.next_turn()
        ran.append(prompt.session.id)
        schedule.add(work(prompt.session, SHARED_POSITIONS, SHARED_POSITIONS))  # behind the others
    assert ran == ["a0", "a1", "b", "a2", "b", "a3"]


def test_turns_without_the_user_with_fewest_sessions_come_now_and_then() -> None:
    schedule: Schedule[Named] = Schedule(stages=1, bounded=False, user_of=lambda each: each.id[0])
    many, one = [session(f"a{i}") for i in range(12)], session("b")
    assert all(schedule.admit(each) for each in (*many, one))
    for each in (*many, one):
        schedule.add(work(each))
    first = schedule.next_turn(0.0)
    assert one in [w.session for w in first]
    schedule.took(first, 1.0, 1.0)
    alone = schedule.next_turn(1.0)
    assert alone and one not in [w.session for w in alone], "it is at another stage"
    schedule.took(alone, 1.0, 2.0)
    assert schedule.next_turn(2.0) == () and schedule.rest(2.0) == REST_TIMES
    schedule.add(work(one, 1))
    assert one in [w.session for w in schedule.next_turn(2.0)], "it is back, and others' rows go along"
    schedule.remove(one)
    assert schedule.next_turn(2.0), "nobody else is here"


def test_a_chunk_of_a_prompt_behind_the_tokens_of_the_user_with_fewest_sessions_is_not_rested_for() -> None:
    schedule: Schedule[Named] = Schedule(stages=1, bounded=False, user_of=lambda each: each.id[0])
    many, one, asks = [session(f"a{i}") for i in range(3)], session("b"), session("c")
    assert all(schedule.admit(each) for each in (*many, one, asks))
    for each in (*many, one):
        schedule.add(work(each))
    for start in range(2):
        schedule.add(work(asks, start * SHARED_POSITIONS, SHARED_POSITIONS))
    tokens = schedule.next_turn(0.0)
    assert one in [w.session for w in tokens]
    schedule.took(tokens, 1.0, 1.0)
    schedule.took(prompt := schedule.next_turn(1.0), 1.0, 2.0)
    assert [w.session for w in prompt] == [asks] and schedule.rest(2.0) == 0.0
    schedule.took(prompt := schedule.next_turn(2.0), 1.0, 3.0)
    assert [w.session for w in prompt] == [asks]
    schedule.add(work(asks, 2 * SHARED_POSITIONS, SHARED_POSITIONS))
    assert schedule.rest(3.0) == REST_TIMES, "the user with fewest sessions has had no turn since"


def test_a_turn_is_short_for_the_only_session_once_one_like_it_was() -> None:
    schedule, (a, b) = scheduled(2, "ab")
    token, prompt, less = (work(a, 3),), (work(a, 0, 3),), 0.9 * SHORT_SECONDS
    schedule.took(token, less, 0.0)
    assert not schedule.is_short(token), "somebody else is here"
    schedule.remove(b)
    assert schedule.is_short(token) and not schedule.is_short(prompt)
    schedule.took(prompt, 1.0, 0.0)
    assert schedule.is_short(token), "a prompt tells nothing of a token"
    schedule.took(token, SHORT_SECONDS, 0.0)
    assert not schedule.is_short(token)
    schedule.took(token, less, 0.0)
    schedule.remove(a)
    assert schedule.admit(b) and not schedule.is_short((work(b, 90_000),)), "it has far more to look at"


def test_a_session_that_ended_while_its_chunk_ran_is_held_under_no_name() -> None:
    schedule, (a,) = scheduled(1, "a")
    schedule.add(work(a))
    assert schedule.next_turn()
    schedule.remove(a)
    schedule.hold(a)  # there was no memory for the chunk
    again = session("a")
    assert schedule.admit(again)
    schedule.add(work(again))
    assert schedule.next_turn()
