"""What a peer remembers of claims: those read last, those that peers showed it directly, and who holds each stage by them
(`fusion.swarm.claims.tenure`).

The directory drops expired claims and has new ones a little late; a peer should remember the former and know the latter at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cachetools import FIFOCache, TTLCache

from fusion.swarm.authority.access import Access
from fusion.swarm.authority.grants import Role
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.authority.signed import verified_items
from fusion.swarm.claims import tenure
from fusion.swarm.claims.election import latest, rank
from fusion.swarm.claims.tenure import NEVER, Holding, Seat, Tenure
from fusion.swarm.claims.votes import Vote, open_vote, parse_vote
from fusion.swarm.directory.records import ClaimRecord, JobId, Place, Record
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Verify
from fusion.swarm.transport import PeerId

KNOWN_LAWS = 1024  # jobs
READ_SECONDS = 60.0  # for which the claims read of a stage are kept: several leases
SHOWN = 8  # claims of one stage, shown to us, that are kept
# How far below the ceiling an unproven term must lie to be remembered: a claim above it has to be below the ceiling, too.
HINT_SPARE = 2 * tenure.ROUNDS

# What the claim's peer must be admitted for.
_ROLES: dict[str, Role] = {"owner": "own", "replica": "stand-by", "standby": "stand-by"}


class ClaimCache:
    """`unsealed` checks a record that a peer showed us, `now` gives unix seconds and `verify` checks signatures (all as in
    `Directory`); `limit`: stages remembered. Claims of jobs whose law is known count only of peers that it admits.

    The parameter `own` of methods: our own claim of the stage, which the directory may not have yet."""

    def __init__(
        self,
        peer_id: PeerId,
        unsealed: Callable[[bytes], Record],
        limit: int,
        now: Callable[[], float],
        verify: Verify,
        access: Access,
    ) -> None:
        self._peer_id = peer_id
        self._unsealed = unsealed
        self._now = now
        self._verify = verify
        self._access = access
        self._applied: FIFOCache[JobId, JobLaw] = FIFOCache(KNOWN_LAWS)
        self._hints: FIFOCache[Place, int] = FIFOCache(limit)
        self._read: TTLCache[Place, tuple[ClaimRecord, ...]] = TTLCache(limit, READ_SECONDS, timer=now)
        self._shown: FIFOCache[Place, dict[PeerId, bytes]] = FIFOCache(limit)  # sealed
        self._tenures: FIFOCache[Place, Tenure] = FIFOCache(limit)
        # The stages of a job that a peer held when last judged: an index, for jobs of thousands of stages.
        self._held: FIFOCache[tuple[JobId, PeerId], set[int]] = FIFOCache(limit)

    def know(self, law: JobLaw) -> None:
        """Apply the job's law, also to what is known of its stages by now."""
        before = self._access.law(law.job)
        self._access.know(law)
        if before == law == self._applied.get(law.job):
            return  # called with every heartbeat, for jobs of thousands of stages
        self._applied[law.job] = law
        highest = self._ceiling(law.job)
        for stage in range(law.stages):
            known = self._tenures.get((law.job, stage))
            if known is not None and known.over is None and known.claim.term > highest:
                del self._tenures[law.job, stage]
            if self._hints.get((law.job, stage), 0) > highest - HINT_SPARE:
                del self._hints[law.job, stage]  # a claim above it would be void

    def observe(self, place: Place, term: int) -> None:
        """Remember an unproven term of the stage, which our own claims will exceed. It voids nobody's claim."""
        if self._hints.get(place, 0) < term <= self._ceiling(place[0]) - HINT_SPARE:
            self._hints[place] = term

    def term(self, place: Place) -> int:
        """The highest term that the stage was held under; 0 for none."""
        known = self._tenures.get(place)
        return 0 if known is None else max(known.claim.term, known.highest_used)

    def known(self, place: Place) -> Tenure | None:
        """`tenure` as judged last."""
        return self._tenures.get(place)

    def highest(self, place: Place) -> int:
        """The highest term of the stage, proven or from `observe`."""
        return max(self.term(place), self._hints.get(place, 0))

    def read(self, place: Place, claims: tuple[ClaimRecord, ...]) -> None:
        """Take in the `claims` just read from the directory."""
        self._read[place] = claims

    def recent(self, place: Place, own: ClaimRecord | None) -> tuple[ClaimRecord, ...]:
        """The live claims of the stage, from those read last and shown to us: of claims to own it only the one that counts, while
        its lease lasts. Reads nothing."""
        seen = self.seen(place, own)
        held = self._settled(place, seen)
        found = [claim for claim in seen if claim.role != "owner"]
        if held is not None and held.claim.peer == self._peer_id:
            return tuple(found if own is None or own.role != "owner" else [*found, own])
        return tuple(found if held is None or not held.lives(self._now()) else [*found, held.claim])

    def stale_claim(self, place: Place, own: ClaimRecord | None) -> ClaimRecord | None:
        """Of a stage without a holder: the highest live claim under a term that was used before."""
        held = self.tenure(place, own)
        if held is None or held.lives(self._now()):
            return None
        late = [c for c in self.seen(place, own) if c.role == "owner" and c.expires_at > self._now()]
        return max((c for c in late if c.term <= held.claim.term), key=rank, default=None)

    def give_up(self, place: Place) -> None:
        """Our own claim of the stage is given up."""
        known = self._tenures.get(place)
        if known is not None and known.claim.peer == self._peer_id:
            self._tenures[place] = replace(known, until=NEVER, lapsed=None, settled=True)

    def tenure(self, place: Place, own: ClaimRecord | None) -> Tenure | None:
        """Who holds the stage now, or held it last. Judges all known claims."""
        return self._settled(place, self.seen(place, own))

    def _settled(self, place: Place, seen: Sequence[ClaimRecord]) -> Tenure | None:
        """`tenure` by the claims `seen`."""
        view = tenure.View(
            proves=self.proves,
            votes=self.votes,
            now=self._now(),
            ceiling=self._ceiling(place[0]),
            alone=self._has_no_voters(place),
            chosen=self._chosen,
        )
        known = tenure.settle(self._tenures.get(place), seen, view)
        if known is not None:
            self._tenures[place] = known
            self._held.setdefault((place[0], known.claim.peer), set()).add(place[1])
        return known

    def seen(self, place: Place, own: ClaimRecord | None) -> tuple[ClaimRecord, ...]:
        """Every admitted claim of the stage, whether it counts or not, the newest of each peer."""
        found = {claim.peer: claim for claim in self._read.get(place, ())}
        for peer in list(self._shown.get(place, ())):
            shown = self._open(place, peer)
            if shown is not None:
                found[peer] = latest(found.get(peer), shown)
        highest = self._ceiling(place[0]) - HINT_SPARE
        self.observe(place, max((claim.term for claim in found.values() if claim.term <= highest), default=0))
        before = found.pop(self._peer_id, None)
        if own is not None:
            found[own.peer] = own
        elif before is not None and before.role != "owner":  # not our owner's claim from before a restart
            found[before.peer] = before
        return tuple(claim for claim in found.values() if self.refusal(claim) is None)

    def accept_claim(self, data: bytes) -> ClaimRecord:
        """Take in the sealed claim of an owner until it expires. Raises RecordError for anything else."""
        claim = self._unsealed(data)
        if not isinstance(claim, ClaimRecord) or claim.role != "owner":
            raise RecordError("what was shown is not the claim of an owner")
        refused = self.refusal(claim)
        if refused is not None:
            raise RecordError(
                f"{claim.peer} may not own stage {claim.stage} of job {claim.job[:12]}: {refused}"
            )
        place = (claim.job, claim.stage)
        if place not in self._read and place not in self._tenures:
            # Whoever shows a claim first must not be believed before the directory is read
            raise RecordError("nothing is known of that stage yet")
        shown = self._shown.setdefault(place, {})
        before = self._open(place, claim.peer)
        if before is None or before.term <= claim.term:
            shown.pop(claim.peer, None)
            while len(shown) >= SHOWN:
                del shown[next(iter(shown))]
            shown[claim.peer] = data
        return claim

    def refusal(self, claim: ClaimRecord) -> str | None:
        """Why the claim is void; None where it may count, or the job's law is not known here yet."""
        law = self._access.law(claim.job)
        role = None if law is None else _ROLES.get(claim.role)
        if law is None or role is None:
            return None
        if claim.stage >= law.stages:
            return f"the job has {law.stages} stages"
        refused = self._access.refusal(claim.job, claim.peer, role, claim.stage, claim.grants)
        return self._too_many(law, claim) if refused is None and role == "own" else refused

    def _too_many(self, law: JobLaw, claim: ClaimRecord) -> str | None:
        """Why a peer that holds stages of the job may not hold this one as well."""
        most, known = law.limits.stages_per_owner, self._tenures.get((claim.job, claim.stage))
        if most == 0 or (known is not None and known.claim.peer == claim.peer):
            return None
        key, now = (claim.job, claim.peer), self._now()
        tenures = ((stage, self._tenures.get((claim.job, stage))) for stage in self._held.get(key, ()))
        held = {
            stage for stage, each in tenures if each and each.claim.peer == claim.peer and each.lives(now)
        }
        if key in self._held:
            self._held[key] = held
        return f"the job gives nobody more than {most} stages" if len(held - {claim.stage}) >= most else None

    # --- proofs

    def proves(self, claim: ClaimRecord, holding: Holding) -> bool:
        """Whether the claim's proof shows that `holding` is over."""
        if not claim.proof:
            return False
        voted = self._voted(claim, holding)
        return holding.peer in voted or self.is_majority((claim.job, claim.stage), holding.peer, voted)

    def proves_to_all(self, claim: ClaimRecord, holding: Holding) -> bool:
        """As `proves`, also to readers who know holders of near stages that we have never seen."""
        voted, (job, stage) = self._voted(claim, holding), (claim.job, claim.stage)
        if holding.peer in voted:
            return True
        unknown = sum((job, other) not in self._tenures for other in self._near(job, stage))
        return tenure.is_majority_to_all(voted, self._seats((job, stage), holding.peer), unknown)

    def votes(self, claim: ClaimRecord, holding: Holding) -> int:
        """How many votes against `holding` the claim's proof has."""
        if not claim.proof:
            return 0
        found = self._seats((claim.job, claim.stage), holding.peer)
        return tenure.count(self._voted(claim, holding), found)

    def _voted(self, claim: ClaimRecord, holding: Holding) -> set[PeerId]:
        """The voters whose votes against `holding` are in the claim's proof, up to the first forgery."""
        place, now = (claim.job, claim.stage), self._now()
        counting = {holding.peer, *self.voters(place, holding.peer)}

        def matters(vote: Vote) -> bool:
            return vote.holding == holding and vote.voter in counting and vote.is_valid(now)

        return {vote.voter for vote in self._read_votes(claim, matters)}

    def _read_votes(self, claim: ClaimRecord, matters: Callable[[Vote], bool]) -> Iterator[Vote]:
        """The votes in the claim's proof that matter, up to the first forgery."""

        def check(data: bytes) -> None:
            open_vote(data, claim.job, claim.stage, claim.peer, self._verify)

        return (vote for vote, _ in verified_items(claim.proof, parse_vote, matters, check))

    def is_majority(self, place: Place, suspect: PeerId, voted: set[PeerId]) -> bool:
        """Whether those who `voted` against the stage's holder, `suspect`, are a majority."""
        return bool(voted) and tenure.is_majority(voted, self._seats(place, suspect))

    def voters(self, place: Place, suspect: PeerId) -> tuple[PeerId, ...]:
        """The peers whose vote counts on whether `suspect` holds the stage."""
        return tuple(sorted({voter for seat in self._seats(place, suspect) for voter in seat.voters}))

    def stages_without_vote(self, place: Place, claim: ClaimRecord, holding: Holding) -> tuple[int, ...]:
        """The voting stages whose owners, as far as we know them, have no vote in the claim's proof; vacant ones, too."""
        voted, near = self._voted(claim, holding), self._near(*place)
        held = {stage: self._tenures.get((place[0], stage)) for stage in near}
        # A holder of several has one vote, the suspect none.
        excluded = voted | {holding.peer}
        return tuple(
            stage for stage in near if (known := held[stage]) is None or known.claim.peer not in excluded
        )

    def stages_to_reread(
        self, place: Place, own: ClaimRecord | None, claimant: PeerId | None = None
    ) -> tuple[int, ...]:
        """`stages_without_vote` of the claims to follow the stage's holder whose votes do not suffice as far as we know: those shown to us
        and the one read of `claimant`, however many the directory has."""
        held, now = self.tenure(place, own), self._now()
        if held is None or not held.lives(now):
            return ()
        shown = [self._open(place, peer) for peer in list(self._shown.get(place, ()))]
        read = [c for c in self._read.get(place, ()) if c.peer == claimant and c.role == "owner"]
        terms = range(held.claim.term + 1, held.claim.term + tenure.ROUNDS + 1)
        claims = [c for c in (*shown, *read) if c is not None and self.refusal(c) is None]
        void = [c for c in claims if c.proof and c.term in terms and c.expires_at > now]
        return tuple(
            sorted(
                {stage for claim in void for stage in self.stages_without_vote(place, claim, held.holding)}
            )
        )

    def unproven(self, place: Place, own: ClaimRecord) -> Holding | None:
        """The holding that our claim of the stage should prove to be over and does not: of the holder before, whose lease ran out,
        or of a rival (`rivals`)."""
        known = self._tenures.get(place)
        if known is None or known.claim.peer != self._peer_id:
            return None
        if not known.settled:
            return known.lapsed
        return max(self.rivals(place, own), key=lambda rival: rival.term, default=None)

    def unseen_successor(self, place: Place, own: ClaimRecord) -> ClaimRecord | None:
        """Of a stage that we hold and whose voting stages are all vacant: the live claim that follows ours by the votes, however old,
        of a majority of the last holders of these."""
        now, holding = self._now(), Holding(own.peer, own.term)
        near = [each for other in self._near(*place) if (each := self._tenures.get((place[0], other)))]
        near = [each for each in near if each.claim.peer != own.peer]
        if any(each.lives(now) for each in near):
            return None
        unknown = sum((place[0], other) not in self._tenures for other in self._near(*place))
        found = tenure.seats(near, own.peer, now, last=True)
        counting = {voter for seat in found for voter in seat.voters}

        def matters(vote: Vote) -> bool:
            return vote.holding == holding and vote.voter in counting

        for claim in self.seen(place, own):
            follows = claim.peer != own.peer and own.term < claim.term <= own.term + tenure.ROUNDS
            if claim.role == "owner" and follows and claim.expires_at > now:
                voted = {vote.voter for vote in self._read_votes(claim, matters)}
                if tenure.is_majority_to_all(voted, found, unknown):
                    return claim
        return None

    def rivals(self, place: Place, own: ClaimRecord) -> tuple[Holding, ...]:
        """Who claims the stage beside us and is not proven to be gone, under a term up to ours."""
        now = self._now()
        others = (
            Holding(claim.peer, claim.term)
            for claim in self.seen(place, own)
            if claim.role == "owner" and claim.peer != self._peer_id and claim.expires_at > now
        )
        return tuple(each for each in others if each.term <= own.term and not self.proves(own, each))

    def _seats(self, place: Place, suspect: PeerId | None = None) -> tuple[Seat, ...]:
        held = (self._tenures.get((place[0], other)) for other in self._near(*place))
        return tenure.seats((each for each in held if each is not None), suspect, self._now())

    def _has_no_voters(self, place: Place) -> bool:
        """Whether the stage has no voting stages."""
        return not self._near(*place)

    def _near(self, job: JobId, stage: int) -> tuple[int, ...]:
        """The voting stages of this one; none while the job's law is not known here."""
        law = self._access.law(job)
        return () if law is None else tenure.voting_stages(stage, law.stages)

    def _chosen(self, claim: ClaimRecord) -> bool:
        """Whether the job's author proposed the claim's peer for the stage, or a peer that it proposed for any stage voted for this
        one, however long ago."""
        law, stage = self._access.law(claim.job), claim.stage
        if law is None:
            return False
        if stage < len(law.proposed) and law.proposed[stage] == claim.peer:
            return True
        return any(True for _ in self._read_votes(claim, lambda vote: vote.voter in law.chosen))

    def _ceiling(self, job: JobId) -> int:
        law = self._access.law(job)
        return tenure.ceiling(0 if law is None else law.launched_at, self._now())

    def _open(self, place: Place, peer: PeerId) -> ClaimRecord | None:
        shown = self._shown.get(place, {})
        if peer not in shown:
            return None
        try:
            claim = self._unsealed(shown[peer])
        except RecordError:
            del shown[peer]
            return None
        assert isinstance(claim, ClaimRecord), "only claims are accepted"
        return claim
