"""Holding stages: claims published, won, renewed every heartbeat, lost or released. The rule is `fusion.swarm.claims.election`.

Knows the directory and nothing of what a stage does. A lease tells who *should* speak for a stage; that two peers
never do at once is the receivers' business (they refuse a lower term).

No two peers hold a stage under one term while the directory shows them each other's claims: who claims publishes
first and looks then, so of two that meet at a term at least one sees the other, and goes above it or gives way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from fusion.swarm.authority.law import JobLaw
from fusion.swarm.claims.claim_cache import ClaimCache, Slot
from fusion.swarm.claims.claim_publisher import ClaimPublisher
from fusion.swarm.claims.election import next_term, rank, rivals, stands_by, winner
from fusion.swarm.claims.standbys import Standbys
from fusion.swarm.directory.api import HEARTBEAT_SECONDS, Directory
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.directory.sealing import MAX_CLAIM_SECONDS
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

_ROUNDS = 8  # of raising a claim above rivals at the same term


@dataclass(frozen=True, kw_only=True)
class LeaseConfig:
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    confirm_seconds: float = 0.3  # between publishing a claim and looking who else published one
    patience_seconds: float = 0.5  # for nodes that take a claim slowly, where somebody waits for a takeover
    remembered_slots: int = 65_536  # stages whose highest term we keep in mind

    def __post_init__(self) -> None:
        if self.heartbeat_seconds <= 0 or self.confirm_seconds < 0 or self.remembered_slots < 1:
            raise ValueError(
                "heartbeat_seconds and remembered_slots must be positive, confirm_seconds at least 0"
            )
        if self.patience_seconds <= 0:
            raise ValueError(f"patience_seconds must be positive, not {self.patience_seconds}")

    @property
    def ttl_seconds(self) -> float:
        return min(3 * self.heartbeat_seconds, MAX_CLAIM_SECONDS)


class Leases:
    """The stages that this peer owns, and in `standbys` those that it stands by for. `async with Leases(...)` renews
    its claims every heartbeat and releases them at the end; `beat` is one heartbeat, for tests that drive the clock
    themselves.

    `on_lost` is called (in the loop, must not block) with our old claim when a higher claim has taken a stage from us;
    the stage is then no longer in `mine()`.
    """

    def __init__(
        self,
        peer_id: PeerId,
        directory: Directory,
        config: LeaseConfig | None = None,
        on_lost: Callable[[ClaimRecord], None] | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.on_lost = on_lost
        self._directory = directory
        self._config = config or LeaseConfig()
        self._ours = ClaimPublisher(directory, self._config.ttl_seconds)
        self._memory = ClaimCache(
            directory.unsealed, self._config.remembered_slots, directory.now, directory.verify
        )
        self.standbys = Standbys(peer_id, self._ours, self._memory)
        self._locks: dict[Slot, asyncio.Lock] = {}
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._renew_for_ever(), name="leases")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release every stage and stop renewing. Idempotent."""
        tasks = [*self._ours.late] if self._loop is None else [self._loop, *self._ours.late]
        self._loop = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held = list(self._ours.owned)
        for job, stage in list(self._ours.standing):
            self.standbys.stand_down(job, stage)
        results = await asyncio.gather(
            self._ours.say_unsaid(),
            *(self.release(job, stage) for job, stage in held),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, SwarmError):
                raise result

    def know(self, law: JobLaw) -> None:
        """From now on claims of the job count only of those whom its manifest admits."""
        self._memory.laws[law.job] = law

    def mine(self) -> tuple[ClaimRecord, ...]:
        return tuple(self._ours.owned.values())

    def holds(self, job: JobId, stage: int) -> ClaimRecord | None:
        """Our live claim of the stage, or None."""
        return self._ours.owned.get((job, stage))

    def observe(self, job: JobId, stage: int, term: int) -> None:
        """Remember a term seen elsewhere (in a frame, a StaleTerm refusal, a job record): our next claim of the stage
        goes above it, even when the claims that carried it have expired."""
        self._memory.observe((job, stage), term)

    def known_term(self, job: JobId, stage: int) -> int:
        """The highest term of the stage that we ever saw; 0 for none."""
        return self._memory.term((job, stage))

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """The live claims of a stage, one per peer (ours as we last said it), whose terms are remembered."""
        slot = (job, stage)
        self._memory.read(slot, await self._directory.claims(job, stage))
        return self.recent(job, stage)

    def recent(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """What `claims` said last, with our own claim and what was shown to us (`credit`) since; nothing is asked."""
        slot = (job, stage)
        own = self._ours.of(slot)
        # We know better than the directory what we do not own: it may still tell from before a restart.
        claims = [
            claim
            for claim in self._memory.recent(slot)
            if claim.peer != self.peer_id or (own is None and claim.role != "owner")
        ]
        return tuple(claims if own is None else [*claims, own])

    async def owner(self, job: JobId, stage: int) -> ClaimRecord | None:
        """The live claim that owns the stage now, or None."""
        return winner(await self.claims(job, stage))

    async def claim(
        self, job: JobId, stage: int, score: float, *, over: int = 0, confirm: bool = True
    ) -> ClaimRecord | None:
        """Try to become the owner of a vacant stage: publish a claim at the next term, look who won.

        `over`: owners up to that term are known to be gone, whatever the directory says; nothing is read before the
        claim is published, unless we have seen a higher term. Without `confirm` nothing is read afterwards either: for a stage that its owner hands us.
        Returns our claim (`ready` False), at once if we hold the stage already; None where another peer
        owns it or won. Raises RecordError (bad arguments) or TransportError (nobody could be asked).
        """
        slot = (job, stage)
        async with self._locks.setdefault(slot, asyncio.Lock()):
            held = self._ours.owned.get(slot)
            if held is not None:
                # Whoever is gone, we are not: two who ask may know of different owners before us, and a claim above our
                # own would leave what we host under it behind.
                return held
            if over == 0 or self.known_term(job, stage) > over:
                owner = await self.owner(job, stage)
                if owner is not None and owner.term > over:
                    return None
            term = next_term((), max(over, self.known_term(job, stage)))
            ours = ClaimRecord(
                job=job,
                stage=stage,
                peer=self.peer_id,
                role="owner",
                term=term,
                score=score,
                step=0,
                load=0.0,
            )
            before = self._ours.standing.pop(slot, None)  # must not be published over the claim
            self._ours.claiming.add(slot)
            won: ClaimRecord | None = None
            try:
                won = await self._win(ours, over, confirm)
            finally:
                self._ours.claiming.discard(slot)
                if won is None:
                    if before is not None:
                        self._ours.standing[slot] = before
                    await self._ours.withdraw(replace(ours, term=max(term, self.known_term(job, stage))))
            if won is not None:
                self.observe(job, stage, won.term)
                self._ours.owned[slot] = won
            return won

    async def _win(self, ours: ClaimRecord, over: int, confirm: bool) -> ClaimRecord | None:
        """Publish `ours`, raised above every rival, until nobody else can hold its term; None if another wins."""
        for _ in range(_ROUNDS):
            await self._ours.publish(ours, self._config.patience_seconds if over else None)
            if not confirm:
                return ours
            if not over:
                await asyncio.sleep(self._config.confirm_seconds)
            claims = await self.claims(ours.job, ours.stage)
            others = rivals(claims, ours.peer, over)
            if winner([*others, ours]) != ours:
                return None
            highest = max((other.term for other in others if _counts(other, ours.term)), default=0)
            if highest < ours.term:
                return ours
            # A rival of this term may have looked before we published and believe that it won: no two holders may
            # share a term, or receivers could not tell them apart. Nor may we take one that somebody released.
            ours = replace(ours, term=highest + 1)
        return None

    def sealed(self, job: JobId, stage: int) -> bytes | None:
        """Our claim of a stage that we own, signed now, to be shown to a peer that has not seen it in the directory."""
        held = self._ours.owned.get((job, stage))
        return None if held is None else self._directory.sealed(held, ttl_seconds=self._config.ttl_seconds)

    def credit(self, data: bytes) -> ClaimRecord:
        """Believe a sealed claim of an owner that somebody showed us, as if the directory had it, until it expires or
        a higher one is shown; it may cost us the stage. Raises RecordError for anything else."""
        claim = self._memory.credit(data)
        held = self._ours.owned.get((claim.job, claim.stage))
        if held is not None and claim.peer != self.peer_id and rank(claim) > rank(held):
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
        slot = (job, stage)
        claims = self._ours.owned if slot in self._ours.owned else self._ours.standing
        held = claims.get(slot)
        if held is None:
            return
        changed = replace(
            held,
            step=held.step if step is None else step,
            load=held.load if load is None else load,
            ready=held.ready if ready is None else ready,
        )
        claims[slot] = changed
        if changed.ready != held.ready:
            self._ours.say_soon(changed)

    async def release(self, job: JobId, stage: int) -> None:
        """Give the stage up: our claim becomes "released", so that others need not wait for it to expire."""
        held = self._ours.owned.pop((job, stage), None)
        if held is not None:
            await self._ours.withdraw(held)

    # --- renewing

    async def beat(self) -> None:
        """Renew every claim of ours, then give up those that a higher claim has beaten."""
        for slot in [*self._ours.owned, *self._ours.standing]:
            self._ours.leave_unsaid(slot)
        await asyncio.gather(
            self._ours.say_unsaid(),
            *(self._renew(slot) for slot in list(self._ours.owned)),
            *(self.standbys.renew(slot) for slot in list(self._ours.standing)),
        )

    async def _renew(self, slot: Slot) -> None:
        held = self._ours.owned.get(slot)
        if held is None:
            return
        try:
            await self._ours.publish(held)
            claims = await self.claims(*slot)
        except SwarmError as error:
            logger.warning("claim of stage %d of job %.8s not renewed: %s", slot[1], slot[0], error)
            return
        best = winner(claims)
        held = self._ours.owned.get(slot)  # it may have been released while we looked
        if held is None or best is None or best.peer == self.peer_id or rank(best) <= rank(held):
            return
        self._give_way(held, best)
        await self._ours.withdraw(held)

    def _give_way(self, held: ClaimRecord, best: ClaimRecord) -> None:
        del self._ours.owned[held.job, held.stage]
        logger.info(
            "stage %d of job %.8s went from us (term %d) to %s (term %d)",
            held.stage,
            held.job,
            held.term,
            best.peer,
            best.term,
        )
        if self.on_lost is not None:
            self.on_lost(held)

    async def _renew_for_ever(self) -> None:
        clock = asyncio.get_running_loop()
        beat_at = clock.time()
        while True:
            self._ours.wake.clear()
            if clock.time() >= beat_at:
                beat_at = clock.time() + self._config.heartbeat_seconds
                await self.beat()
            else:
                await self._ours.say_unsaid()
            try:
                async with asyncio.timeout_at(beat_at):
                    await self._ours.wake.wait()
            except TimeoutError:
                continue


def _counts(other: ClaimRecord, term: int) -> bool:
    """Whether another's claim keeps us from `term`. A standby's tells which terms it has seen: ours, perhaps."""
    return not stands_by(other) or other.term > term
