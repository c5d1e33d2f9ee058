"""One order of the records of a job, for readers of the directory and for peers that repeat them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.directory_records import digest, job_record

from fusion.swarm.directory.job_order import ENDED, job_order, newest_jobs
from fusion.swarm.directory.records import JobRecord
from fusion.swarm.identity import Identity

ALICE, BOB = Identity.generate(), Identity.generate()
peers = st.sampled_from([ALICE.peer_id, BOB.peer_id])
small = st.integers(0, 3)
records = st.builds(
    lambda **changes: replace(job_record(ALICE), **changes),
    state=st.sampled_from(["launching", "running", "done", "stopped", "failed"]),
    term=small,
    step=small,
    lead=st.none() | peers,
    snapshot=st.none() | st.sampled_from([digest("one"), digest("two")]),
    snapshot_step=st.integers(-1, 3),
    message=st.sampled_from(["", "waiting"]),
    author=peers,
)


def record_of(**changes: Any) -> JobRecord:
    return replace(job_record(ALICE), **changes)


@given(records, records, records)
def test_it_is_a_total_order(a: JobRecord, b: JobRecord, c: JobRecord) -> None:
    assert (job_order(a) == job_order(b)) == (a == b)  # of distinct records one is newer
    assert (job_order(a) < job_order(b)) == (job_order(b) > job_order(a))
    if job_order(a) <= job_order(b) <= job_order(c):
        assert job_order(a) <= job_order(c)


@given(records, records)
def test_a_higher_term_wins(a: JobRecord, b: JobRecord) -> None:
    if a.term > b.term:
        assert newest_jobs([a, b]) == newest_jobs([b, a]) == (a,)


@given(records, records)
def test_an_end_is_never_beaten_by_a_job_that_goes_on_under_the_same_term(a: JobRecord, b: JobRecord) -> None:
    b = replace(b, term=a.term)
    if a.state in ENDED and b.state not in ENDED:
        assert newest_jobs([a, b]) == newest_jobs([b, a]) == (a,)


@given(records, records)
def test_a_snapshot_is_not_forgotten(a: JobRecord, b: JobRecord) -> None:
    b = replace(b, term=a.term, state=a.state)
    assert newest_jobs([a, b])[0].snapshot_step == max(a.snapshot_step, b.snapshot_step)


def test_done_at_step_99_beats_running_at_step_100() -> None:
    """The lead restored a snapshot before it ended, or an owner that repeats the end knows the last step but one."""
    running, done = record_of(state="running", step=100), record_of(state="done", step=99, author=BOB.peer_id)
    assert newest_jobs([running, done]) == newest_jobs([done, running]) == (done,)
