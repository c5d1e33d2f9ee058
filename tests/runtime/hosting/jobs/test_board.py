"""What a peer knows of jobs: no word on one is displaced by an older one, and an end stays an end."""

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


def word(**changes: Any) -> JobRecord:
    made = JobRecord(
        job=JOB, name="work", kind="train", state="running", term=2, step=10, lead=OTHER, stages=2, snapshot=SNAPSHOT,
        snapshot_step=10, author=OTHER,
    )  # fmt: skip
    return replace(made, **changes)


def claim(term: int) -> ClaimRecord:
    return ClaimRecord(job=JOB, stage=0, peer=US, role="owner", term=term, score=1.0, step=0, load=0.0)


MANIFEST = Manifest(
    name="work", kind="serve", graph=Digest("1" * 64), cuts=(1,), weights=(Digest("2" * 64),) * 2,
    proposed=(PeerId(""),) * 2, serve=ServeConfig(cache="kv", max_sequence=16, vocabulary=32), author=Identity.generate().peer_id,
)  # fmt: skip


def test_an_older_word_never_displaces_a_newer_one() -> None:
    old = word()
    for newer in (
        replace(old, term=3, step=0, snapshot_step=0),
        replace(old, snapshot_step=20),
        replace(old, step=15),
        replace(old, state="done", step=9),
    ):
        for told in ((old, newer), (newer, old)):
            board = JobBoard(US)
            for record in told:
                board.update_from_directory([record], {old.job}, ())
            assert board.record(old.job) == newer


def test_an_end_that_was_heard_is_said_again_to_whoever_says_that_the_job_goes_on() -> None:
    done = word(state="done", lead=None)
    unaware = replace(done, state="running", term=1, step=4)
    board = JobBoard(US)
    board.update_from_directory([unaware], (), ())
    assert board.repeated == () and not board.over(unaware)
    board.end(JOB, 2, done)
    board.update_from_directory([done], (), ())
    assert board.repeated == () and board.over(unaware)  # somebody else says it
    board.update_from_directory([unaware], (), ())
    assert board.repeated == (done,)
    board.update_from_directory([done], (), ())
    assert board.repeated == ()
    again = replace(unaware, term=3)
    board.update_from_directory([again], (), ())  # it was taken up again
    assert board.repeated == () and not board.over(again)


def test_what_has_ended_before_our_eyes_stays_ended_whatever_others_say() -> None:
    board = JobBoard(US)
    board.conclude(word(term=1, step=80), FINAL, 1)
    ended = word(term=1, state="done", step=90, snapshot=LAST, snapshot_step=90, lead=US, author=US)
    assert board.repeated == (ended,) and board.final(JOB) == FINAL
    late = word(term=4, step=95, snapshot_step=20)
    assert board.over(late)
    board.update_from_directory([late], (), ())
    assert board.record(JOB) == ended  # whatever number somebody gives to what it says
    assert [record.state for record in board.repeated] == ["done"] and board.final(JOB) == FINAL


def test_an_end_that_we_led_the_job_to_is_said_when_the_stage_is_free() -> None:
    board = JobBoard(US)
    board.lead(claim(3), MANIFEST, word())
    assert board.changed() == () and board.leads(JOB)
    assert [(each.term, each.step, each.snapshot, each.lead) for each in board.led] == [(3, 10, SNAPSHOT, US)]
    board.update(JOB, FINAL)
    assert [record.state for record in board.changed()] == ["done"] and board.changed() == ()
    board.rest(JOB)
    assert not board.leads(JOB) and [(each.state, each.step) for each in board.repeated] == [("done", 90)]
    assert board.final(JOB) == FINAL and board.gone(JOB)


def test_how_a_job_failed_is_forgotten_once_it_is_taken_up_again() -> None:
    board = JobBoard(US)
    board.lead(claim(3), MANIFEST, None)
    failed = board.cut_short(JOB, "failed", "out of\nluck", replace(FINAL, state="running", step=40))
    assert (failed.state, failed.step, failed.message) == ("failed", 40, "out of luck")
    assert board.cut_short(JOB, "stopped", "too late") == failed
    board.rest(JOB)
    final = board.final(JOB)
    assert final is not None and (final.state, final.error, final.samples) == ("failed", "out of luck", 720)
    assert board.over(word(term=3)) and not board.over(word(term=4))
    board.update_from_directory([word(term=4)], (), ())
    assert board.final(JOB) is None and board.repeated == ()
    board.end(JOB, 4, word(term=4, state="failed"))
    board.update_from_directory([word(term=4, state="failed")], (), ())
    assert board.final(JOB) is None  # that it failed the second time we know from others


def test_what_lies_on_the_disk_is_needed_until_others_run_the_job_or_it_has_ended() -> None:
    board = JobBoard(US)
    board.remember(word())
    board.update_from_directory([word()], {JOB}, ())
    assert board.to_keep() == (word(),) and not board.gone(JOB)
    board.update_from_directory([word()], (), ())
    assert board.to_keep() == () and board.gone(JOB)  # another leads it, and we have nothing to do with it
    board.update_from_directory([word(lead=None)], (), ())
    assert not board.gone(JOB)
    board.update_from_directory([word(lead=None, state="done")], (), ())
    assert board.gone(JOB)


def test_the_oldest_ends_are_forgotten() -> None:
    board = JobBoard(US)
    jobs = [JobId(f"{number:064x}") for number in range(REMEMBERED_ENDS + 1)]
    for job in jobs:
        board.end(job, 1)
    assert not board.over(word(job=jobs[0], term=1)) and board.over(word(job=jobs[1], term=1))


states = st.sampled_from(["launching", "running", "done", "failed"])
heard = st.lists(
    st.builds(
        word, state=states, term=st.integers(0, 3), step=st.integers(0, 3), snapshot_step=st.integers(0, 3)
    )
)


@given(heard)
def test_the_board_believes_the_newest_of_what_it_heard(records: list[JobRecord]) -> None:
    board = JobBoard(US)
    best: JobRecord | None = None
    for record in records:
        board.update_from_directory([record], {JOB}, ())
        # It is told only what is to be believed: of an end also the word of an earlier lead.
        over = best is not None and best.state not in ENDED and record.state in ENDED
        best = record if best is None or over else max(best, record, key=job_order)
    assert board.record(JOB) == best


def test_the_blobs_of_a_job_are_needed_for_as_long_as_it_concerns_us() -> None:
    board, record = JobBoard(US), word()
    board.see({JOB: (record, MANIFEST)})
    assert board.needed_blobs() == frozenset()
    board.update_from_directory([record], {JOB}, ())
    assert board.needed_blobs() == {JOB, MANIFEST.graph, *MANIFEST.weights, SNAPSHOT}
    board.update_from_directory([replace(record, snapshot=LAST, snapshot_step=20)], {JOB}, ())
    assert LAST in board.needed_blobs() and SNAPSHOT not in board.needed_blobs()
    board.update_from_directory([record], (), ())
    assert board.needed_blobs() == frozenset()
