"""Holding stages: claims published, won, renewed every heartbeat, lost or released. The rule is `fusion.swarm.election`.

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

from fusion.swarm.claim_memory import ClaimMemory, Slot
from fusion.swarm.directory import HEARTBEAT_SECONDS, Directory
from fusion.swarm.election import is_idle, next_term, rank, rivals, stands_by, winner
from fusion.swarm.errors import SwarmError
from fusion.swarm.records import ClaimRecord, JobId
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
        return 3 * self.heartbeat_seconds


class Leases:
    """The stages that this peer owns or stands by for. `async with Leases(...)` renews its claims every heartbeat and
    releases them at the end; `beat` is one heartbeat, for tests that drive the clock themselves.

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
        self._mine: dict[Slot, ClaimRecord] = {}
        self._standing: dict[Slot, ClaimRecord] = {}
        self._memory = ClaimMemory(directory.unsealed, self._config.remembered_slots)
        self._locks: dict[Slot, asyncio.Lock] = {}
        self._claiming: set[Slot] = set()
        self._unsaid: dict[Slot, ClaimRecord] = {}  # what the loop publishes before the next heartbeat
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._slow: set[asyncio.Task[None]] = set()  # publications that nobody waits for any more

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._renew_for_ever(), name="leases")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release every stage and stop renewing. Idempotent."""
        tasks = [*self._slow] if self._loop is None else [self._loop, *self._slow]
        self._loop = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        held = list(self._mine)
        for job, stage in list(self._standing):
            self.stand_down(job, stage)
        results = await asyncio.gather(
            self._say_unsaid(), *(self.release(job, stage) for job, stage in held), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, SwarmError):
                raise result

    def mine(self) -> tuple[ClaimRecord, ...]:
        return tuple(self._mine.values())

    def holds(self, job: JobId, stage: int) -> ClaimRecord | None:
        """Our live claim of the stage, or None."""
        return self._mine.get((job, stage))

    def standing(self) -> tuple[ClaimRecord, ...]:
        """Our claims of stages that we stand by for."""
        return tuple(self._standing.values())

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
        own = self._mine.get(slot) or self._standing.get(slot)
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
            held = self._mine.get(slot)
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
            before = self._standing.pop(slot, None)  # must not be published over the claim
            self._claiming.add(slot)
            won: ClaimRecord | None = None
            try:
                won = await self._win(ours, over, confirm)
            finally:
                self._claiming.discard(slot)
                if won is None:
                    if before is not None:
                        self._standing[slot] = before
                    await self._withdraw(replace(ours, term=max(term, self.known_term(job, stage))))
            if won is not None:
                self.observe(job, stage, won.term)
                self._mine[slot] = won
            return won

    async def _win(self, ours: ClaimRecord, over: int, confirm: bool) -> ClaimRecord | None:
        """Publish `ours`, raised above every rival, until nobody else can hold its term; None if another wins."""
        for _ in range(_ROUNDS):
            await self._publish(ours, self._config.patience_seconds if over else None)
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
        held = self._mine.get((job, stage))
        return None if held is None else self._directory.sealed(held, ttl_seconds=self._config.ttl_seconds)

    def credit(self, data: bytes) -> ClaimRecord:
        """Believe a sealed claim of an owner that somebody showed us, as if the directory had it, until it expires or
        a higher one is shown; it may cost us the stage. Raises RecordError for anything else."""
        claim = self._memory.credit(data)
        held = self._mine.get((claim.job, claim.stage))
        if held is not None and claim.peer != self.peer_id and rank(claim) > rank(held):
            self._give_way(held, claim)
            self._say_soon(_released(held))
        return claim

    # --- standing by

    def stand_by(
        self, job: JobId, stage: int, *, score: float, step: int, ready: bool = False, busy: bool = False
    ) -> None:
        """Say, now and every heartbeat until `stand_down` or a won `claim`, that we could take the stage over: with its
        state of `step` here, and `ready` in memory; `busy` with stages of our own, so that others go first. Ignored for
        a stage that we own. A replica stays one unless it is `busy`."""
        slot = (job, stage)
        if slot in self._mine or slot in self._claiming:
            return
        before = self._standing.get(slot)
        if before is not None and before.role == "replica" and not busy:
            claim = replace(before, score=score, step=step)
        else:
            claim = ClaimRecord(
                job=job,
                stage=stage,
                peer=self.peer_id,
                role="standby",
                term=self.known_term(job, stage),
                score=score,
                step=step,
                load=1.0 if busy else 0.0,
                ready=ready,
            )
        self._standing[slot] = claim
        if before is None or replace(before, term=claim.term, step=step) != claim:
            self._say_soon(claim)

    def serve_beside(self, job: JobId, stage: int) -> int:
        """Say from now on that we run the stage beside its owner, ready for sessions. The term of that claim, which
        stays the same for as long as we say so; 0 where we may not: only who stands by for the stage and owns none
        does."""
        slot = (job, stage)
        claim = self._standing.get(slot)
        if claim is None or not is_idle(claim):
            return 0
        if claim.role != "replica":
            term = max(1, claim.term, self.known_term(*slot))
            claim = self._standing[slot] = replace(claim, role="replica", term=term, load=0.0, ready=True)
            self._say_soon(claim)
        return claim.term

    def only_stand_by(self, job: JobId, stage: int) -> None:
        """Say that we run the stage beside its owner no longer, and only stand by for it."""
        slot = (job, stage)
        claim = self._standing.get(slot)
        if claim is not None and claim.role == "replica":
            term = max(claim.term, self.known_term(*slot))
            self._standing[slot] = replace(claim, role="standby", term=term, load=0.0)
            self._say_soon(self._standing[slot])

    def beside(self, job: JobId, stage: int) -> bool:
        """Whether we say that we run the stage beside its owner, or are about to own it ourselves."""
        slot = (job, stage)
        claim = self._standing.get(slot)
        return slot in self._claiming or (claim is not None and claim.role == "replica")

    def stand_down(self, job: JobId, stage: int) -> None:
        """No longer stand by for the stage."""
        claim = self._standing.pop((job, stage), None)
        if claim is not None:
            self._say_soon(_released(claim))

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
        ours = self._mine if slot in self._mine else self._standing
        held = ours.get(slot)
        if held is None:
            return
        changed = replace(
            held,
            step=held.step if step is None else step,
            load=held.load if load is None else load,
            ready=held.ready if ready is None else ready,
        )
        ours[slot] = changed
        if changed.ready != held.ready:
            self._say_soon(changed)

    async def release(self, job: JobId, stage: int) -> None:
        """Give the stage up: our claim becomes "released", so that others need not wait for it to expire."""
        held = self._mine.pop((job, stage), None)
        if held is not None:
            await self._withdraw(held)

    # --- renewing

    async def beat(self) -> None:
        """Renew every claim of ours, then give up those that a higher claim has beaten."""
        for slot in [*self._mine, *self._standing]:
            self._unsaid.pop(slot, None)
        await asyncio.gather(
            self._say_unsaid(),
            *(self._renew(slot) for slot in list(self._mine)),
            *(self._stand(slot) for slot in list(self._standing)),
        )

    async def _renew(self, slot: Slot) -> None:
        held = self._mine.get(slot)
        if held is None:
            return
        try:
            await self._publish(held)
            claims = await self.claims(*slot)
        except SwarmError as error:
            logger.warning("claim of stage %d of job %.8s not renewed: %s", slot[1], slot[0], error)
            return
        best = winner(claims)
        held = self._mine.get(slot)  # it may have been released while we looked
        if held is None or best is None or best.peer == self.peer_id or rank(best) <= rank(held):
            return
        self._give_way(held, best)
        await self._withdraw(held)

    async def _stand(self, slot: Slot) -> None:
        claim = self._standing.get(slot)
        if claim is not None:
            if claim.role == "standby":  # sessions know a replica by its term
                # Not below a claim of ours that was an owner's: readers go by the term where they have seen both.
                self._standing[slot] = replace(claim, term=max(claim.term, self.known_term(*slot)))
            await self._say(claim)

    def _give_way(self, held: ClaimRecord, best: ClaimRecord) -> None:
        del self._mine[held.job, held.stage]
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
            self._wake.clear()
            if clock.time() >= beat_at:
                beat_at = clock.time() + self._config.heartbeat_seconds
                await self.beat()
            else:
                await self._say_unsaid()
            try:
                async with asyncio.timeout_at(beat_at):
                    await self._wake.wait()
            except TimeoutError:
                continue

    # --- publishing

    def _say_soon(self, claim: ClaimRecord) -> None:
        self._unsaid[claim.job, claim.stage] = claim
        self._wake.set()

    async def _say_unsaid(self) -> None:
        unsaid, self._unsaid = self._unsaid, {}
        await asyncio.gather(*(self._say(claim) for claim in unsaid.values()))

    async def _say(self, claim: ClaimRecord) -> None:
        """Publish what we have to say of a stage now: what owns it or stands by for it, else `claim`."""
        slot = (claim.job, claim.stage)
        if slot in self._claiming:
            return
        claim = self._mine.get(slot) or self._standing.get(slot) or claim
        try:
            await self._publish(claim)
        except SwarmError as error:
            logger.warning(
                "%s claim of stage %d of job %.8s not published: %s",
                claim.role,
                claim.stage,
                claim.job,
                error,
            )

    async def _publish(self, claim: ClaimRecord, patience_seconds: float | None = None) -> None:
        """Raises SwarmError. With patience, what takes longer goes on in the background: one node that does not answer
        must not hold up a takeover."""
        work = self._directory.publish(claim, ttl_seconds=self._config.ttl_seconds)
        if patience_seconds is None:
            await work
            return
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=patience_seconds)
        finally:
            if not task.done():
                self._slow.add(task)
                task.add_done_callback(self._published_late)
        if task.done():
            task.result()

    def _published_late(self, task: asyncio.Task[None]) -> None:
        self._slow.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a claim was not published: %s", error)

    async def _withdraw(self, claim: ClaimRecord) -> None:
        """Say in place of a claim that we do not hold that we stand by, or that it is released."""
        self._unsaid.pop((claim.job, claim.stage), None)
        await self._say(_released(claim))


def _released(claim: ClaimRecord) -> ClaimRecord:
    return replace(claim, role="released", ready=False)


def _counts(other: ClaimRecord, term: int) -> bool:
    """Whether another's claim keeps us from `term`. A standby's tells which terms it has seen: ours, perhaps."""
    return not stands_by(other) or other.term > term
