"""Whose claim of a stage counts: a pure rule over what one reader has seen. A claim counts by its right, not by a high term alone.

A reader keeps one tenure for each stage: who holds it, under which term, since when, and until when the lease lasts in the reader's
own view (the expiry that the holder signed, at most one lease ahead). The claim of another peer replaces it if its term is
higher and one of these holds:

(a) Vacancy: the lease has run out in the reader's own view. It needs no proof, only a term below the ceiling.
(b) Proof: the claim proves that the holder is gone and that its own peer is to follow, by the holder's signed release or by votes of
    a majority of the voters (the owners of the stages nearest to this one, as the reader knows them). Its term is at most ROUNDS
    above the holder's.
(c) Contest: the tenure is not settled, and the claim has the same right and a higher rank, at most ROUNDS above the term that both
    follow. A peer that the job's author proposed for the stage, or that followed by the vote of such a peer, goes before any rank.

A tenure settles after CONTEST_SECONDS; one that followed a lease that ran out, once its claim proves that a majority saw that
too: so the two halves of a partitioned swarm come to agree. Until then

* the holder before gets the stage back with the claim that it had;
* of rivals the one with more votes against the holder before counts, whatever its rank;
* a claim that proves that an outbid peer is gone follows that peer;
* an outbid peer that still claims the stage gets it back when the one that outbid it gives it up or lets its lease run out:
  readers see a contest at different times, so some never knew of it.

Every other claim is void: it owns nothing, ends no lease and raises no term. The holder itself may raise its own term up to the
ceiling, and ends the tenure with a claim that is not an owner's. A term below the last settled holder's is void for ever.

The ceiling is the seconds since the job's launch plus SPARE_TERMS, so that terms cannot be used up: claims without votes raise them
by less than one a second in the long run. A reader that knows nothing of a stage believes, of the claims below the ceiling, that
of a peer that the author proposed for it or that followed by the vote of such a peer, else the highest.

A voter has one vote, however many stages it owns or owned; the holder has none for itself. Where a voter's lease ran out and another
peer followed it, the vote of either counts for that stage: the first may be cut off from us, not gone. Where another followed by a
proof, the vote of the first counts for as long as votes are valid: two neighbours may die within moments, and a reader that saw the
second death first needs the second's vote on the first. A vacant stage still counts among the neighbours, and nobody has its vote.
Where no other peer owns a stage of the job, only (a) and a release remain.

An owner may be cut off while its neighbours vote for another, and these may be gone when the two meet: nobody is left to decide, and
each would wait for ever. So an owner whose neighbours' stages are all vacant gives way, after DESERTED_SECONDS, to a claim that
follows it by the votes, however old, of a majority of their last holders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusion.swarm.claims.election import rank
from fusion.swarm.directory.records import MAX_TERM, ClaimRecord
from fusion.swarm.transport import PeerId

ROUNDS = 8  # of raising a claim above rivals with the same right
OUTBID = 4  # outbid holders of one stage that are remembered, the first ones
# A reader learns of rivals within a heartbeat, and they of each other within LeaseConfig.confirm_seconds.
CONTEST_SECONDS = 3.0
SPARE_TERMS = 64
MAX_VOTING_STAGES = 8
DESERTED_SECONDS = 18.0  # three leases
VOTE_SECONDS = 12  # two leases: an unused vote must not be kept for later


class Holding(NamedTuple):
    peer: PeerId
    term: int


@dataclass(frozen=True, kw_only=True)
class Tenure:
    """Who holds a stage, in one reader's view. Times are unix seconds."""

    claim: ClaimRecord  # the holder's newest
    since: float
    until: float  # NEVER: the holder gave it up itself
    floor: int  # the term that it followed; a contest goes at most ROUNDS above
    over: Holding | None = None  # the holder that it followed by a proof
    lapsed: Holding | None = None  # the holder that it followed after its lease ran out
    settled: bool = True  # False: `lapsed`, and no majority has confirmed it yet
    outbid: tuple[Tenure, ...] = ()  # those that it won the contest against, the first one first
    highest_used: int = 0  # of the holders that lost the stage again

    @property
    def holding(self) -> Holding:
        return Holding(self.claim.peer, self.claim.term)

    def lives(self, now: float) -> bool:
        return now < self.until


NEVER = 0.0

# Whether a claim proves that the holding is over, and that the claim's peer is to follow.
Proves = Callable[[ClaimRecord, Holding], bool]
# How many votes against the holding the claim's proof has.
CountVotes = Callable[[ClaimRecord, Holding], int]


class Seat(NamedTuple):
    """One vote: the peers of which any may give it. `fresh`: the seat's peer followed the suspect itself a moment ago, so that votes
    from before are still valid."""

    voters: frozenset[PeerId]
    fresh: bool = False


@dataclass(frozen=True)
class View:
    """What one reader judges by at one moment. `alone`: the stage has no voters, so that there is no majority to wait
    for. `now`: unix seconds. `chosen`: whether the job's author proposed the claim's peer for the stage, or a peer that it
    proposed for any stage voted for this one."""

    proves: Proves
    votes: CountVotes
    now: float
    ceiling: int
    alone: bool
    chosen: Callable[[ClaimRecord], bool] = lambda claim: False

    def order(self, claim: ClaimRecord) -> tuple[bool, tuple[int, float, bytes]]:
        """Of claims with the same right the greatest counts: a chosen peer goes before any term."""
        return self.chosen(claim), rank(claim)


def settle(known: Tenure | None, claims: Iterable[ClaimRecord], view: View) -> Tenure | None:
    """The tenure of the stage after the reader has seen `claims`, one of each peer, with their expiry (`expires_at`). It may have
    run out (`Tenure.lives`). None: nobody has held the stage."""
    claims = tuple(claims)
    if known is not None:
        own = next((claim for claim in claims if claim.peer == known.claim.peer), None)
        known = known if own is None else _renewed(known, own, view)
        if not known.settled and known.lapsed is not None:
            known = replace(known, settled=view.alone or view.proves(known.claim, known.lapsed))
            known = _restored(known, claims, view)
        known = _back_to_outbid(known, claims, view)
    owners = [claim for claim in claims if claim.role == "owner" and claim.expires_at > view.now]
    for _ in owners:  # a follower may have been followed itself
        # Strangers may make thousands of claims: the cheap filter first, since `_follower` and `order` cost much more.
        able = (claim for claim in owners if _may_follow(known, claim, view))
        followers = [found for claim in able if (found := _follower(known, claim, view)) is not None]
        if not followers:
            break
        known = max(followers, key=lambda each: view.order(each.claim))
    return known


def _restored(known: Tenure, claims: Iterable[ClaimRecord], view: View) -> Tenure:
    """The tenure of the holder before, if its claim lives again and no majority has confirmed that it was gone."""
    for claim in claims:
        lives = claim.role == "owner" and claim.expires_at > view.now
        if not known.settled and lives and Holding(claim.peer, claim.term) == known.lapsed:
            highest_used = max(known.highest_used, known.claim.term)
            return Tenure(
                claim=claim,
                since=NEVER,
                until=claim.expires_at,
                floor=claim.term - 1,
                highest_used=highest_used,
            )
    return known


def _back_to_outbid(known: Tenure, claims: Iterable[ClaimRecord], view: View) -> Tenure:
    """The tenure of the last outbid peer that still claims the stage, once the one that won holds it no more and no claim proves to
    follow it."""
    if known.lives(view.now) or not known.outbid:
        return known
    live = {Holding(c.peer, c.term): c for c in claims if c.role == "owner" and c.expires_at > view.now}
    if any(claim.term > known.claim.term and view.proves(claim, known.holding) for claim in live.values()):
        return known
    for number, before in reversed(list(enumerate(known.outbid))):
        claim = live.get(before.holding)
        if claim is not None:
            highest_used = max(known.highest_used, known.claim.term)
            outbid = known.outbid[:number]
            return replace(
                before, claim=claim, until=claim.expires_at, outbid=outbid, highest_used=highest_used
            )
    return known


def _renewed(known: Tenure, own: ClaimRecord, view: View) -> Tenure:
    """The tenure with the holder's own newest claim."""
    if own.role != "owner":
        return (
            known if own.term < known.claim.term else replace(known, until=NEVER, lapsed=None, settled=True)
        )
    higher = own.term > known.claim.term
    if own.term < known.claim.term or own.expires_at <= view.now or known.until == NEVER:
        return known
    if higher and (own.term > view.ceiling or not known.lives(view.now)):
        return known
    return replace(known, claim=own, until=max(known.until, own.expires_at))


def _may_follow(known: Tenure | None, claim: ClaimRecord, view: View) -> bool:
    """Whether the claim's term, and the time, leave it a chance in `_follower`; checks no votes."""
    term = claim.term
    if known is None:
        return term <= view.ceiling
    before = known.claim.term
    if not known.lives(view.now):
        return before < term <= view.ceiling
    if claim.peer == known.claim.peer:
        return False
    if before < term <= before + ROUNDS:
        return True
    contested = not known.settled or view.now - known.since < CONTEST_SECONDS
    return contested and known.floor < term <= known.floor + ROUNDS


def _follower(known: Tenure | None, claim: ClaimRecord, view: View) -> Tenure | None:
    """The tenure of the claim's peer, if it follows or replaces the known one by rule (a), (b) or (c)."""
    fresh = Tenure(claim=claim, since=view.now, until=claim.expires_at, floor=claim.term - 1)
    if known is None:
        return fresh if claim.term <= view.ceiling else None
    before = known.holding
    fresh = replace(fresh, floor=before.term, highest_used=known.highest_used)
    if not known.lives(view.now):
        if not before.term < claim.term <= view.ceiling:
            return None
        if known.until == NEVER or claim.peer == before.peer:
            return fresh
        return replace(fresh, lapsed=before, settled=view.alone or view.proves(claim, before))
    if claim.peer == before.peer:
        return None
    for holding in (before, *_outbid_unsettled(known)):
        if holding.term < claim.term <= holding.term + ROUNDS and view.proves(claim, holding):
            highest_used = known.highest_used if holding == before else max(known.highest_used, before.term)
            return replace(fresh, over=holding, floor=holding.term, highest_used=highest_used)
    more = 0  # votes against the holder before than the known tenure has
    if not known.settled and known.lapsed is not None:
        more = view.votes(claim, known.lapsed) - view.votes(known.claim, known.lapsed)
    elif view.now - known.since >= CONTEST_SECONDS:
        return None
    if more < 0 or (more == 0 and view.order(claim) <= view.order(known.claim)):
        return None
    if not known.floor < claim.term <= known.floor + ROUNDS:
        return None
    if known.over is not None and not view.proves(claim, known.over):
        return None
    outbid = (*known.outbid, replace(known, outbid=()))[:OUTBID]
    highest_used = max(known.highest_used, known.claim.term)
    settled = known.lapsed is None
    return replace(
        known, claim=claim, until=claim.expires_at, settled=settled, outbid=outbid, highest_used=highest_used
    )


def _outbid_unsettled(known: Tenure) -> tuple[Holding, ...]:
    """Those that an unsettled tenure outbid without a majority: other readers may still believe them."""
    return () if known.settled else tuple(each.holding for each in known.outbid)


def ceiling(launched_at: float, now: float) -> int:
    """The highest term of a claim that has no votes. Both in unix seconds."""
    return min(MAX_TERM - 1, SPARE_TERMS + max(0, int(now - launched_at)))


def voting_stages(stage: int, stages: int) -> tuple[int, ...]:
    """The stages whose owners vote on who holds `stage`: the nearest ones, nearest first."""
    # A job may have thousands of stages, and `stage` may be none of them.
    near = range(max(0, min(stage, stages) - MAX_VOTING_STAGES), min(stages, stage + MAX_VOTING_STAGES + 1))
    others = sorted((abs(other - stage), other) for other in near if other != stage)
    return tuple(other for _, other in others[:MAX_VOTING_STAGES])


def seats(
    near: Iterable[Tenure], suspect: PeerId | None, now: float, *, last: bool = False
) -> tuple[Seat, ...]:
    """The votes on whether `suspect` holds its stage: one seat for each peer with a tenure `near` it. A seat whose lease has run out has
    no voters (with `last`, its last holder) but counts: a vacant stage must not make the only other neighbour a majority."""
    voters: dict[PeerId, set[PeerId]] = {}
    fresh: dict[PeerId, bool] = {}
    for tenure in near:
        peer = tenure.claim.peer
        if peer == suspect:
            continue
        found = voters.setdefault(peer, set())
        followed = tenure.over or tenure.lapsed
        lately = followed is not None and followed.peer == suspect and now < tenure.since + VOTE_SECONDS
        fresh[peer] = fresh.get(peer, True) and lately
        if last or tenure.lives(now):
            found.add(peer)
            if tenure.lapsed is not None:
                found.add(tenure.lapsed.peer)
            if tenure.over is not None and (last or now < tenure.since + VOTE_SECONDS):
                found.add(tenure.over.peer)
    return tuple(Seat(frozenset(found - {suspect}), fresh[peer]) for peer, found in voters.items())


def count(voted: Collection[PeerId], found: Sequence[Seat]) -> int:
    """How many of the seats `found` those who `voted` fill, each at most one: a bipartite matching."""
    seat_of: dict[PeerId, int] = {}

    def fill(seat: int, tried: set[PeerId]) -> bool:
        for voter in found[seat].voters.intersection(voted) - tried:
            tried.add(voter)
            if voter not in seat_of or fill(seat_of[voter], tried):
                seat_of[voter] = seat
                return True
        return False

    return sum(fill(seat, set()) for seat in range(len(found)))


def is_majority(voted: Collection[PeerId], found: Sequence[Seat]) -> bool:
    """Whether more than half of the seats are filled, of all or of those that are not fresh, as when the votes were given: where a peer
    with two stages is gone, the follower at one must not void the votes for the follower at the other."""
    before = [seat for seat in found if not seat.fresh]
    return any(2 * count(voted, seats) > len(seats) for seats in (found, before))


def is_majority_to_all(voted: Collection[PeerId], found: Sequence[Seat], unknown: int) -> bool:
    """Whether it is a majority also for a reader who counts every seat and `unknown` more: voting stages whose holder we have never
    read. A candidate requests votes until this holds, as in Raft for a majority of the whole cluster and not of the members that it has
    met. Readers of a claim go by `is_majority`."""
    return 2 * count(voted, found) > len(found) + unknown
