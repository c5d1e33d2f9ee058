"""Whom a job is charged to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.directory_records import job_record

from fusion.runtime.device.accounts import UNSIGNED, Accounts, payer
from fusion.swarm.authority.statements import open_statements, seal_statement, statement_of
from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.identity import Identity, verify

AUTHOR, OTHER = Identity.generate(), Identity.generate()
RECORD = job_record(OTHER, state="launching")
JOB = RECORD.job


def signed(record: JobRecord, state: JobRecord, signer: Identity, by: Identity | None = None) -> JobRecord:
    """The record with what `signer` says, or what `by` signs in its name."""
    statement = statement_of(state, signer.peer_id, 0)
    return replace(record, proof=(seal_statement(statement, (by or signer).sign),))


@pytest.mark.parametrize(
    "record, account",
    [
        (RECORD, UNSIGNED),
        (signed(RECORD, RECORD, OTHER), UNSIGNED),
        (signed(RECORD, RECORD, AUTHOR, by=OTHER), UNSIGNED),
        (signed(RECORD, replace(RECORD, job=JobId("0" * 64)), AUTHOR), UNSIGNED),
        (signed(RECORD, replace(RECORD, state="running"), AUTHOR), UNSIGNED),
        (replace(RECORD, author=AUTHOR.peer_id, state="running", lead=AUTHOR.peer_id), UNSIGNED),
        (replace(RECORD, author=AUTHOR.peer_id), AUTHOR.peer_id),
        (signed(RECORD, RECORD, AUTHOR), AUTHOR.peer_id),
        (signed(replace(RECORD, state="running", lead=OTHER.peer_id), RECORD, AUTHOR), AUTHOR.peer_id),
    ],
    ids=[
        "no proof",
        "of another",
        "forged",
        "of another job",
        "of a peer that runs it",
        "its own running record",
        "its own record",
        "its launch",
        "carried by the lead",
    ],
)
def test_a_job_is_its_author_s_once_the_author_has_signed(record: JobRecord, account: str) -> None:
    accounts = Accounts()
    assert accounts.of(JOB, AUTHOR.peer_id) == UNSIGNED
    accounts.record_launch(JOB, AUTHOR.peer_id, [record], verify)
    assert accounts.of(JOB, AUTHOR.peer_id) == accounts.caller(JOB, AUTHOR.peer_id).author == account
    assert accounts.of(JobId("1" * 64), AUTHOR.peer_id) == UNSIGNED


def test_whoever_signed_a_launch_answers_for_what_is_said_of_the_job() -> None:
    assert payer(RECORD, verify) == OTHER.peer_id
    assert payer(signed(RECORD, RECORD, AUTHOR), verify) == AUTHOR.peer_id
    assert payer(signed(RECORD, RECORD, AUTHOR, by=OTHER), verify) == OTHER.peer_id
    running = replace(RECORD, state="running")
    assert payer(signed(RECORD, running, AUTHOR), verify) == OTHER.peer_id


def test_what_the_author_signed_is_carried_on_as_no_word_of_its_own() -> None:
    accounts = Accounts()
    running = replace(RECORD, state="running", lead=OTHER.peer_id)
    assert accounts.carried(running) == running
    accounts.record_launch(JOB, AUTHOR.peer_id, [signed(RECORD, RECORD, AUTHOR)], verify)
    carried = accounts.carried(running)
    assert carried.proof and not open_statements(carried.proof, JOB, verify)
    assert accounts.carried(carried) == carried
    ended = replace(running, state="done")
    assert accounts.carried(ended) == ended
    later = Accounts()
    later.record_launch(JOB, AUTHOR.peer_id, [carried], verify)
    assert later.of(JOB, AUTHOR.peer_id) == AUTHOR.peer_id == payer(carried, verify)
    assert later.carried(running) == carried
