from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.directory_records import claim_record
from support.examples import examples

from fusion.swarm.claims.election import (
    HEAD_START_SECONDS,
    latest,
    should_claim,
    successors,
    winner,
)
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.identity import Identity

PEERS = [Identity.generate() for _ in range(5)]


@st.composite
def claim_sets(draw: st.DrawFn) -> list[ClaimRecord]:
    """At most one claim per peer, as the directory keeps them."""
    peers = draw(st.lists(st.sampled_from(PEERS), unique=True, max_size=5))
    return [
        claim_record(
            peer,
            role=draw(st.sampled_from(["owner", "replica", "standby", "released"])),
            term=draw(st.integers(0, 4)),
            score=draw(st.sampled_from([0.2, 0.5, 1.0])),
        )
        for peer in peers
    ]


@given(claim_sets(), st.permutations(range(5)))
@settings(max_examples=examples(100))
def test_everyone_who_sees_the_same_claims_elects_the_same(
    claims: list[ClaimRecord], order: list[int]
) -> None:
    shuffled = [claims[at] for at in order if at < len(claims)]
    assert successors(shuffled) == successors(claims)
    best = winner(claims)
    assert best == winner(shuffled)
    owners = [claim for claim in claims if claim.role == "owner"]
    if best is None:
        assert not owners
    else:
        assert best in owners
        assert all((claim.term, claim.score) <= (best.term, best.score) for claim in owners)


def test_equal_scores_spread_over_peers() -> None:
    winners = set()
    for stage in range(64):
        best = winner(claim_record(peer, stage=stage) for peer in PEERS)
        assert best is not None
        winners.add(best.peer)
    assert len(winners) == len(PEERS)


def test_an_owned_stage_is_left_alone() -> None:
    claims = [claim_record(PEERS[0], score=0.1)]
    assert not should_claim(claims, PEERS[1].peer_id, score=1.0, vacant_seconds=1e9)


def test_a_vacant_stage_goes_to_the_proposed_peer_then_the_best_standby_then_anyone() -> None:
    me, other = PEERS[0].peer_id, PEERS[1]
    assert should_claim([], me, score=1.0, vacant_seconds=0)
    assert not should_claim([], me, score=0.5, vacant_seconds=0)
    assert should_claim([], me, score=0.5, vacant_seconds=HEAD_START_SECONDS)
    mine = claim_record(PEERS[0], role="standby", step=10, score=0.1)
    theirs = claim_record(other, role="standby", step=9, score=0.9)
    assert should_claim([mine, theirs], me, score=0.5, vacant_seconds=0)
    assert not should_claim([mine, theirs], other.peer_id, score=0.5, vacant_seconds=0)
    released = claim_record(other, role="released")
    assert should_claim([released], me, score=1.0, vacant_seconds=0)


def test_standbys_follow_each_other_a_heartbeat_apart_the_ready_ones_first() -> None:
    cold = claim_record(PEERS[0], role="standby", step=50, score=0.9)
    old = claim_record(PEERS[1], role="standby", step=10, score=0.9, ready=True)
    best = claim_record(PEERS[2], role="standby", step=20, score=0.1, ready=True)
    claims = [cold, old, best, claim_record(PEERS[3], role="released")]
    assert successors(claims) == (best, old, cold)
    for place, claim in enumerate(successors(claims)):
        turn = place * HEARTBEAT_SECONDS
        assert should_claim(claims, claim.peer, score=0.5, vacant_seconds=turn)
        assert place == 0 or not should_claim(claims, claim.peer, score=0.5, vacant_seconds=turn - 0.1)
    busy = claim_record(PEERS[3], role="standby", step=90, score=0.9, ready=True, load=1.0)
    assert successors([busy, *claims]) == (best, old, cold, busy)  # it owns stages already
    stranger = PEERS[4].peer_id
    assert not should_claim(claims, stranger, score=0.5, vacant_seconds=2 * HEARTBEAT_SECONDS)


def test_of_two_claims_of_one_peer_the_later_counts() -> None:
    shown = claim_record(PEERS[0], term=3)
    assert latest(None, shown) == shown
    assert latest(claim_record(PEERS[0], term=2), shown) == shown
    for later in (
        claim_record(PEERS[0], term=3, step=9),
        claim_record(PEERS[0], term=3, role="released"),
        claim_record(PEERS[0], term=3, role="standby"),
        claim_record(PEERS[0], term=5),
    ):
        assert latest(later, shown) == later


def test_a_replica_is_the_best_heir() -> None:
    standby = claim_record(PEERS[0], role="standby", ready=True, score=0.9, step=5)
    replica = claim_record(PEERS[1], role="replica", ready=True, score=0.1, step=5, load=3.0)
    busy = claim_record(PEERS[2], role="standby", ready=True, score=0.9, step=5, load=1.0)
    loading = claim_record(PEERS[3], role="standby", score=0.9, step=5)
    assert successors([loading, busy, standby, replica]) == (replica, standby, loading, busy)
    assert winner([replica, standby]) is None
