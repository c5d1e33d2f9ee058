"""Holding stages: claims published, won, renewed every heartbeat, lost or released. Whose claim counts is the rule of
`fusion.swarm.claims.tenure`.

Knows the directory and nothing of what a stage does. A lease decides who *should* act for a stage; that two peers never do at
once is ensured by the receivers, which refuse a lower term.

No two peers hold a stage under one term while the directory shows them each other's claims: a claimant publishes first and reads
then, so of two that claim at one term at least one sees the other, and raises its term or gives way.
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
    confirm_seconds: float = 0.3  # between publishing a claim and reading the others
    patience_seconds: float = 0.5  # for slow directory nodes, where a caller waits for the publication
    remembered_places: int = 65_536  # stages whose holder is remembered
    prove_seconds: float = 3.0  # between two requests for votes on a stage of ours

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


# Asks a stage's voters for their votes against a holder, in our favour.
RequestVotes = Callable[[Place, Holding], Awaitable[tuple[bytes, ...]]]


class Leases:
    """The stages that this peer owns, and in `standbys` those that it stands by for; `voting` has the votes on who holds stages.
    `async with Leases(...)` renews its claims every heartbeat and releases them at the end; `beat` is one heartbeat, for
    tests that drive the clock themselves.

    `on_lost` is called (in the loop, must not block) with our old claim when a higher claim has taken a stage from us;
    the stage is then no longer in `owned()`. `request_votes` asks the voters of a stage of ours for their votes against
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
        self._publisher = ClaimPublisher(directory, self._config.ttl_seconds)
        self._cache = ClaimCache(
            peer_id,
            directory.unsealed,
            self._config.remembered_places,
            directory.now,
            directory.verify,
            self.access,
        )
        self.standbys = Standbys(peer_id, self._publisher, self._cache, self.access.chain)
        self.voting = Voting(peer_id, directory, self._publisher, self._cache)
        self._locks: WeakValueDictionary[Place, asyncio.Lock] = WeakValueDictionary()  # of claims under way
        self._proving: dict[Place, float] = {}  # when votes were requested last
        # Since when another peer has followed us, where no neighbour is left to vote on it (`unseen_successor`).
        self._followed: dict[Place, float] = {}
        self._heartbeat = Heartbeat(
            self._publisher, self._renew, self.standbys.renew, self._config.heartbeat_seconds
        )
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._heartbeat.run(), name="leases")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release every stage and stop renewing. Idempotent."""
        tasks = (
            [*self._publisher.background] if self._loop is None else [self._loop, *self._publisher.background]
        )
        self._loop = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._heartbeat.aclose(), *tasks, return_exceptions=True)
        held = list(self._publisher.owned)
        for job, stage in list(self._publisher.standby_claims):
            self.standbys.stand_down(job, stage)
        results = await asyncio.gather(
            self._publisher.publish_due(),
            *(self.release(job, stage) for job, stage in held),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, SwarmError):
                raise result

    def owned(self) -> tuple[ClaimRecord, ...]:
        return tuple(self._publisher.owned.values())

    def holds(self, job: JobId, stage: int) -> ClaimRecord | None:
        """Our live claim of the stage, or None."""
        return self._publisher.owned.get((job, stage))

    def know(self, law: JobLaw) -> None:
        """Apply the job's law: from now on its claims count only of peers that it admits and below its ceiling of terms, and the
        owners of its stages vote on each other."""
        self._cache.know(law)

    def refusal(self, job: JobId, stage: int, role: Role) -> str | None:
        """Why we may not own the stage, or stand by for it; None where we may, or the job's law is not known here yet."""
        grants = self.access.chain(job)
        claim = ClaimRecord(
            job=job, stage=stage, peer=self.peer_id, role="owner" if role == "own" else "standby", term=0, score=0.0,
            step=0, load=0.0, grants=grants,
        )  # fmt: skip
        return self._cache.refusal(claim)

    def observe(self, job: JobId, stage: int, term: int) -> None:
        """Remember a term from a StaleTerm refusal or a job record: our next claim of a vacant stage goes above it. It does not
        affect how others' claims count."""
        self._cache.observe((job, stage), term)

    def known_term(self, job: JobId, stage: int) -> int:
        """The term of the last holder of the stage that we know of; 0 for none."""
        return self._cache.term((job, stage))

    def known_holder(self, job: JobId, stage: int) -> PeerId | None:
        """The last holder of the stage that we know of. Cheap: judges no claims."""
        known = self.known_tenure(job, stage)
        return None if known is None else known.claim.peer

    def known_tenure(self, job: JobId, stage: int) -> Tenure | None:
        """`tenure` as judged last. Cheap, for every frame and for requests of strangers."""
        return self._cache.known((job, stage))

    def tenure(self, job: JobId, stage: int) -> Tenure | None:
        """Who holds the stage, or held it last, by the claims that we know; reads nothing."""
        place = (job, stage)
        return self._cache.tenure(place, self._publisher.current(place))

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """Read the live claims of a stage, one per peer (ours as last published); of those to own it only the one that counts."""
        self._cache.read((job, stage), await self._directory.claims(job, stage))
        return self.recent(job, stage)

    async def claims_of(self, job: JobId, stages: Iterable[int]) -> tuple[tuple[ClaimRecord, ...], ...]:
        """`claims` of several stages, each judged once all have been read: the holders of some are the voters on others."""
        stages = tuple(stages)
        await asyncio.gather(*(self.claims(job, stage) for stage in stages))
        return tuple(self.recent(job, stage) for stage in stages)

    def recent(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """`claims` as read last, with our own claim and those shown to us (`accept_claim`) since; reads nothing."""
        place = (job, stage)
        return self._cache.recent(place, self._publisher.current(place))

    async def claims_or_recent(
        self, job: JobId, stage: int, seconds: float | None = None
    ) -> tuple[ClaimRecord, ...]:
        """`claims`, or `recent` where the directory cannot be read within `seconds`."""
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
        """Try to become the owner of a vacant stage: publish a claim at the next term, read who won.

        `over`: owners up to that term are gone, as `proof` shows to others, even where the directory still has their claims;
        nothing is read before the claim is published, unless we have seen a higher term. Without `confirm` nothing is
        read afterwards either: for a stage that its owner hands over to us.
        Returns our claim (`ready` False), at once if we hold the stage already; None where another peer
        owns it or won. Raises RecordError (bad arguments) or TransportError (no directory node answered).
        """
        place = (job, stage)
        async with self._locks.setdefault(place, asyncio.Lock()):
            held = self._publisher.owned.get(place)
            if held is not None:
                # Two callers may know of different owners before us; a second claim above our own would strand what we host
                # under the first.
                return held
            if over == 0 or self.known_term(job, stage) > over:
                owner = await self.owner(job, stage)
                if owner is not None and owner.term > over:
                    return None
            claim = ClaimRecord(
                job=job,
                stage=stage,
                peer=self.peer_id,
                role="owner",
                term=1 + max(over, self._term_to_exceed(place)),
                score=score,
                step=0,
                load=0.0,
                grants=self.access.chain(job),
                proof=proof,
            )
            won = await self._win_or_withdraw(claim, over, confirm)
            if won is not None:
                self._publisher.owned[place] = won
                self.voting.forget(place)
                self.tenure(job, stage)
            return won

    def _term_to_exceed(self, place: Place) -> int:
        before = self.tenure(*place)
        vacant = before is None or not before.lives(self._directory.now())
        # Of a vacant stage also above unproven terms (`observe`): a follower of a live holder must stay close to its term.
        return self._cache.highest(place) if vacant else self.known_term(*place)

    async def _win_or_withdraw(self, claim: ClaimRecord, over: int, confirm: bool) -> ClaimRecord | None:
        """As `_win`; if another wins, withdraw the claim, and stand by for the stage again if we did before."""
        place = (claim.job, claim.stage)
        standby = self._publisher.standby_claims.pop(place, None)  # must not be published over the claim
        won: ClaimRecord | None = None
        try:
            won = await self._win(claim, over, confirm)
        finally:
            tried = self._publisher.claiming.pop(place)
            if won is None:
                self._cache.give_up(place)
                if standby is not None:
                    term = max(standby.term, tried.term)
                    self._publisher.standby_claims[place] = replace(standby, term=term)
                await self._publisher.withdraw(tried)
        return won

    async def _win(self, claim: ClaimRecord, over: int, confirm: bool) -> ClaimRecord | None:
        """Publish `claim`, raised above every rival, until nobody else can hold its term; None if another wins."""
        place = (claim.job, claim.stage)
        for _ in range(ROUNDS):
            own = self._publisher.begin_claiming(claim)
            await self._publisher.publish(claim, self._config.patience_seconds if over else None)
            if not confirm:
                return claim
            if not over:
                await asyncio.sleep(self._config.confirm_seconds)
            self._cache.read(place, await self._directory.claims(*place))
            held = self._cache.tenure(place, own)
            if held is None or held.claim.peer != claim.peer:
                return None
            # A rival of this term may have read before we published and believe that it won: no two holders may share a
            # term, or receivers could not tell them apart. Nor may we use a released one.
            rivals = [
                rival.term
                for rival in self._cache.seen(place, own)
                if rival.peer != claim.peer
                and rival.role in ("owner", "released")
                and claim.term <= rival.term < held.floor + ROUNDS
                and (held.over is None or self._cache.proves(rival, held.over))
            ]
            if not rivals:
                return claim
            claim = replace(claim, term=max(rivals) + 1)
        return None

    def stale_claim(self, job: JobId, stage: int) -> ClaimRecord | None:
        """Of a stage without a holder: the live claim of a peer that claims it under a used term and should be sent StaleTerm; reads
        nothing. Requests to the stage may go to that peer: it may rightly hold it, where we believed a rival that gave way to it."""
        return self._cache.stale_claim((job, stage), self._publisher.current((job, stage)))

    def unproven(self, job: JobId, stage: int) -> Holding | None:
        """Of a stage that we hold: a peer that claims it as well, or held it before us, and that our claim does not prove to be
        gone; reads nothing."""
        held = self._publisher.owned.get((job, stage))
        return None if held is None else self._cache.unproven((job, stage), held)

    def rivals(self, job: JobId, stage: int) -> tuple[Holding, ...]:
        """Of a stage that we hold: who claims it as well and is not proven to be gone; reads nothing."""
        held = self._publisher.owned.get((job, stage))
        return () if held is None else self._cache.rivals((job, stage), held)

    def sealed(self, job: JobId, stage: int) -> bytes | None:
        """Our claim of a stage that we own, signed now, to show to a peer that may not have read it in the directory."""
        held = self._publisher.owned.get((job, stage))
        return None if held is None else self._directory.sealed(held, ttl_seconds=self._config.ttl_seconds)

    def accept_claim(self, data: bytes) -> ClaimRecord:
        """Take in a sealed claim of an owner that a peer showed us, as if read from the directory, until it expires; we may lose the
        stage by it. Raises RecordError for anything else, and for a claim that does not count."""
        claim = self._cache.accept_claim(data)
        place = (claim.job, claim.stage)
        tenure, held = self.tenure(*place), self._publisher.owned.get(place)
        if tenure is None or tenure.holding != (claim.peer, claim.term):
            raise RecordError(f"stage {claim.stage} is not {claim.peer}'s under term {claim.term}")
        if held is not None and claim.peer != self.peer_id:
            self._give_way(held, claim)
            self._publisher.withdraw_soon(held)
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
        """Change fields of our claim, as owner or standby; published with the next heartbeat, at once where `ready` changed.
        Ignored for a stage of which we have no claim."""
        place = (job, stage)
        claims = self._publisher.owned if place in self._publisher.owned else self._publisher.standby_claims
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
            self._publisher.publish_soon(changed)

    async def release(self, job: JobId, stage: int) -> None:
        """Give the stage up: publish our claim as "released", so that others need not wait for it to expire."""
        held = self._publisher.owned.pop((job, stage), None)
        if held is not None:
            self._forget((job, stage))
            await self._publisher.withdraw(held)

    # --- renewing

    async def beat(self) -> None:
        """Renew every claim of ours, then give up those that a higher claim has beaten."""
        await asyncio.gather(*self._heartbeat.beat())

    async def _renew(self, place: Place) -> None:
        held = self._publisher.owned.get(place)
        if held is None:
            return
        try:
            refused = self.refusal(*place, "own")
            if refused is not None:  # our grant has expired or was revoked: our claim is void
                self._leave(held, refused)
                await self._publisher.withdraw(held)
                return
            grants = self.access.chain(held.job)
            if grants != held.grants:
                held = self._publisher.owned[place] = replace(held, grants=grants)
            if self._publisher.lapsed(held):
                # We were away: another may have followed by right, which we must see before we renew.
                await self._check_holder(place)
            if place in self._publisher.owned:
                await self._publisher.publish(self._publisher.owned[place], self._config.patience_seconds)
                await self._check_holder(place)
        except SwarmError as error:
            logger.warning("claim of stage %d of job %.8s not renewed: %s", place[1], place[0], error)

    async def _check_holder(self, place: Place) -> None:
        """Read who holds a stage of ours, and give way if we have lost it."""
        self._cache.read(place, await self._directory.claims(*place))
        held, tenure = self._publisher.owned.get(place), self.tenure(*place)
        if held is None or tenure is None:  # it may have been released while we read
            return
        if tenure.claim.peer != self.peer_id:
            if tenure.lives(self._directory.now()):
                self._give_way(held, tenure.claim)
                await self._publisher.withdraw(held)
            return
        now = self._directory.now()
        successor = self._cache.unseen_successor(place, held)
        if successor is None:
            self._followed.pop(place, None)
        elif now - self._followed.setdefault(place, now) >= DESERTED_SECONDS:
            self._give_way(held, successor)
            await self._publisher.withdraw(held)
            return
        unproven = self.unproven(*place)
        if unproven is not None and now - self._proving.get(place, 0.0) >= self._config.prove_seconds:
            self._proving[place] = now
            task = asyncio.create_task(self._prove(held, unproven), name="proving a claim")
            self._publisher.background.add(task)
            task.add_done_callback(self._publisher.background.discard)

    async def _prove(self, held: ClaimRecord, holding: Holding) -> None:
        """Request votes against `holding`, and carry them in our claim where they help it."""
        place = (held.job, held.stage)
        votes = () if self.request_votes is None else await self.request_votes(place, holding)
        owned = self._publisher.owned.get(place)
        if owned is None or owned.term != held.term:
            return
        # Against a holder whose lease ran out, fewer votes than a majority help too: of rivals the one with more counts.
        tenure = self.tenure(*place)
        some = bool(votes) and tenure is not None and not tenure.settled and tenure.lapsed == holding
        if some or self.voting.is_proof(*place, holding, self.peer_id, votes):
            self._publisher.owned[place] = replace(owned, proof=votes)
            self._publisher.publish_soon(owned)

    def _forget(self, place: Place) -> None:
        """Drop the state of our claim of the stage, which is given up."""
        self._cache.give_up(place)
        self._proving.pop(place, None)
        self._followed.pop(place, None)
        self.voting.forget(place)

    def _give_way(self, held: ClaimRecord, best: ClaimRecord) -> None:
        self._leave(held, f"went from us (term {held.term}) to {best.peer} (term {best.term})")

    def _leave(self, held: ClaimRecord, reason: str) -> None:
        del self._publisher.owned[held.job, held.stage]
        self._forget((held.job, held.stage))
        logger.info("stage %d of job %.8s: %s", held.stage, held.job, reason)
        if self.on_lost is not None:
            self.on_lost(held)
