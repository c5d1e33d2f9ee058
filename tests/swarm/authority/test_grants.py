from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.authority.grants import ROLES, Grant, Role, open_grant, refusal, seal_grant
from fusion.swarm.authority.law import Admission, JobLaw
from fusion.swarm.directory.records import MAX_GRANT_BYTES, JobId
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity

AUTHOR, ROOT, ALICE, BOB, MALLORY = (Identity.generate() for _ in range(5))
JOB, OTHER = JobId("1" * 64), JobId("2" * 64)
LAW = JobLaw(
    job=JOB, author=AUTHOR.peer_id, stages=8, admission=Admission(kind="granted", roots=(ROOT.peer_id,))
)
NOW = 1_000_000.0


def grant(issuer: Identity, subject: Identity, **changes: Any) -> Grant:
    made = Grant(
        job=JOB, issuer=issuer.peer_id, subject=subject.peer_id, roles=ROLES, stages=(0, 7), valid_from=999_000,
        valid_until=1_001_000, delegates=True,
    )  # fmt: skip
    return replace(made, **changes)


def given_by(issuer: Identity, subject: Identity, **changes: Any) -> bytes:
    return seal_grant(grant(issuer, subject, **changes), issuer)


def refused(
    chain: list[bytes], who: Identity, role: Role = "own", stage: int | None = 3, now: float = NOW
) -> str | None:
    return refusal(LAW, chain, who.peer_id, role, stage, now)


def test_an_open_job_is_for_everybody_and_a_listed_one_for_those_that_it_names() -> None:
    is_open = replace(LAW, admission=Admission())
    listed = replace(LAW, admission=Admission(kind="listed", peers=(ALICE.peer_id,)))
    for role in ROLES:
        assert refusal(is_open, (), MALLORY.peer_id, role, 0, NOW) is None
        assert refusal(listed, (), ALICE.peer_id, role, 0, NOW) is None
        assert refusal(listed, (), AUTHOR.peer_id, role, None, NOW) is None
        assert "listed" in str(refusal(listed, (given_by(AUTHOR, MALLORY),), MALLORY.peer_id, role, 0, NOW))


def test_a_grant_is_about_two_hundred_bytes_and_comes_back_as_it_was() -> None:
    made = grant(AUTHOR, ALICE)
    data = seal_grant(made, AUTHOR)
    assert len(data) <= 250 <= MAX_GRANT_BYTES and open_grant(data) == made
    with pytest.raises(RecordError, match="cannot be signed"):
        seal_grant(made, MALLORY)


def test_a_chain_admits_whom_it_ends_with_and_begins_with_a_root() -> None:
    for root in (AUTHOR, ROOT):
        chain = [given_by(root, ALICE), given_by(ALICE, BOB)]
        assert refused(chain[:1], ALICE) is None and refused(chain, BOB) is None
        assert refused([], root) is None
        assert "somebody else's" in str(refused(chain, MALLORY)) and "somebody else's" in str(
            refused(chain, ALICE)
        )
    assert "with a grant" in str(refused([], ALICE))
    assert "may give none" in str(refused([given_by(MALLORY, ALICE)], ALICE))
    three = [given_by(AUTHOR, ALICE), given_by(ALICE, BOB), given_by(BOB, MALLORY)]
    assert "with a grant" in str(refused(three, MALLORY))
    closed = [given_by(AUTHOR, ALICE, delegates=False), given_by(ALICE, BOB)]
    assert "passed on" in str(refused(closed, BOB))
    stolen = [given_by(AUTHOR, ALICE), given_by(MALLORY, BOB)]
    assert "passed on" in str(refused(stolen, BOB))


NARROW: dict[str, Any] = {
    "for another job": {"job": OTHER},
    "not to own": {"roles": ("read", "ask")},
    "not for stage 3": {"stages": (4, 7)},
    "expired": {"valid_until": 999_999},
    "not valid yet": {"valid_from": 1_000_500},
}


@pytest.mark.parametrize("reason", NARROW)
def test_every_link_must_allow_what_is_asked(reason: str) -> None:
    for first, second in ((NARROW[reason], {}), ({}, NARROW[reason])):
        chain = [given_by(AUTHOR, ALICE, **first), given_by(ALICE, BOB, **second)]
        assert reason in str(refused(chain, BOB))


@given(st.data())
def test_a_second_link_never_widens_the_first(data: st.DataObject) -> None:
    def drawn(issuer: Identity, subject: Identity) -> Grant:
        first, last = sorted((data.draw(st.integers(0, 7)), data.draw(st.integers(0, 7))))
        since = data.draw(st.integers(999_990, 1_000_009))
        return grant(
            issuer, subject, roles=tuple(data.draw(st.sets(st.sampled_from(ROLES), min_size=1))), stages=(first, last),
            valid_from=since, valid_until=since + data.draw(st.integers(1, 20)), delegates=data.draw(st.booleans()),
        )  # fmt: skip

    one, two = drawn(AUTHOR, ALICE), drawn(ALICE, BOB)
    chain = [seal_grant(one, AUTHOR), seal_grant(two, ALICE)]
    role, stage = data.draw(st.sampled_from(ROLES)), data.draw(st.integers(0, 7))
    now = data.draw(st.floats(999_980, 1_000_030))
    alone = refusal(LAW, chain[:1], ALICE.peer_id, role, stage, now) is None
    passed_on = refusal(LAW, chain, BOB.peer_id, role, stage, now) is None
    assert passed_on == (alone and one.delegates and two.refusal(JOB, role, stage, now) is None)


@given(st.data())
def test_a_changed_byte_admits_nobody(data: st.DataObject) -> None:
    good = given_by(AUTHOR, ALICE)
    at, bit = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 7))
    bad = good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
    assert refused([bad], ALICE) is not None


@given(
    st.binary(max_size=300)
    | st.recursive(st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text(), st.lists).map(msgpack.packb)
)
def test_nonsense_is_no_grant(data: bytes) -> None:
    with pytest.raises(RecordError):
        open_grant(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"roles": ()},
        {"roles": ("king",)},
        {"stages": (3, 2)},
        {"stages": (-1, 2)},
        {"valid_until": 999_000},
        {"job": "x"},
    ],
)
def test_a_grant_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        grant(AUTHOR, ALICE, **changes)
