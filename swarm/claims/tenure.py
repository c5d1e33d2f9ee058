"""Whose claim of a stage counts: a pure rule over what one reader has seen, so that a claim is believed for its right and
not for its number.

A reader keeps one tenure for each stage: who holds it, under which term, since when, and until when its lease lasts in
the reader's own view (the end that the holder signed, which is at most a lease away). A claim of another peer counts,
if its term is higher, where

(a) the lease has run out in the reader's own view: a vacancy needs no proof, only a term below the ceiling;
(b) it proves that the holder does not hold the stage any more, and that its own peer is to follow: the holder's signed
    release, or such votes of a majority of the voters, the owners of the stages nearest to this one, as the reader
    knows them; it is at most ROUNDS above then;
(c) it contests a tenure that is not settled, with the same right as that has and a higher rank, at most ROUNDS above the
    term that both follow; to whom the job's author gave the stage, or who followed by the vote of such a peer, goes before any
    rank. A tenure settles after CONTEST_SECONDS; one that followed a lease which merely ran out, once
    its claim proves that a majority saw that as well: the two halves of a swarm that was divided agree in this way.
    Until then the holder before gets the stage back with the claim that it had, of rivals the one counts with more
    votes that the holder before is gone, whatever its rank, and who proves that one that was outbid is gone follows
    it. Whoever was outbid gets it back, if it still claims it, when
    whoever outbid it gives it up or lets its lease run out: readers see a contest at unlike times, so not all of them
    went by it.

Everything else is void: it owns nothing, ends no lease and raises no term. The holder itself may go on above its own
claim, below the ceiling, and its own word that it does not own the stage any more ends the tenure. A term lower than
that of the last settled holder is void for ever.

The ceiling is SPARE_TERMS more than the seconds since the job was launched, so that terms cannot be used up: claims that
need no neighbour's vote raise them by less than one a second in the long run. A reader that knows nothing of a stage
believes that of a peer to whom the author gave it, or who followed by the vote of one, if there is such a claim, and else the
highest; in either case one below the ceiling.

A voter has one vote, however many stages it owns or owned, and the holder none against itself. Where an owner's lease merely
ran out and another peer followed, the vote of either stands for that stage: it may have been cut off from us, not gone. Where
another peer followed by a proof, so does that of the one before for as long as a vote is good: two neighbours may die within
moments, and who saw the second death first has to understand what the second one said of the first.
Nobody else has a vote. A stage that is vacant still counts among the neighbours, and nobody has its vote. Where no other peer owns a stage of the job only (a) and a release remain.

Where an owner was cut off, its neighbours voted for another and are gone when the two meet, nobody is left to say which of them
counts, and each would wait for ever. So an owner, near whose stage nobody holds one any more, gives way after DESERTED_SECONDS
beside a claim that follows it by the votes of a majority of those who held these last, however old.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fusion.swarm.claims.election import rank
from fusion.swarm.directory.records import MAX_TERM, ClaimRecord
from fusion.swarm.transport import PeerId

ROUNDS = 8  # of raising a claim above rivals with the same right
OUTBID = 4  # holders that are remembered of those that a contest for one stage has outbid, the first ones
# A reader hears of rivals within a heartbeat, and they of each other within the time that a claim is confirmed in.
CONTEST_SECONDS = 3.0
SPARE_TERMS = 64
MAX_VOTING_STAGES = 8
DESERTED_SECONDS = 18.0  # three leases
VOTE_SECONDS = 12  # two leases: a vote that nobody made use of must not be kept for later


class Holding(NamedTuple):
    peer: PeerId
    term: int


@dataclass(frozen=True, kw_only=True)
class Tenure:
    """Who holds a stage, in one reader's view. Times are unix seconds."""

    claim: ClaimRecord  # the newest of the holder's
    since: float
    until: float  # NEVER: the holder gave it up itself
    floor: int  # the term that it followed; nobody contests it further than ROUNDS above
    over: Holding | None = None  # whom it followed by a proof
    lapsed: Holding | None = None  # whom it followed because that one's lease had run out
    settled: bool = True  # False: `lapsed`, and no majority has borne it out yet
    outbid: tuple[Tenure, ...] = ()  # whom it won the contest against, the first one first
    used: int = 0  # the highest term of those that had the stage between, and have it no more

    @property
    def holding(self) -> Holding:
        return Holding(self.claim.peer, self.claim.term)

    def lives(self, now: float) -> bool:
        return now < self.until


NEVER = 0.0

# Whether a claim proves that whoever held the stage so does not any more, and that the claim's peer is to follow.
Proves = Callable[[ClaimRecord, Holding], bool]
# How many voters say so in the claim's proof.
CountVotes = Callable[[ClaimRecord, Holding], int]


class Seat(NamedTuple):
    """Of one voter: those any of whose votes stands for its own. `fresh`: they followed the very peer that is suspected, and votes from
    before are still good."""

    voices: frozenset[PeerId]
    fresh: bool = False


@dataclass(frozen=True)
class View:
    """What one reader goes by at one moment. `alone`: nobody has a vote on the stage, so that there is no majority to
    wait for. `now`: unix seconds. `chosen`: whether the job's author gave the stage to the claim's peer, or one of those to
    whom it gave any said that this peer is to follow."""

    proves: Proves
    votes: CountVotes
    now: float
    ceiling: int
    alone: bool
    chosen: Callable[[ClaimRecord], bool] = lambda claim: False

    def order(self, claim: ClaimRecord) -> tuple[bool, tuple[int, float, bytes]]:
        """Of claims with the same right the highest counts: who was chosen goes before any term."""
        return self.chosen(claim), rank(claim)


def settle(known: Tenure | None, claims: Iterable[ClaimRecord], view: View) -> Tenure | None:
    """Who holds the stage after `claims` were seen, one of each peer with its end (`expires_at`). The tenure may have run
    out (`Tenure.lives`)."""
    claims = tuple(claims)
    if known is not None:
        own = next((claim for claim in claims if claim.peer == known.claim.peer), None)
        known = known if own is None else _carried_on(known, own, view)
        if not known.settled and known.lapsed is not None:
            known = replace(known, settled=view.alone or view.proves(known.claim, known.lapsed))
            known = _restored(known, claims, view)
        known = _back_to_outbid(known, claims, view)
    owners = [claim for claim in claims if claim.role == "owner" and claim.expires_at > view.now]
    for _ in owners:  # what follows the holder that we know of may have been followed itself
        # Strangers make thousands of claims: to order them costs many times what it takes to see that most cannot follow.
        able = (claim for claim in owners if _may_follow(known, claim, view))
        followers = [found for claim in able if (found := _follower(known, claim, view)) is not None]
        if not followers:
            break
        known = max(followers, key=lambda each: view.order(each.claim))
    return known


def _restored(known: Tenure, claims: Iterable[ClaimRecord], view: View) -> Tenure:
    """The tenure of the holder before, if it has only been cut off from us, and nobody bears out that it was gone."""
    for claim in claims:
        lives = claim.role == "owner" and claim.expires_at > view.now
        if not known.settled and lives and Holding(claim.peer, claim.term) == known.lapsed:
            used = max(known.used, known.claim.term)
            return Tenure(claim=claim, since=NEVER, until=claim.expires_at, floor=claim.term - 1, used=used)
    return known


def _back_to_outbid(known: Tenure, claims: Iterable[ClaimRecord], view: View) -> Tenure:
    """The tenure of the last one that was outbid and claims the stage still, once whoever won holds it no more and has not
    been followed by right."""
    if known.lives(view.now) or not known.outbid:
        return known
    live = {Holding(c.peer, c.term): c for c in claims if c.role == "owner" and c.expires_at > view.now}
    if any(claim.term > known.claim.term and view.proves(claim, known.holding) for claim in live.values()):
        return known
    for number, before in reversed(list(enumerate(known.outbid))):
        claim = live.get(before.holding)
        if claim is not None:
            used = max(known.used, known.claim.term)
            outbid = known.outbid[:number]
            return replace(before, claim=claim, until=claim.expires_at, outbid=outbid, used=used)
    return known


def _carried_on(known: Tenure, own: ClaimRecord, view: View) -> Tenure:
    """With what the holder says itself."""
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
    """What `_follower` asks of a claim, as far as its term and its time tell."""
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
    """The tenure of the claim's peer, if it follows the one that is known."""
    fresh = Tenure(claim=claim, since=view.now, until=claim.expires_at, floor=claim.term - 1)
    if known is None:
        return fresh if claim.term <= view.ceiling else None
    before = known.holding
    fresh = replace(fresh, floor=before.term, used=known.used)
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
            used = known.used if holding == before else max(known.used, before.term)
            return replace(fresh, over=holding, floor=holding.term, used=used)
    more = 0  # votes that its holder before is gone than the tenure has
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
    used = max(known.used, known.claim.term)
    settled = known.lapsed is None
    return replace(known, claim=claim, until=claim.expires_at, settled=settled, outbid=outbid, used=used)


def _outbid_unsettled(known: Tenure) -> tuple[Holding, ...]:
    """Whom the tenure outbid by its term alone, with no majority's vote: others may have gone by them ever since."""
    return () if known.settled else tuple(each.holding for each in known.outbid)


def ceiling(launched_at: float, now: float) -> int:
    """The highest term that a claim may have which no neighbour's vote supports. Both in unix seconds."""
    return min(MAX_TERM - 1, SPARE_TERMS + max(0, int(now - launched_at)))


def voting_stages(stage: int, stages: int) -> tuple[int, ...]:
    """The stages whose owners have a vote on who holds `stage`: the nearest ones."""
    # A job may have thousands, and somebody may speak of one that it does not have.
    near = range(max(0, min(stage, stages) - MAX_VOTING_STAGES), min(stages, stage + MAX_VOTING_STAGES + 1))
    others = sorted((abs(other - stage), other) for other in near if other != stage)
    return tuple(other for _, other in others[:MAX_VOTING_STAGES])


def seats(
    near: Iterable[Tenure], suspect: PeerId | None, now: float, *, last: bool = False
) -> tuple[Seat, ...]:
    """Who has a vote on whether `suspect` holds its stage: one seat each of the peers that hold the stages `near` it now. Who held one last
    has no vote any more, but with `last`, and the stage counts: a vacant one must not make the only other neighbour a majority."""
    voices: dict[PeerId, set[PeerId]] = {}
    fresh: dict[PeerId, bool] = {}
    for tenure in near:
        peer = tenure.claim.peer
        if peer == suspect:
            continue
        found = voices.setdefault(peer, set())
        followed = tenure.over or tenure.lapsed
        lately = followed is not None and followed.peer == suspect and now < tenure.since + VOTE_SECONDS
        fresh[peer] = fresh.get(peer, True) and lately
        if last or tenure.lives(now):
            found.add(peer)
            if tenure.lapsed is not None:
                found.add(tenure.lapsed.peer)
            if tenure.over is not None and (last or now < tenure.since + VOTE_SECONDS):
                found.add(tenure.over.peer)
    return tuple(Seat(frozenset(found - {suspect}), fresh[peer]) for peer, found in voices.items())


def count(voted: Collection[PeerId], found: Sequence[Seat]) -> int:
    """How many of the seats have one who voted, each of whom stands for one seat at most."""
    stands_for: dict[PeerId, int] = {}

    def seated(seat: int, tried: set[PeerId]) -> bool:
        for voter in found[seat].voices.intersection(voted) - tried:
            tried.add(voter)
            if voter not in stands_for or seated(stands_for[voter], tried):
                stands_for[voter] = seat
                return True
        return False

    return sum(seated(seat, set()) for seat in range(len(found)))


def is_majority(voted: Collection[PeerId], found: Sequence[Seat]) -> bool:
    """Whether more than half of the seats have one who voted; those that are fresh may be left out, as they were when the votes were
    given: of a peer with two stages that is gone, whoever follows at one must not void what lets another follow at the other."""
    before = [seat for seat in found if not seat.fresh]
    return any(2 * count(voted, seats) > len(seats) for seats in (found, before))


def is_majority_to_all(voted: Collection[PeerId], found: Sequence[Seat], unknown: int) -> bool:
    """Whether it is a majority also for a reader who leaves no seat out and counts `unknown` more, near stages of which we have
    never read who holds them. A candidate asks for votes until this holds, as Raft's does for a majority of the whole cluster and not
    of the members that it has met: others may know of more voters. Who reads a claim goes by `is_majority`."""
    return 2 * count(voted, found) > len(found) + unknown
