from __future__ import annotations

from dataclasses import dataclass

import pytest

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.ring.schedule import MAX_SESSIONS, WAITING_CHUNKS, Schedule, Work
from fusion.runtime.serving.ring.session import Chunk, SessionId


@dataclass(eq=False)
class Named:
    id: SessionId


def session(name: str) -> Named:
    return Named(SessionId(name))


def work(of: Named, start: int = 0) -> Work[Named]:
    return Work(of, Chunk(start, 1, sample=True), memoryview(b""))


def test_chunks_run_in_the_order_in_which_they_arrive() -> None:
    schedule: Schedule[Named] = Schedule(bounded=False)
    a, b = session("a"), session("b")
    assert schedule.admit(a) and schedule.admit(b)
    given = [work(a, 0), work(b, 0), work(a, 1)]
    for each in given:
        schedule.add(each)
    assert [schedule.next_turn() for _ in given] == [(each,) for each in given]
    assert schedule.next_turn() == ()


def test_what_waits_for_a_session_that_is_gone_does_not_run_in_another_of_its_name() -> None:
    schedule: Schedule[Named] = Schedule(bounded=False)
    before, after = session("a"), session("a")
    assert schedule.admit(before)
    schedule.add(work(before))
    assert schedule.remove(before) and not schedule.remove(before)
    assert schedule.admit(after)
    schedule.add(mine := work(after, 7))
    assert schedule.next_turn() == (mine,) and not schedule.remove(before)


def test_a_name_is_taken_once_and_sessions_are_bounded() -> None:
    schedule: Schedule[Named] = Schedule(bounded=True)
    assert all(schedule.admit(session(str(i))) for i in range(MAX_SESSIONS))
    assert not schedule.admit(session("one more"))
    with pytest.raises(JobError, match="a new name"):
        schedule.admit(session("0"))


def test_who_sends_chunks_waits_while_enough_of_them_wait_here() -> None:
    schedule: Schedule[Named] = Schedule(bounded=True)
    a = session("a")
    schedule.admit(a)
    for start in range(WAITING_CHUNKS):
        assert schedule.has_room
        schedule.add(work(a, start))
    assert not schedule.has_room
    schedule.next_turn()
    assert schedule.has_room
