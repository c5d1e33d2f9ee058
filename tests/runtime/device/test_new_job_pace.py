"""How fast a peer takes up jobs that are new to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.directory_records import digest
from support.examples import examples

from fusion.runtime.device.new_job_pace import (
    BURST_SECONDS,
    DEBT_SECONDS,
    READ_SECONDS,
    SHARE,
    STAGE_SECONDS,
    NewJobPace,
    Offer,
)
from fusion.swarm.directory.records import JobId
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.transport import PeerId


def busy(clock: ManualClock, beside: Callable[[PeerId], bool] = lambda author: True) -> NewJobPace:
    pace = NewJobPace(clock)
    pace.beside = beside
    return pace


def offers(author: str, count: int) -> list[Offer]:
    return [Offer(JobId(digest(f"{author} {n}")), PeerId(author)) for n in range(count)]


def taken(pace: NewJobPace, offered: list[Offer]) -> list[JobId]:
    """What is begun; nothing is offered twice."""
    begun: list[JobId] = []

    def begin(job: JobId) -> bool:
        begun.append(job)
        return True

    pace.take_up(offered, begin)
    offered[:] = [offer for offer in offered if offer.job not in begun]
    return begun


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 40), st.booleans()), max_size=30))
def test_whatever_is_offered_beside_work_of_others_costs_no_more_than_a_share(
    events: list[tuple[float, int, bool]],
) -> None:
    clock = ManualClock()
    pace, began = busy(clock), clock()
    cost, waiting = 0.0, list[Offer]()
    for number, (seconds, count, many) in enumerate(events):
        clock.advance(seconds)
        waiting += [
            Offer(JobId(digest(f"{number} {n}")), PeerId(f"{number} {n}" if many else "one"))
            for n in range(count)
        ]
        whose = {offer.job: offer.author for offer in waiting}
        for job in taken(pace, waiting):
            pace.charge(job, whose[job], STAGE_SECONDS)
            cost += READ_SECONDS + STAGE_SECONDS
            assert cost <= BURST_SECONDS + SHARE * (clock() - began) + READ_SECONDS + STAGE_SECONDS


def test_a_new_author_does_not_wait_behind_the_jobs_of_another() -> None:
    clock = ManualClock()
    pace, many = busy(clock), offers("many", 200)
    first = taken(pace, many)
    assert 0 < len(first) <= BURST_SECONDS / STAGE_SECONDS + 1
    pace.charge(first[0], PeerId("many"), 100.0)  # for what it had this peer compute
    new = offers("new", 2)
    assert not taken(pace, [*many, *new])
    clock.advance((DEBT_SECONDS + READ_SECONDS / 2) / SHARE)
    assert taken(pace, [*many, *new]) == [new[0].job]


def test_no_more_jobs_begin_at_once_than_their_stages_may_cost() -> None:
    pace = busy(ManualClock())
    authors = [offers(f"{n}", 1)[0] for n in range(100)]
    assert len(taken(pace, authors)) <= BURST_SECONDS / STAGE_SECONDS + 1


def test_authors_take_turns() -> None:
    clock = ManualClock()
    pace = busy(clock)
    waiting = [*offers("a", 50), *offers("b", 50), *offers("c", 1)]
    whose = {offer.job: offer.author for offer in waiting}
    had = Counter(whose[job] for job in taken(pace, waiting))
    assert had["c"] == 1 and abs(had["a"] - had["b"]) <= 1


def test_whoever_disturbs_nobody_waits_for_nothing_and_leaves_others_what_was_saved() -> None:
    pace = busy(ManualClock(), lambda author: author != "alone")
    first, *others = taken(pace, offers("alone", 500))
    assert len(others) == 499
    pace.charge(first, PeerId("alone"), 100.0)
    assert pace.left_seconds == BURST_SECONDS
    assert taken(pace, offers("other", 1))


def test_what_could_not_begin_is_not_paid_for() -> None:
    pace = busy(ManualClock())
    pace.take_up(offers("a", 100), lambda job: False)
    assert pace.left_seconds == BURST_SECONDS and pace.charged(PeerId("a")) == 0.0


def test_a_manifest_in_the_name_of_another_is_paid_for_by_whoever_spoke_of_it() -> None:
    pace = busy(ManualClock(), lambda author: author != "alone")
    (job,) = taken(pace, offers("stranger", 1))
    pace.charge(job, PeerId("alone"), STAGE_SECONDS)
    assert pace.charged(PeerId("alone")) == 0.0
    assert pace.charged(PeerId("stranger")) == pytest.approx(READ_SECONDS + STAGE_SECONDS)
    assert pace.left_seconds == pytest.approx(BURST_SECONDS - READ_SECONDS - STAGE_SECONDS)
