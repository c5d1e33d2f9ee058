from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.directory_records import JOB
from support.examples import examples
from support.operations import operations

from fusion.swarm.claims.election import rank
from fusion.swarm.claims.tenure import (
    CONTEST_SECONDS,
    MAX_VOTING_STAGES,
    NEVER,
    ROUNDS,
    SPARE_TERMS,
    VOTE_SECONDS,
    Holding,
    Seat,
    Tenure,
    View,
    ceiling,
    count,
    is_majority,
    is_majority_to_all,
    seats,
    settle,
    voting_stages,
)
from fusion.swarm.directory.records import MAX_TERM, ClaimRecord
from fusion.swarm.transport import PeerId

PEERS = [PeerId(name) for name in ("ann", "bob", "cat", "dan", "eve")]
LEASE = 6.0
NOBODY: frozenset[tuple[PeerId, Holding]] = frozenset()


def claim(
    peer: str, term: int, *, role: str = "owner", score: float = 0.5, until: float = LEASE
) -> ClaimRecord:
    return ClaimRecord(
        job=JOB, stage=1, peer=PeerId(peer), role=role, term=term, score=score, step=0, load=0.0, expires_at=until  # type: ignore[arg-type]
    )  # fmt: skip


def view(
    now: float,
    proven: Collection[tuple[PeerId, Holding]] = NOBODY,
    *,
    highest: int = 1000,
    alone: bool = False,
    votes: Mapping[str, int] | None = None,
) -> View:
    """`proven`: whose claims prove that who held the stage is gone; `votes`: how many voters say so for each peer."""
    return View(
        proves=lambda claim, holding: (claim.peer, holding) in proven,
        votes=lambda claim, holding: (votes or {}).get(claim.peer, 0),
        now=now,
        ceiling=highest,
        alone=alone,
    )


def held(peer: str = "ann", term: int = 5, *, since: float = -100.0, until: float = LEASE) -> Tenure:
    return Tenure(claim=claim(peer, term, until=until), since=since, until=until, floor=term - 1)


def owner(tenure: Tenure | None) -> Holding | None:
    return None if tenure is None else tenure.holding


ANN = Holding(PeerId("ann"), 5)


def test_over_a_live_tenure_only_a_proof_counts() -> None:
    thief = claim("eve", 6)
    assert owner(settle(held(), [claim("ann", 5), thief], view(1.0))) == ANN
    assert owner(settle(held(), [claim("ann", 5), thief], view(1.0, {(PeerId("eve"), ANN)}))) == ("eve", 6)
    # A proof over another holder or another term of it is none.
    for other in (Holding(PeerId("ann"), 4), Holding(PeerId("bob"), 5)):
        assert owner(settle(held(), [thief], view(1.0, {(PeerId("eve"), other)}))) == ANN
    # Not one that is far above, or not above at all.
    for term in (4, 5, 5 + ROUNDS + 1, MAX_TERM - 1):
        assert owner(settle(held(), [claim("eve", term)], view(1.0, {(PeerId("eve"), ANN)}))) == ANN


def test_a_lease_that_ran_out_needs_no_proof_but_a_higher_term_below_the_ceiling() -> None:
    late = LEASE + 0.1
    assert owner(settle(held(), [claim("eve", 6, until=20.0)], view(late))) == ("eve", 6)
    assert owner(settle(held(), [claim("eve", 41, until=20.0)], view(late, highest=40))) == ANN
    for term in (1, 4, 5):  # whoever was away for long does not come back below
        assert owner(settle(held(), [claim("eve", term, until=20.0)], view(late))) == ANN
    # A renewal that comes late, before anybody followed, comes in time.
    renewed = settle(held(), [claim("ann", 5, until=11.0), claim("eve", 6, until=20.0)], view(late))
    assert renewed is not None and renewed.holding == ANN and renewed.lives(late)


def test_who_gives_the_stage_up_says_so_itself() -> None:
    for role in ("released", "standby", "replica"):
        given_up = settle(held(), [claim("ann", 5, role=role)], view(1.0))
        assert given_up is not None and not given_up.lives(1.0)
        # What the directory still has of its claim does not bring it back.
        again = settle(given_up, [claim("ann", 5)], view(1.1))
        assert again is not None and not again.lives(1.1)
        followed = settle(given_up, [claim("bob", 6)], view(1.1))
        assert followed is not None and followed.settled and followed.holding == ("bob", 6)
    assert owner(settle(held(), [claim("ann", 4, role="released")], view(1.0))) == ANN
    assert settle(held(), [claim("ann", 4, role="released")], view(1.0)).lives(1.0)  # type: ignore[union-attr]


def test_contenders_of_one_right_go_by_rank_for_a_while() -> None:
    first = settle(held(), [claim("bob", 6, until=20.0)], view(7.0))
    assert first is not None and not first.settled
    rival = claim("cat", 7, until=20.0)
    assert owner(settle(first, [rival], view(7.5))) == ("cat", 7)
    assert owner(settle(first, [claim("cat", 6 + ROUNDS, until=20.0)], view(7.5))) == ("bob", 6)
    # Borne out by a majority, it is contested for CONTEST_SECONDS only.
    proven = {(PeerId("bob"), ANN)}
    later = 7.0 + CONTEST_SECONDS + 0.1
    assert owner(settle(first, [claim("bob", 6, until=20.0), rival], view(later, proven))) == ("bob", 6)
    assert owner(settle(first, [rival], view(later))) == ("cat", 7)
    # Where nobody has a vote there is nothing to wait for.
    assert owner(settle(first, [rival], view(later, alone=True))) == ("bob", 6)


def test_of_those_who_followed_a_lease_that_ran_out_the_one_with_more_votes_counts() -> None:
    bob = replace(held("bob", 6), since=10.0, until=30.0, floor=5, lapsed=ANN, settled=False)
    claims = [claim("bob", 6, until=30.0), claim("eve", 7, score=1.0, until=30.0)]
    late = 10.0 + CONTEST_SECONDS
    for now in (late - 1.0, late):
        assert owner(settle(bob, claims, view(now, votes={"bob": 1}))) == ("bob", 6)
    # The halves of a swarm that was divided have as many each, or none: they go by rank.
    assert owner(settle(bob, claims, view(late, votes={"bob": 1, "eve": 1}))) == ("eve", 7)
    assert owner(settle(bob, claims, view(late))) == ("eve", 7)
    # Whoever has the neighbours' votes was claimed first under a lower term than a liar's that has none: it gets the stage.
    eve = replace(held("eve", 13), since=10.0, until=30.0, floor=5, lapsed=ANN, settled=False)
    won = settle(
        eve, [claim("bob", 6, until=30.0), claim("eve", 13, until=30.0)], view(late, votes={"bob": 1})
    )
    assert won is not None and won.holding == ("bob", 6) and won.highest_used == 13
    for term in (5, 5 + ROUNDS + 1):
        rival = claim("bob", term, until=30.0)
        assert owner(settle(eve, [rival], view(late, votes={"bob": 1}))) == ("eve", 13)


def test_a_reader_that_knows_nothing_goes_by_the_author_before_the_highest_term() -> None:
    claims = [claim("ann", 1), claim("eve", 40, score=1.0)]
    assert owner(settle(None, claims, view(1.0))) == ("eve", 40)
    chosen = replace(view(1.0), chosen=lambda claim: claim.peer == "ann")
    assert owner(settle(None, claims, chosen)) == ("ann", 1)
    # Whoever of the two was seen first, within the time of a contest; a term that was used before is void all the same.
    for first, other in (claims, claims[::-1]):
        known = settle(None, [first], replace(chosen, now=0.5))
        assert owner(settle(known, [first, other], chosen)) == (
            ("ann", 1) if first.peer == "ann" else ("eve", 40)
        )
    # Not once the lease of whom the author chose has run out, nor where somebody else is known to hold the stage.
    assert owner(settle(None, claims[1:], chosen)) == ("eve", 40)
    assert owner(settle(held("dan", 3), claims, chosen)) == ("dan", 3)


def test_who_was_only_cut_off_gets_its_stage_back_unless_a_majority_saw_it_gone() -> None:
    first = settle(held(), [claim("bob", 6, until=40.0)], view(7.0))
    back = [claim("ann", 5, until=20.0), claim("bob", 6, until=40.0)]
    restored = settle(first, back, view(12.0))
    assert restored is not None and restored.holding == ANN and restored.highest_used == 6
    assert owner(settle(first, back, view(12.0, {(PeerId("bob"), ANN)}))) == ("bob", 6)
    assert owner(settle(first, [claim("ann", 5, until=11.0), *back[1:]], view(12.0))) == ("bob", 6)
    assert owner(settle(first, [claim("ann", 4, until=20.0), *back[1:]], view(12.0))) == ("bob", 6)


def test_who_was_outbid_gets_the_stage_back_once_whoever_won_is_done() -> None:
    """The one who was outbid may have seen it too late to go by it, and hold the stage: nobody may take it for vacant."""
    bob = settle(held(until=0.0), [claim("bob", 6, until=20.0)], view(1.0, alone=True))
    eve = settle(bob, [claim("bob", 6, until=20.0), claim("eve", 8)], view(2.0, alone=True))
    assert owner(eve) == ("eve", 8)
    renewed = claim("bob", 6, until=26.0)
    for done, now in ((claim("eve", 8, role="standby"), 3.0), (claim("eve", 8), LEASE + 0.1)):
        back = settle(eve, [renewed, done], view(now, alone=True))
        assert back is not None and owner(back) == ("bob", 6) and back.lives(now) and back.highest_used == 8
        # Nobody contests it for that, once its own time for it is over.
        assert owner(settle(back, [renewed, claim("dan", 9, until=30.0)], view(7.0, alone=True))) == (
            "bob",
            6,
        )
        # Whoever follows by a proof goes above the term that was used.
        assert owner(
            settle(back, [claim("dan", 9)], view(3.5, {(PeerId("dan"), Holding(PeerId("bob"), 6))}))
        ) == (
            "dan",
            9,
        )
    # Not one that claims it no more, under another term, or whose lease ran out as well.
    for other in (claim("bob", 6, role="released", until=26.0), claim("bob", 7, until=26.0), claim("bob", 6)):
        gone = settle(eve, [other, claim("eve", 8, role="released")], view(7.0, highest=6))
        assert gone is not None and owner(gone) == ("eve", 8) and not gone.lives(7.0)
    # Nor where whoever won handed the stage on, or a majority saw it gone.
    proven = {(PeerId("dan"), Holding(PeerId("eve"), 8))}
    handed = [renewed, claim("eve", 8, role="released"), claim("dan", 9)]
    assert owner(settle(eve, handed, view(3.0, proven))) == ("dan", 9)


def test_who_follows_one_that_was_outbid_by_its_term_alone_follows_by_right() -> None:
    """Its neighbours may have gone by it all the time, and say rightly that it is gone; whoever outbid it lives on."""
    bob, eve = claim("bob", 6, until=60.0), claim("eve", 8, until=60.0)
    known = settle(settle(held(), [bob], view(7.0)), [bob, eve], view(14.0))
    assert known is not None and owner(known) == ("eve", 8) and not known.settled
    dan = claim("dan", 7, until=60.0)
    gone = Holding(PeerId("bob"), 6)
    proven = {(PeerId("dan"), gone)}
    assert owner(settle(known, [eve, dan], view(20.0))) == ("eve", 8)
    found = settle(known, [eve, dan], view(20.0, proven))
    assert found is not None and owner(found) == ("dan", 7) and found.over == gone and found.highest_used == 8
    # Not once a majority has borne eve out.
    right = proven | {(PeerId("eve"), ANN)}
    assert owner(settle(known, [eve, dan], view(20.0, right))) == ("eve", 8)


def test_the_term_that_was_used_between_is_kept_by_who_follows() -> None:
    """Whoever still goes by that term has to see that it is no more."""
    first = settle(held(), [claim("bob", 6, until=40.0)], view(7.0))
    back = settle(first, [claim("ann", 5, until=20.0), claim("bob", 6)], view(12.0))
    assert back is not None and back.holding == ANN and back.highest_used == 6
    dan = claim("dan", 6, until=40.0)
    for now, proven in ((12.5, {(PeerId("dan"), ANN)}), (21.0, NOBODY)):
        next_one = settle(back, [dan], view(now, proven))
        assert next_one is not None and owner(next_one) == ("dan", 6) and next_one.highest_used == 6


def test_of_those_that_were_outbid_the_last_who_still_claims_it_goes_on() -> None:
    known = settle(held(until=0.0), [claim("bob", 6, until=20.0)], view(1.0, alone=True))
    for peer, term in (("cat", 7), ("dan", 8), ("eve", 9)):
        known = settle(known, [claim(peer, term)], view(1.5, alone=True))
    claims = [claim("bob", 6, until=20.0), claim("cat", 7, until=20.0), claim("eve", 9, role="released")]
    back = settle(known, claims, view(2.0, alone=True))
    assert owner(back) == ("cat", 7)
    assert owner(settle(back, [claims[0], claim("cat", 7, role="released")], view(2.5, alone=True))) == (
        "bob",
        6,
    )


def test_who_followed_by_a_proof_is_contested_by_proofs_only() -> None:
    proven = {(PeerId("bob"), ANN), (PeerId("dan"), ANN)}
    first = settle(held(), [claim("bob", 6)], view(1.0, proven))
    assert first is not None and first.over == ANN
    assert owner(settle(first, [claim("eve", 7)], view(1.5, proven))) == ("bob", 6)
    assert owner(settle(first, [claim("dan", 7)], view(1.5, proven))) == ("dan", 7)
    assert owner(settle(first, [claim("dan", 7)], view(1.0 + CONTEST_SECONDS, proven))) == ("bob", 6)


def test_a_chain_of_owners_is_followed_at_once() -> None:
    bob = Holding(PeerId("bob"), 6)
    proven = {(PeerId("bob"), ANN), (PeerId("cat"), bob)}
    assert owner(settle(held(), [claim("cat", 7), claim("bob", 6)], view(1.0, proven))) == ("cat", 7)


def test_terms_grow_by_the_second() -> None:
    assert ceiling(100.0, 50.0) == ceiling(100.0, 100.0) == SPARE_TERMS
    assert ceiling(100.0, 160.0) == SPARE_TERMS + 60
    assert ceiling(0.0, 1e18) == MAX_TERM - 1


def test_the_voters_are_the_owners_of_the_nearest_stages() -> None:
    assert (
        voting_stages(0, 1) == ()
        and voting_stages(1, 3) == (0, 2)
        and voting_stages(5, 100)[:4] == (4, 6, 3, 7)
    )
    assert all(len(voting_stages(stage, 64)) == MAX_VOTING_STAGES for stage in range(64))
    assert voting_stages(70, 64)[:2] == (63, 62), "even of a stage that the job does not have"
    assert operations(lambda: voting_stages(2000, 4096)) < 2 * operations(lambda: voting_stages(20, 40))
    tenures = [held("bob"), held("bob"), held("cat"), held("ann"), held("dan", until=0.5)]
    ann = PeerId("ann")

    def found(*near: Tenure, now: float = 1.0) -> list[list[str]]:
        return sorted(sorted(seat.voters) for seat in seats(near, ann, now))

    # Each once, not the suspect. A vacant stage counts, so that the other neighbour is no majority by itself; who held it
    # last has no vote, whether it gave the stage up or its lease ran out.
    assert found(*tenures) == [[], ["bob"], ["cat"]]
    for until in (NEVER, 0.5):
        gone = held("dan", until=until)
        assert found(held("bob"), gone) == [[], ["bob"]]
        assert not is_majority([PeerId("bob"), PeerId("dan")], seats([held("bob"), gone], ann, 1.0))
        assert not is_majority([PeerId("dan")], seats([gone], ann, 1.0)), "the only other stage's last owner"
    cut_off = replace(held("cat"), lapsed=Holding(PeerId("eve"), 4))
    assert found(cut_off) == [["cat", "eve"]]
    followed = replace(held("cat", since=0.0, until=99.0), over=Holding(PeerId("eve"), 4))
    assert found(followed, now=VOTE_SECONDS - 1.0) == [["cat", "eve"]]
    assert found(followed, now=float(VOTE_SECONDS)) == [["cat"]]


@pytest.mark.parametrize("by", ["over", "lapsed"])
def test_who_followed_the_suspect_at_another_stage_does_not_void_votes_from_before(by: str) -> None:
    """An owner of two stages is gone: who voted before anybody had followed it at the other one was a majority then."""
    ann, bob, cat, dan = map(PeerId, ("ann", "bob", "cat", "dan"))
    others = held("bob", until=99.0)
    assert is_majority([bob], seats([others, held("ann", until=99.0)], ann, 1.0))
    follower = replace(held("cat", since=0.0, until=99.0), **{by: Holding(ann, 4)})
    assert is_majority([bob], seats([others, follower], ann, 1.0))
    assert not is_majority([cat], seats([others, follower], ann, 1.0)), "nor is it one by itself"
    assert not is_majority([bob], seats([others, follower], ann, float(VOTE_SECONDS))), (
        "for as long as votes are good"
    )
    more = held("dan", until=99.0)
    assert not is_majority([bob], seats([others, more, follower], ann, 1.0))
    assert is_majority([bob, cat], seats([others, more, follower], ann, 1.0)), "its own vote counts"
    elsewhere = replace(held("cat", since=0.0, until=99.0), **{by: Holding(dan, 4)})
    assert not is_majority([bob], seats([others, elsewhere], ann, 1.0)), (
        "whom it followed was not the suspect"
    )
    assert not is_majority([bob], seats([others, held("cat", until=99.0), follower], ann, 1.0)), (
        "it had a vote before"
    )


def seats_of(*voices: set[str]) -> tuple[Seat, ...]:
    return tuple(Seat(frozenset(map(PeerId, each))) for each in voices)


def test_half_is_no_majority() -> None:
    two = seats_of({"bob"}, {"cat", "eve"})
    assert not is_majority([PeerId("bob")], two)
    assert not is_majority([PeerId("cat"), PeerId("eve")], two)  # one voter's two voices
    assert is_majority([PeerId("bob"), PeerId("eve")], two)
    # One peer's vote stands for one voter, whichever lets the others be counted too.
    ann, bob, cat, eve = map(PeerId, ("ann", "bob", "cat", "eve"))
    three = seats_of({"bob", "eve"}, {"cat", "eve"}, {"ann"})
    assert count([eve], three) == 1 and count([eve, bob], three) == 2
    assert count([eve, cat], three) == 2 and count([ann, bob, cat, eve], three) == 3
    assert not is_majority([], ()) and not is_majority([PeerId("bob")], ())


def test_who_asks_for_votes_counts_all_who_may_have_one() -> None:
    bob, cat, dan = map(PeerId, ("bob", "cat", "dan"))
    one, two = seats_of({"bob"}), seats_of({"bob"}, {"cat"})
    assert is_majority_to_all([bob], one, 0) and not is_majority_to_all([bob], one, 1)
    assert is_majority_to_all([bob, cat], two, 1) and not is_majority_to_all([bob, cat], two, 2)
    fresh = (*one, Seat(frozenset({dan}), fresh=True))
    assert is_majority([bob], fresh) and not is_majority_to_all([bob], fresh, 0)
    assert is_majority_to_all([bob, dan], fresh, 0)
    assert not is_majority_to_all([], (), 0)


@st.composite
def claims_of_others(draw: st.DrawFn) -> list[ClaimRecord]:
    """Whatever peers other than the holder may say at one moment."""
    peers = draw(st.lists(st.sampled_from(PEERS[1:]), unique=True, max_size=4))
    return [
        claim(
            peer,
            draw(st.one_of(st.integers(0, 20), st.integers(0, MAX_TERM))),
            role=draw(st.sampled_from(["owner", "owner", "replica", "standby", "released"])),
            score=draw(st.sampled_from([0.1, 0.5, 1.0])),
            until=draw(st.floats(0.0, 200.0)),
        )
        for peer in peers
    ]


@given(st.lists(claims_of_others(), max_size=20), st.integers(1, MAX_TERM - 1))
@settings(max_examples=examples(300), deadline=None)
def test_nothing_that_others_say_without_a_proof_changes_a_live_tenure(
    rounds: list[list[ClaimRecord]], highest: int
) -> None:
    known: Tenure | None = held()
    for number, claims in enumerate(rounds):
        now = number * LEASE / 21
        known = settle(known, claims, view(now, highest=highest))
        assert known == held()


@given(st.lists(st.tuples(claims_of_others(), st.booleans(), st.floats(0.0, 5.0)), max_size=25))
@settings(max_examples=examples(300), deadline=None)
def test_no_sequence_of_claims_uses_the_terms_up(steps: list[tuple[list[ClaimRecord], bool, float]]) -> None:
    """Whatever is claimed, with the votes of a majority or without: terms stay below the ceiling, plus ROUNDS for every
    vote of a majority."""
    known: Tenure | None = None
    now, votes = 0.0, 0
    for claims, majority, pause in steps:
        now += pause
        proven = {(c.peer, known.holding) for c in claims} if known is not None and majority else NOBODY
        before = known
        known = settle(known, claims, view(now, proven, highest=ceiling(0.0, now)))
        votes += known is not None and known.over is not None and known != before
        if before is not None and known is not None:
            assert max(known.claim.term, known.highest_used) >= max(before.claim.term, before.highest_used)
        assert known is None or known.claim.term <= ceiling(0.0, now) + ROUNDS * votes


@given(
    st.lists(st.tuples(st.sampled_from(PEERS), st.integers(0, 3), st.sampled_from([0.1, 1.0])), min_size=1, max_size=4,
             unique_by=lambda each: each[0]),
    st.data(),
)  # fmt: skip
@settings(max_examples=examples(300), deadline=None)
def test_honest_contenders_converge(entrants: list[tuple[PeerId, int, float]], data: st.DataObject) -> None:
    """Those that claim a vacancy, whichever of them a reader sees first: with all of them seen it is the highest rank."""
    known = None
    claims = [claim(peer, 6 + rise, score=score, until=20.0) for peer, rise, score in entrants]
    best = max(claims, key=rank)
    for start in (None, held("zoe", until=0.0)):
        known = start
        for seen in (data.draw(st.permutations(claims)), claims):
            for at in range(1, len(seen) + 1):
                known = settle(known, seen[:at], view(1.0))
        if start is not None or best.term <= min(c.term for c in claims) - 1 + ROUNDS:
            assert known is not None and known.claim == best


def test_never_is_before_every_moment() -> None:
    assert NEVER <= 0.0 and not replace(held(), until=NEVER).lives(0.0)
