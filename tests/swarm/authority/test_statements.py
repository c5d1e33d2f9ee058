from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.authority.statements import (
    CARRIED,
    STATES,
    Statement,
    latest_statements,
    open_statement,
    open_statements,
    seal_statement,
    stop_statement,
)
from fusion.swarm.directory.records import MAX_PROOF_BYTES, MAX_TERM, Digest, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity

ALICE, MALLORY = Identity.generate(), Identity.generate()
MANY = [Identity.generate() for _ in range(CARRIED + 3)]
JOB, OTHER = JobId("1" * 64), JobId("2" * 64)

statements = st.builds(
    Statement, job=st.just(JOB), state=st.sampled_from(STATES), term=st.integers(0, MAX_TERM),
    step=st.integers(0, 2**53), snapshot=st.sampled_from([None, Digest("5" * 64)]),
    snapshot_step=st.integers(-1, 2**53), signer=st.just(ALICE.peer_id), at=st.integers(0, 2**40),
)  # fmt: skip


@given(statements)
def test_a_statement_comes_back_as_it_was_and_has_its_signers_name_alone(statement: Statement) -> None:
    data = seal_statement(statement, ALICE.sign)
    assert open_statement(data) == statement and len(data) <= 260 <= MAX_PROOF_BYTES
    with pytest.raises(RecordError, match="signature"):
        open_statement(seal_statement(statement, MALLORY.sign))


@given(statements, st.integers(0, 9), st.integers(0, 7))
def test_whatever_is_changed_in_a_statement_makes_it_none(statement: Statement, field: int, bit: int) -> None:
    fields = msgpack.unpackb(seal_statement(statement, ALICE.sign))
    before = fields[field]
    match before:
        case int():
            fields[field] = before ^ 1 << bit
        case bytes():
            fields[field] = bytes([before[0] ^ 1 << bit]) + before[1:]
        case str():
            fields[field] = MALLORY.peer_id
        case None:
            fields[field] = b"5" * 32
    assert open_statements([msgpack.packb(fields)], JOB) == []


@given(st.binary(max_size=600))
def test_bytes_that_are_no_statement_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        open_statement(data)


def test_a_proof_carries_the_latest_of_each_signer_the_ends_first_and_no_more_than_fit() -> None:
    statement = stop_statement(JOB, ALICE.peer_id, 5)
    running = replace(statement, state="running", term=3, at=6)
    of_alice = [seal_statement(each, ALICE.sign) for each in (running, replace(running, at=7), statement)]
    others = [seal_statement(replace(running, signer=one.peer_id), one.sign) for one in MANY]
    foreign = seal_statement(replace(statement, job=OTHER), ALICE.sign)
    found = latest_statements([*others, *of_alice, foreign, b"none"], JOB)
    assert found[0] == of_alice[2] and len(found) == CARRIED and set(found[1:]) <= set(others)
