"""What a peer knows of jobs: no record of one is displaced by an older one, and an end stays an end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fusion.runtime.hosting.jobs.board import REMEMBERED_ENDS, JobBoard
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.job.progress import Progress
from fusion.swarm.directory.job_order import ENDED, job_order
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId

US, OTHER = Identity.generate().peer_id, Identity.generate().peer_id
JOB, SNAPSHOT, LAST = JobId("a" * 64), Digest("5" * 64), Digest("6" * 64)
FINAL = Progress(
    job=JOB, state="done", step=90, steps=90, loss=1.5, recent=((88, 1.6), (89, 1.5)), samples=720, ledger="7" * 64,
    snapshot=LAST, snapshot_step=90,
)  # fmt: skip


def job_record(**changes: Any) -> JobRecord:
    record = JobRecord(
        job=JOB, name="work", kind="train", state="running", term=2, step=10, lead=OTHER, stages=2, snapshot=SNAPSHOT,
        snapshot_step=10, author=OTHER,
    )  # fmt: skip
    return replace(record, **changes)


def claim(term: int) -> ClaimRecord:
    return ClaimRecord(job=JOB, stage=0, peer=US, role="owner", term=term, score=1.0, step=0, load=0.0)


MANIFEST = Manifest(
    name="work", kind="serve", graph=Digest("1" * 64), cuts=(1,), weights=(Digest("2" * 64),) * 2,
    proposed=(PeerId(""),) * 2, serve=ServeConfig(cache="kv", max_sequence=16, vocabulary=32), author=Identity.generate().peer_id,
)  # fmt: skip


def test_an_older_record_never_displaces_a_newer_one() -> None:
    old = job_record()
    for newer in (
        replace(old, term=3, step=0, snapshot_step=0),
        replace(old, snapshot_step=20),
        replace(old, step=15),
        replace(old, state="done", step=9),
    ):
        for records in ((old, newer), (newer, old)):
            board = JobBoard(US)
            for record in records:
                board.update_from_directory([record], {old.job}, ())
            assert board.record(old.job) == newer


def test_a_known_end_is_republished_while_a_record_states_that_the_job_goes_on() -> None:
    done = job_record(state="done", lead=None)
    unaware = replace(done, state="running", term=1, step=4)
    board = JobBoard(US)
    board.update_from_directory([unaware], (), ())
    assert board.republished == () and not board.over(unaware)
    board.end(JOB, 2, done)
    board.update_from_directory([done], (), ())
    assert board.republished == () and board.over(unaware)  # another peer publishes it
    board.update_from_directory([unaware], (), ())
    assert board.republished == (done,)
    board.update_from_directory([done], (), ())
    assert board.republished == ()
    again = replace(unaware, term=3)
    board.update_from_directory([again], (), ())  # it was taken up again
    assert board.republished == () and not board.over(again)


def test_an_end_that_was_seen_here_stays_whatever_others_publish() -> None:
    board = JobBoard(US)
    board.conclude(job_record(term=1, step=80), FINAL, 1)
    ended = job_record(term=1, state="done", step=90, snapshot=LAST, snapshot_step=90, lead=US, author=US)
    assert board.republished == (ended,) and board.final(JOB) == FINAL
    late = job_record(term=4, step=95, snapshot_step=20)
    assert board.over(late)
    board.update_from_directory([late], (), ())
    assert board.record(JOB) == ended  # whatever term the other record has
    assert [record.state for record in board.republished] == ["done"] and board.final(JOB) == FINAL


def test_an_end_that_we_led_the_job_to_is_published_when_the_stage_is_free() -> None:
    board = JobBoard(US)
    board.lead(claim(3), MANIFEST, job_record())
    assert board.changed() == () and board.leads(JOB)
    assert [(each.term, each.step, each.snapshot, each.lead) for each in board.led] == [(3, 10, SNAPSHOT, US)]
    board.update(JOB, FINAL)
    assert [record.state for record in board.changed()] == ["done"] and board.changed() == ()
    board.stop_leading(JOB)
    assert not board.leads(JOB) and [(each.state, each.step) for each in board.republished] == [("done", 90)]
    assert board.final(JOB) == FINAL and board.gone(JOB)


def test_how_a_job_failed_is_forgotten_once_it_is_taken_up_again() -> None:
    board = JobBoard(US)
    board.lead(claim(3), MANIFEST, None)
    failed = board.cut_short(JOB, "failed", "out of\nluck", replace(FINAL, state="running", step=40))
    assert (failed.state, failed.step, failed.message) == ("failed", 40, "out of luck")
    assert board.cut_short(JOB, "stopped", "too late") == failed
    board.stop_leading(JOB)
    final = board.final(JOB)
    assert final is not None and (final.state, final.error, final.samples) == ("failed", "out of luck", 720)
    assert board.over(job_record(term=3)) and not board.over(job_record(term=4))
    board.update_from_directory([job_record(term=4)], (), ())
    assert board.final(JOB) is None and board.republished == ()
    board.end(JOB, 4, job_record(term=4, state="failed"))
    board.update_from_directory([job_record(term=4, state="failed")], (), ())
    assert board.final(JOB) is None  # we know the second failure from others only


def test_what_lies_on_the_disk_is_needed_until_others_run_the_job_or_it_has_ended() -> None:
    board = JobBoard(US)
    board.remember(job_record())
    board.update_from_directory([job_record()], {JOB}, ())
    assert board.to_keep() == (job_record(),) and not board.gone(JOB)
    board.update_from_directory([job_record()], (), ())
    assert board.to_keep() == () and board.gone(JOB)  # another leads it, and we have nothing to do with it
    board.update_from_directory([job_record(lead=None)], (), ())
    assert not board.gone(JOB)
    board.update_from_directory([job_record(lead=None, state="done")], (), ())
    assert board.gone(JOB)


def test_the_oldest_ends_are_forgotten() -> None:
    board = JobBoard(US)
    jobs = [JobId(f"{number:064x}") for number in range(REMEMBERED_ENDS + 1)]
    for job in jobs:
        board.end(job, 1)
    assert not board.over(job_record(job=jobs[0], term=1)) and board.over(job_record(job=jobs[1], term=1))


states = st.sampled_from(["launching", "running", "done", "failed"])
received = st.lists(
    st.builds(
        job_record,
        state=states,
        term=st.integers(0, 3),
        step=st.integers(0, 3),
        snapshot_step=st.integers(0, 3),
    )
)


@given(received)
def test_the_board_believes_the_newest_record_it_received(records: list[JobRecord]) -> None:
    board = JobBoard(US)
    best: JobRecord | None = None
    for record in records:
        board.update_from_directory([record], {JOB}, ())
        # It gets only believed records: of an end also one from an earlier lead.
        over = best is not None and best.state not in ENDED and record.state in ENDED
        best = record if best is None or over else max(best, record, key=job_order)
    assert board.record(JOB) == best


def test_the_blobs_of_a_job_are_needed_for_as_long_as_it_concerns_us() -> None:
    board, record = JobBoard(US), job_record()
    board.set_open({JOB: (record, MANIFEST)})
    assert board.needed_blobs() == frozenset()
    board.update_from_directory([record], {JOB}, ())
    assert board.needed_blobs() == {JOB, MANIFEST.graph, *MANIFEST.weights, SNAPSHOT}
    board.update_from_directory([replace(record, snapshot=LAST, snapshot_step=20)], {JOB}, ())
    assert LAST in board.needed_blobs() and SNAPSHOT not in board.needed_blobs()
    board.update_from_directory([record], (), ())
    assert board.needed_blobs() == frozenset()
