from __future__ import annotations

from itertools import pairwise
from typing import Any

from support.counted_checks import CountedChecks
from support.directory_records import JOB, digest

from fusion.swarm.authority.belief import OwnershipView
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.claims.owners_seen import CHAIN, REMEMBERED_SUCCESSORS, OwnersSeen
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.claims.votes import Vote, seal_vote, successions
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.identity import Identity

AUTHOR, ANN, BOB, CAT, DAN, MALLORY = (Identity.generate() for _ in range(6))
LAW = JobLaw(
    job=JOB, author=AUTHOR.peer_id, stages=3, steps=9, name="tiny", proposed=(ANN.peer_id, BOB.peer_id)
)


def claim(successor: Identity, voter: Identity, over: Identity, **changes: Any) -> ClaimRecord:
    """Of `successor` under term 2, since `voter` says that `over` is gone; `signer` signs that, where it is another."""
    job, stage = changes.get("job", JOB), changes.get("stage", 1)
    vote = Vote(voter=voter.peer_id, holding=Holding(over.peer_id, 1), at=7)
    vote = seal_vote(vote, job, stage, successor.peer_id, changes.get("signer", voter).sign)
    return ClaimRecord(
        job=job, stage=stage, peer=successor.peer_id, role="owner", term=2, score=0.5, step=0, load=0.0, proof=(b"junk", vote)
    )  # fmt: skip


def shown(*claims: ClaimRecord) -> list[bytes]:
    return [data for each in claims for data in successions(each)]


def view(
    seen: OwnersSeen, *proof: bytes, law: JobLaw | None = LAW, live: tuple[ClaimRecord, ...] = ()
) -> OwnershipView:
    return seen.ownership_view(JOB, law, 3, {1: live}, DAN.peer_id, shown=([b"junk", *proof],))


def test_who_follows_by_the_word_of_those_proposed_and_of_others_who_so_followed() -> None:
    seen = OwnersSeen()
    first, second = claim(CAT, ANN, BOB), claim(DAN, CAT, ANN, stage=0)
    assert view(seen, *shown(second)).successors == frozenset()  # nobody knows who spoke for it
    assert view(seen, *shown(second, first)).successors == {CAT.peer_id, DAN.peer_id}
    assert view(seen).successors == {CAT.peer_id, DAN.peer_id}  # what was shown once is kept
    assert seen.chain(JOB, CAT.peer_id) == tuple(shown(first))
    assert seen.chain(JOB, DAN.peer_id) == tuple(shown(second, first))
    assert seen.chain(JOB, ANN.peer_id) == () and seen.chain(JobId(digest("other")), CAT.peer_id) == ()
    again = OwnersSeen()
    assert view(again, *seen.chain(JOB, DAN.peer_id)).successors == {CAT.peer_id, DAN.peer_id}


def test_the_claim_of_a_live_owner_shows_whom_it_followed() -> None:
    seen, first = OwnersSeen(), claim(CAT, ANN, BOB)
    assert view(seen, live=(first,)).successors == {CAT.peer_id}
    assert seen.chain(JOB, CAT.peer_id) == tuple(shown(first))


def test_a_stranger_follows_nobody_by_its_own_word_or_by_one_for_another() -> None:
    seen = OwnersSeen()
    own = claim(MALLORY, MALLORY, BOB)
    forged = claim(MALLORY, ANN, BOB, signer=MALLORY)
    other_job = claim(MALLORY, ANN, BOB, job=JobId(digest("other")))
    # A succession of another, or in another stage, with its own name put in.
    [succession] = shown(claim(CAT, ANN, BOB))
    stolen = succession.replace(CAT.peer_id.encode(), MALLORY.peer_id.encode())
    moved = succession.replace(b"\x97\x01", b"\x97\x02", 1)
    assert stolen != succession != moved
    for each in (*shown(own), *shown(forged), *shown(other_job), stolen, moved, succession[:-1]):
        assert view(seen, each).successors == frozenset()
    assert view(seen, *shown(claim(CAT, ANN, BOB)), law=None).successors == frozenset()


def test_no_more_heirs_are_kept_of_a_job_and_no_more_shown_than_a_record_has_room_for() -> None:
    seen, line = OwnersSeen(), [ANN, *(Identity.generate() for _ in range(REMEMBERED_SUCCESSORS + 4))]
    claims = [claim(successor, voter, BOB) for voter, successor in pairwise(line)]
    found = view(seen, *shown(*claims)).successors
    assert found == {one.peer_id for one in line[1 : REMEMBERED_SUCCESSORS + 1]}
    assert len(seen.chain(JOB, line[REMEMBERED_SUCCESSORS].peer_id)) == CHAIN


def test_who_carries_a_forged_succession_is_not_heard_further_and_costs_one_check() -> None:
    checks = CountedChecks()

    strangers = [Identity.generate() for _ in range(50)]
    forged = [shown(*(claim(one, ANN, BOB, signer=one, stage=i) for i in range(3))) for one in strangers]
    of_nobody = shown(*(claim(one, one, BOB) for one in strangers))
    honest = shown(claim(CAT, ANN, BOB))
    seen = OwnersSeen()
    for _ in range(3):
        proofs = [*([*each, *honest] for each in forged), of_nobody]
        assert (
            seen.ownership_view(JOB, LAW, 3, {}, DAN.peer_id, shown=proofs, verify=checks.verify).successors
            == frozenset()
        )
        assert checks.signers == [ANN.peer_id] * len(forged)  # of each once, and never again
    assert seen.ownership_view(
        JOB, LAW, 3, {}, DAN.peer_id, shown=[honest], verify=checks.verify
    ).successors == {CAT.peer_id}
