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
WORD = job_record(OTHER, state="launching")
JOB = WORD.job


def signed(record: JobRecord, said: JobRecord, signer: Identity, by: Identity | None = None) -> JobRecord:
    """The record with what `signer` says, or what `by` signs in its name."""
    statement = statement_of(said, signer.peer_id, 0)
    return replace(record, proof=(seal_statement(statement, (by or signer).sign),))


@pytest.mark.parametrize(
    "word, account",
    [
        (WORD, UNSIGNED),
        (signed(WORD, WORD, OTHER), UNSIGNED),
        (signed(WORD, WORD, AUTHOR, by=OTHER), UNSIGNED),
        (signed(WORD, replace(WORD, job=JobId("0" * 64)), AUTHOR), UNSIGNED),
        (signed(WORD, replace(WORD, state="running"), AUTHOR), UNSIGNED),
        (replace(WORD, author=AUTHOR.peer_id, state="running", lead=AUTHOR.peer_id), UNSIGNED),
        (replace(WORD, author=AUTHOR.peer_id), AUTHOR.peer_id),
        (signed(WORD, WORD, AUTHOR), AUTHOR.peer_id),
        (signed(replace(WORD, state="running", lead=OTHER.peer_id), WORD, AUTHOR), AUTHOR.peer_id),
    ],
    ids=[
        "no proof",
        "of another",
        "forged",
        "of another job",
        "of a peer that runs it",
        "its own word",
        "its own record",
        "its launch",
        "carried by the lead",
    ],
)
def test_a_job_is_its_author_s_once_the_author_has_signed(word: JobRecord, account: str) -> None:
    accounts = Accounts()
    assert accounts.of(JOB, AUTHOR.peer_id) == UNSIGNED
    accounts.record_launch(JOB, AUTHOR.peer_id, [word], verify)
    assert accounts.of(JOB, AUTHOR.peer_id) == accounts.whose(JOB, AUTHOR.peer_id).author == account
    assert accounts.of(JobId("1" * 64), AUTHOR.peer_id) == UNSIGNED


def test_whoever_signed_a_launch_answers_for_what_is_said_of_the_job() -> None:
    assert payer(WORD, verify) == OTHER.peer_id
    assert payer(signed(WORD, WORD, AUTHOR), verify) == AUTHOR.peer_id
    assert payer(signed(WORD, WORD, AUTHOR, by=OTHER), verify) == OTHER.peer_id
    running = replace(WORD, state="running")
    assert payer(signed(WORD, running, AUTHOR), verify) == OTHER.peer_id


def test_what_the_author_signed_is_carried_on_as_no_word_of_its_own() -> None:
    accounts = Accounts()
    running = replace(WORD, state="running", lead=OTHER.peer_id)
    assert accounts.carried(running) == running
    accounts.record_launch(JOB, AUTHOR.peer_id, [signed(WORD, WORD, AUTHOR)], verify)
    carried = accounts.carried(running)
    assert carried.proof and not open_statements(carried.proof, JOB, verify)
    assert accounts.carried(carried) == carried
    ended = replace(running, state="done")
    assert accounts.carried(ended) == ended
    later = Accounts()
    later.record_launch(JOB, AUTHOR.peer_id, [carried], verify)
    assert later.of(JOB, AUTHOR.peer_id) == AUTHOR.peer_id == payer(carried, verify)
    assert later.carried(running) == carried
