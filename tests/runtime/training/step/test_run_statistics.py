from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.job.fields import build, plain
from fusion.runtime.job.progress import RECENT
from fusion.runtime.training.step.run_statistics import CLEAN, RunStatistics

small = st.integers(0, 5)
attempts = st.tuples(small, small)
tallies = st.builds(
    RunStatistics,
    high=small,
    discarded=small,
    replayed=small,
    losses=small,
    recoveries=small,
    last_discard=attempts,
    seconds=st.floats(0, 10),
    recent=st.dictionaries(st.integers(0, 200), st.floats(0, 9), max_size=RECENT).map(
        lambda losses: tuple(sorted(losses.items()))
    ),
)


@given(tallies, tallies, tallies)
def test_merging_knows_no_order_and_takes_nothing_twice(
    a: RunStatistics, b: RunStatistics, c: RunStatistics
) -> None:
    assert a.merge(b) == b.merge(a) and a.merge(a) == a
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) and a.merge(CLEAN).merge(a) == a


def test_a_step_that_was_committed_before_is_a_replay() -> None:
    counts = CLEAN
    for step in (0, 1, 2, 1, 2, 3):
        counts = counts.commit(step)
    assert (counts.high, counts.replayed) == (4, 2)


def test_the_losses_of_the_last_steps_are_kept() -> None:
    """The stage that makes them knows them, and so does whoever merges with it."""
    counts = CLEAN
    for step in range(RECENT + 6):
        counts = counts.commit(step, 1.0 / (step + 1))
    counts = counts.commit(RECENT + 5, 0.5).commit(
        RECENT + 6
    )  # a replay; one that another stage knows the loss of
    merged = CLEAN.commit(RECENT + 6, 0.25).merge(counts)
    assert [step for step, _ in merged.recent] == list(range(7, RECENT + 7))
    assert merged.recent[-2:] == ((RECENT + 5, 0.5), (RECENT + 6, 0.25))


def test_a_job_that_went_far_back_tells_the_losses_of_the_steps_that_it_replays() -> None:
    counts = CLEAN
    for step in range(3 * RECENT):
        counts = counts.commit(step, 1.0)
    counts = counts.commit(RECENT, 1.0).commit(RECENT + 1, 1.0)
    assert counts.recent == ((RECENT, 1.0), (RECENT + 1, 1.0))


def test_an_attempt_is_discarded_once() -> None:
    counts = CLEAN.discard((1, 2)).discard((1, 2)).discard((1, 1))
    assert counts.discarded == 1
    assert counts.discard((2, 1)).discarded == 2


def test_who_counts_on_from_what_another_says_can_still_tell_it() -> None:
    most = 2**63 - 1
    said = RunStatistics(
        high=most, discarded=most, replayed=most, losses=most, recoveries=most, seconds=math.inf
    )
    counts = CLEAN.merge(said).commit(0).discard((1, 1)).lose().recover()
    assert build(RunStatistics, plain(counts)) == counts and math.isfinite(counts.seconds)
