"""Holding stages: claims published, won, renewed every heartbeat, lost or released. Whose claim counts is the rule of
`fusion.swarm.claims.tenure`.

Knows the directory and nothing of what a stage does. A lease tells who *should* speak for a stage; that two peers
never do at once is the receivers' business (they refuse a lower term).

No two peers hold a stage under one term while the directory shows them each other's claims: who claims publishes
first and looks then, so of two that meet at a term at least one sees the other, and goes above it or gives way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self
from weakref import WeakValueDictionary

from fusion.swarm.authority.access import Access
from fusion.swarm.authority.grants import Role
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.claims.claim_cache import ClaimCache
from fusion.swarm.claims.claim_publisher import ClaimPublisher
from fusion.swarm.claims.election import winner
from fusion.swarm.claims.heartbeat import Heartbeat
from fusion.swarm.claims.standbys import Standbys
from fusion.swarm.claims.tenure import DESERTED_SECONDS, ROUNDS, Holding, Tenure
from fusion.swarm.claims.voting import Voting
from fusion.swarm.directory.api import HEARTBEAT_SECONDS, Directory
from fusion.swarm.directory.records import ClaimRecord, JobId, Place
from fusion.swarm.directory.sealing import MAX_CLAIM_SECONDS
from fusion.swarm.errors import RecordError, SwarmError
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LeaseConfig:
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    confirm_seconds: float = 0.3  # between publishing a claim and looking who else published one
    patience_seconds: float = 0.5  # for nodes that take a claim slowly, where something waits for it
    remembered_places: int = 65_536  # stages whose holder we keep in mind
    prove_seconds: float = 3.0  # from one request for votes on a stage of ours to the next

    def __post_init__(self) -> None:
        if self.heartbeat_seconds <= 0 or self.confirm_seconds < 0 or self.remembered_places < 1:
            raise ValueError(
                "heartbeat_seconds and remembered_places must be positive, confirm_seconds at least 0"
            )
        if self.patience_seconds <= 0:
            raise ValueError(f"patience_seconds must be positive, not {self.patience_seconds}")

    @property
    def ttl_seconds(self) -> float:
        return min(3 * self.heartbeat_seconds, MAX_CLAIM_SECONDS)


# The votes of a stage's voters against one who held it, in our favour.
RequestVotes = Callable[[Place, Holding], Awaitable[tuple[bytes, ...]]]


class Leases:
    """The stages that this peer owns, and in `standbys` those that it stands by for; `voting` is what is said of who holds
    them. `async with Leases(...)` renews its claims every heartbeat and releases them at the end; `beat` is one heartbeat,
    for tests that drive the clock themselves.

    `on_lost` is called (in the loop, must not block) with our old claim when a higher claim has taken a stage from us;
    the stage is then no longer in `mine()`. `request_votes` asks the voters of a stage of ours for their votes against
    another holder of it.
    """

    def __init__(
        self,
        peer_id: PeerId,
        directory: Directory,
        config: LeaseConfig | None = None,
        on_lost: Callable[[ClaimRecord], None] | None = None,
        access: Access | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.access = access or Access(None, directory.now, directory.verify)
        self.on_lost = on_lost
        self.request_votes: RequestVotes | None = None
        self._directory = directory
        self._config = config or LeaseConfig()
        self._ours = ClaimPublisher(directory, self._config.ttl_seconds)
        self._cache = ClaimCache(
            peer_id,
            directory.unsealed,
            self._config.remembered_places,
            directory.now,
            directory.verify,
            self.access,
        )
        self.standbys = Standbys(peer_id, self._ours, self._cache, self.access.chain)
        self.voting = Voting(peer_id, directory, self._ours, self._cache)
        self._locks: WeakValueDictionary[Place, asyncio.Lock] = WeakValueDictionary()  # of claims under way
        self._proving: dict[Place, float] = {}  # when votes were asked for last
        # Since when another has followed us of whom no neighbour is left to tell us.
        self._followed: dict[Place, float] = {}
        self._heartbeat = Heartbeat(
            self._ours, self._renew, self.standbys.renew, self._config.heartbeat_seconds
        )
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._heartbeat.run(), name="leases")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release every stage and stop renewing. Idempotent."""
        tasks = [*self._ours.late] if self._loop is None else [self._loop, *self._ours.late]
        self._loop = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._heartbeat.aclose(), *tasks, return_exceptions=True)
        held = list(self._ours.owned)
        for job, stage in list(self._ours.standby_claims):
            self.standbys.stand_down(job, stage)
        results = await asyncio.gather(
            self._ours.publish_due(),
            *(self.release(job, stage) for job, stage in held),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, SwarmError):
                raise result

    def mine(self) -> tuple[ClaimRecord, ...]:
        return tuple(self._ours.owned.values())

    def holds(self, job: JobId, stage: int) -> ClaimRecord | None:
        """Our live claim of the stage, or None."""
        return self._ours.owned.get((job, stage))

    def know(self, law: JobLaw) -> None:
        """From now on claims of the job count only of those whom its manifest admits, at most at its ceiling of terms, and
        the owners of its stages have a vote on each other's."""
        self._cache.know(law)

    def refusal(self, job: JobId, stage: int, role: Role) -> str | None:
        """Why we may not own the stage, or stand by for it; None where we may, or the job's law is not known yet."""
        grants = self.access.chain(job)
        claim = ClaimRecord(
            job=job, stage=stage, peer=self.peer_id, role="owner" if role == "own" else "standby", term=0, score=0.0,
            step=0, load=0.0, grants=grants,
        )  # fmt: skip
        return self._cache.refusal(claim)

    def observe(self, job: JobId, stage: int, term: int) -> None:
        """Remember a term that somebody speaks of (in a StaleTerm refusal, a job record): our next claim of a vacant stage
        goes above it. Nobody else's claim counts for less."""
        self._cache.observe((job, stage), term)

    def known_term(self, job: JobId, stage: int) -> int:
        """The term of whoever held the stage last, as far as we know; 0 for none."""
        return self._cache.term((job, stage))

    def known_holder(self, job: JobId, stage: int) -> PeerId | None:
        """Who held the stage last, as far as we knew when we last looked: costs nothing, however many claim it."""
        known = self.known_tenure(job, stage)
        return None if known is None else known.claim.peer

    def known_tenure(self, job: JobId, stage: int) -> Tenure | None:
        """As `tenure`, as far as we knew when we last looked: for what strangers may ask for, and for every frame."""
        return self._cache.known((job, stage))

    def tenure(self, job: JobId, stage: int) -> Tenure | None:
        """Who holds the stage, or held it last, as far as we know; nothing is asked."""
        place = (job, stage)
        return self._cache.tenure(place, self._ours.of(place))

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """The live claims of a stage, one per peer (ours as we last said it); of those to own it the one that counts."""
        self._cache.read((job, stage), await self._directory.claims(job, stage))
        return self.recent(job, stage)

    async def claims_of(self, job: JobId, stages: Iterable[int]) -> tuple[tuple[ClaimRecord, ...], ...]:
        """`claims` of several stages, each judged once all have been read: whoever follows at one does so by the votes of those who
        hold others."""
        stages = tuple(stages)
        await asyncio.gather(*(self.claims(job, stage) for stage in stages))
        return tuple(self.recent(job, stage) for stage in stages)

    def recent(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """What `claims` said last, with our own claim and what was shown to us (`credit`) since; nothing is asked."""
        place = (job, stage)
        return self._cache.recent(place, self._ours.of(place))

    async def claims_or_recent(
        self, job: JobId, stage: int, seconds: float | None = None
    ) -> tuple[ClaimRecord, ...]:
        """`claims`; what it said last where the directory cannot be read, or takes longer than that."""
        try:
            async with asyncio.timeout(seconds):
                return await self.claims(job, stage)
        except (SwarmError, TimeoutError) as error:
            logger.debug("claims of stage %d of job %.8s not read: %s", stage, job, error or "no answer")
            return self.recent(job, stage)

    async def owner(self, job: JobId, stage: int) -> ClaimRecord | None:
        """The live claim that owns the stage now, or None."""
        return winner(await self.claims(job, stage))

    async def claim(
        self,
        job: JobId,
        stage: int,
        score: float,
        *,
        over: int = 0,
        proof: tuple[bytes, ...] = (),
        confirm: bool = True,
    ) -> ClaimRecord | None:
        """Try to become the owner of a vacant stage: publish a claim at the next term, look who won.

        `over`: owners up to that term are known to be gone, as `proof` shows to others, whatever the directory says;
        nothing is read before the claim is published, unless we have seen a higher term. Without `confirm` nothing is
        read afterwards either: for a stage that its owner hands us.
        Returns our claim (`ready` False), at once if we hold the stage already; None where another peer
        owns it or won. Raises RecordError (bad arguments) or TransportError (nobody could be asked).
        """
        place = (job, stage)
        async with self._locks.setdefault(place, asyncio.Lock()):
            held = self._ours.owned.get(place)
            if held is not None:
                # Whoever is gone, we are not: two who ask may know of different owners before us, and a claim above our
                # own would leave what we host under it behind.
                return held
            if over == 0 or self.known_term(job, stage) > over:
                owner = await self.owner(job, stage)
                if owner is not None and owner.term > over:
                    return None
            ours = ClaimRecord(
                job=job,
                stage=stage,
                peer=self.peer_id,
                role="owner",
                term=1 + max(over, self._term_to_pass(place)),
                score=score,
                step=0,
                load=0.0,
                grants=self.access.chain(job),
                proof=proof,
            )
            won = await self._win_or_withdraw(ours, over, confirm)
            if won is not None:
                self._ours.owned[place] = won
                self.voting.forget(place)
                self.tenure(job, stage)
            return won

    def _term_to_pass(self, place: Place) -> int:
        before = self.tenure(*place)
        vacant = before is None or not before.lives(self._directory.now())
        # Above what was only spoken of, too, where nobody has to be shown that we follow the holder: it costs a number.
        return self._cache.highest(place) if vacant else self.known_term(*place)

    async def _win_or_withdraw(self, ours: ClaimRecord, over: int, confirm: bool) -> ClaimRecord | None:
        """As `_win`; where we have not won, we stand by for the stage again if we did so before."""
        place = (ours.job, ours.stage)
        standby = self._ours.standby_claims.pop(place, None)  # must not be published over the claim
        won: ClaimRecord | None = None
        try:
            won = await self._win(ours, over, confirm)
        finally:
            tried = self._ours.claiming.pop(place)
            if won is None:
                self._cache.give_up(place)
                if standby is not None:
                    term = max(standby.term, tried.term)
                    self._ours.standby_claims[place] = replace(standby, term=term)
                await self._ours.withdraw(tried)
        return won

    async def _win(self, ours: ClaimRecord, over: int, confirm: bool) -> ClaimRecord | None:
        """Publish `ours`, raised above every rival, until nobody else can hold its term; None if another wins."""
        place = (ours.job, ours.stage)
        for _ in range(ROUNDS):
            mine = self._ours.claims(ours)
            await self._ours.publish(ours, self._config.patience_seconds if over else None)
            if not confirm:
                return ours
            if not over:
                await asyncio.sleep(self._config.confirm_seconds)
            self._cache.read(place, await self._directory.claims(*place))
            held = self._cache.tenure(place, mine)
            if held is None or held.claim.peer != ours.peer:
                return None
            # A rival of this term may have looked before we published and believe that it won: no two holders may
            # share a term, or receivers could not tell them apart. Nor may we take one that somebody released.
            rivals = [
                claim.term
                for claim in self._cache.seen(place, mine)
                if claim.peer != ours.peer
                and claim.role in ("owner", "released")
                and ours.term <= claim.term < held.floor + ROUNDS
                and (held.over is None or self._cache.proves(claim, held.over))
            ]
            if not rivals:
                return ours
            ours = replace(ours, term=max(rivals) + 1)
        return None

    def behind(self, job: JobId, stage: int) -> ClaimRecord | None:
        """The claim of whoever should be told that the stage was held under its term before; nothing is asked. Whoever only asks the
        stage for something goes by it: it may be a rival that we went by who gave way to it, and then nobody else will come."""
        return self._cache.behind((job, stage), self._ours.of((job, stage)))

    def unproven(self, job: JobId, stage: int) -> Holding | None:
        """Of a stage that we hold: whoever claims it as well, or held it before us, and is not shown to be gone; nothing is
        asked."""
        held = self._ours.owned.get((job, stage))
        return None if held is None else self._cache.unproven((job, stage), held)

    def rivals(self, job: JobId, stage: int) -> tuple[Holding, ...]:
        """Of a stage that we hold: who claims it as well and is not shown to be gone; nothing is asked."""
        held = self._ours.owned.get((job, stage))
        return () if held is None else self._cache.rivals((job, stage), held)

    def sealed(self, job: JobId, stage: int) -> bytes | None:
        """Our claim of a stage that we own, signed now, to be shown to a peer that has not seen it in the directory."""
        held = self._ours.owned.get((job, stage))
        return None if held is None else self._directory.sealed(held, ttl_seconds=self._config.ttl_seconds)

    def credit(self, data: bytes) -> ClaimRecord:
        """Reckon with a sealed claim of an owner that somebody showed us, as if the directory had it, until it expires; it
        may cost us the stage. Raises RecordError for anything else, and for a claim that does not count."""
        claim = self._cache.credit(data)
        place = (claim.job, claim.stage)
        tenure, held = self.tenure(*place), self._ours.owned.get(place)
        if tenure is None or tenure.holding != (claim.peer, claim.term):
            raise RecordError(f"stage {claim.stage} is not {claim.peer}'s under term {claim.term}")
        if held is not None and claim.peer != self.peer_id:
            self._give_way(held, claim)
            self._ours.withdraw_soon(held)
        return claim

    def update(
        self,
        job: JobId,
        stage: int,
        *,
        step: int | None = None,
        load: float | None = None,
        ready: bool | None = None,
    ) -> None:
        """Change what our claim says, an owner's or a standby's; published with the next heartbeat, at once where
        `ready` changed. Ignored for a stage of which we have no claim."""
        place = (job, stage)
        claims = self._ours.owned if place in self._ours.owned else self._ours.standby_claims
        held = claims.get(place)
        if held is None:
            return
        changed = replace(
            held,
            step=held.step if step is None else step,
            load=held.load if load is None else load,
            ready=held.ready if ready is None else ready,
        )
        claims[place] = changed
        if changed.ready != held.ready:
            self._ours.publish_soon(changed)

    async def release(self, job: JobId, stage: int) -> None:
        """Give the stage up: our claim becomes "released", so that others need not wait for it to expire."""
        held = self._ours.owned.pop((job, stage), None)
        if held is not None:
            self._forget((job, stage))
            await self._ours.withdraw(held)

    # --- renewing

    async def beat(self) -> None:
        """Renew every claim of ours, then give up those that a higher claim has beaten."""
        await asyncio.gather(*self._heartbeat.beat())

    async def _renew(self, place: Place) -> None:
        held = self._ours.owned.get(place)
        if held is None:
            return
        try:
            refused = self.refusal(*place, "own")
            if refused is not None:  # our grant has expired, or was revoked: our claim counts for nobody
                self._leave(held, refused)
                await self._ours.withdraw(held)
                return
            grants = self.access.chain(held.job)
            if grants != held.grants:
                held = self._ours.owned[place] = replace(held, grants=grants)
            if self._ours.lapsed(held):
                # We were away: whoever has followed meanwhile did so rightly, and must be seen before we go on.
                await self._look(place)
            if place in self._ours.owned:
                await self._ours.publish(self._ours.owned[place], self._config.patience_seconds)
                await self._look(place)
        except SwarmError as error:
            logger.warning("claim of stage %d of job %.8s not renewed: %s", place[1], place[0], error)

    async def _look(self, place: Place) -> None:
        """Who holds a stage of ours; we may have lost it."""
        self._cache.read(place, await self._directory.claims(*place))
        held, tenure = self._ours.owned.get(place), self.tenure(*place)
        if held is None or tenure is None:  # it may have been released while we looked
            return
        if tenure.claim.peer != self.peer_id:
            if tenure.lives(self._directory.now()):
                self._give_way(held, tenure.claim)
                await self._ours.withdraw(held)
            return
        now = self._directory.now()
        successor = self._cache.unseen_successor(place, held)
        if successor is None:
            self._followed.pop(place, None)
        elif now - self._followed.setdefault(place, now) >= DESERTED_SECONDS:
            self._give_way(held, successor)
            await self._ours.withdraw(held)
            return
        unproven = self.unproven(*place)
        if unproven is not None and now - self._proving.get(place, 0.0) >= self._config.prove_seconds:
            self._proving[place] = now
            task = asyncio.create_task(self._prove(held, unproven), name="proving a claim")
            self._ours.late.add(task)
            task.add_done_callback(self._ours.late.discard)

    async def _prove(self, held: ClaimRecord, holding: Holding) -> None:
        """Have our claim carry the votes of voters that `holding` is over."""
        place = (held.job, held.stage)
        votes = () if self.request_votes is None else await self.request_votes(place, holding)
        owned = self._ours.owned.get(place)
        if owned is None or owned.term != held.term:
            return
        # Of a holder whose lease ran out fewer than a majority count too, against rivals that have fewer still.
        tenure = self.tenure(*place)
        some = bool(votes) and tenure is not None and not tenure.settled and tenure.lapsed == holding
        if some or self.voting.is_proof(*place, holding, self.peer_id, votes):
            self._ours.owned[place] = replace(owned, proof=votes)
            self._ours.publish_soon(owned)

    def _forget(self, place: Place) -> None:
        """What was about our claim of the stage, which is no more."""
        self._cache.give_up(place)
        self._proving.pop(place, None)
        self._followed.pop(place, None)
        self.voting.forget(place)

    def _give_way(self, held: ClaimRecord, best: ClaimRecord) -> None:
        self._leave(held, f"went from us (term {held.term}) to {best.peer} (term {best.term})")

    def _leave(self, held: ClaimRecord, reason: str) -> None:
        del self._ours.owned[held.job, held.stage]
        self._forget((held.job, held.stage))
        logger.info("stage %d of job %.8s: %s", held.stage, held.job, reason)
        if self.on_lost is not None:
            self.on_lost(held)
