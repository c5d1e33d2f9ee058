"""Holding stages: claims published, won, renewed every heartbeat, lost or released. The rule is `fusion.swarm.election`.

Knows the directory and nothing of what a stage does. A lease tells who *should* speak for a stage; that two peers
never do at once is the receivers' business (they refuse a lower term).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from fusion.swarm.directory import HEARTBEAT_SECONDS, Directory
from fusion.swarm.election import next_term, rank, winner
from fusion.swarm.errors import SwarmError
from fusion.swarm.records import MAX_TERM, ClaimRecord, JobId
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

Slot = tuple[JobId, int]


@dataclass(frozen=True, kw_only=True)
class LeaseConfig:
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    confirm_seconds: float = 0.3  # between publishing a claim and looking who else published one
    remembered_slots: int = 65_536  # stages whose highest term we keep in mind

    def __post_init__(self) -> None:
        if self.heartbeat_seconds <= 0 or self.confirm_seconds < 0 or self.remembered_slots < 1:
            raise ValueError(
                "heartbeat_seconds and remembered_slots must be positive, confirm_seconds at least 0"
            )

    @property
    def ttl_seconds(self) -> float:
        return 3 * self.heartbeat_seconds


class Leases:
    """The stages that this peer owns. `async with Leases(...)` renews them every heartbeat and releases them at the
    end; `beat` is one heartbeat, for tests that drive the clock themselves.

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
        self._terms: dict[Slot, int] = {}
        self._locks: dict[Slot, asyncio.Lock] = {}
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self._renew_for_ever(), name="leases")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release every stage and stop renewing. Idempotent."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
            self._loop = None
        held = list(self._mine)
        results = await asyncio.gather(
            *(self.release(job, stage) for job, stage in held), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, SwarmError):
                raise result

    def mine(self) -> tuple[ClaimRecord, ...]:
        return tuple(self._mine.values())

    def holds(self, job: JobId, stage: int) -> ClaimRecord | None:
        """Our live claim of the stage, or None."""
        return self._mine.get((job, stage))

    def observe(self, job: JobId, stage: int, term: int) -> None:
        """Remember a term seen elsewhere (in a frame, a StaleTerm refusal, a job record): our next claim of the stage
        goes above it, even when the claims that carried it have expired."""
        slot = (job, stage)
        # Nothing can be claimed above the last term: who names it would keep everybody from the stage for ever.
        if self._terms.get(slot, 0) < term < MAX_TERM:
            self._terms.pop(slot, None)
            self._terms[slot] = term
            while len(self._terms) > self._config.remembered_slots:
                del self._terms[next(iter(self._terms))]

    def known_term(self, job: JobId, stage: int) -> int:
        """The highest term of the stage that we ever saw; 0 for none."""
        return self._terms.get((job, stage), 0)

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        """The live claims of a stage (ours as we last said it), whose terms are remembered."""
        claims = await self._directory.claims(job, stage)
        for claim in claims:
            self.observe(job, stage, claim.term)
        own = self._mine.get((job, stage))
        if own is not None:
            claims = (*(claim for claim in claims if claim.peer != self.peer_id), own)
        return claims

    async def owner(self, job: JobId, stage: int) -> ClaimRecord | None:
        """The live claim that owns the stage now, or None."""
        return winner(await self.claims(job, stage))

    async def claim(self, job: JobId, stage: int, score: float) -> ClaimRecord | None:
        """Try to become the owner of a vacant stage: publish a claim at the next term, wait, look who won.

        Returns our claim (`ready` False), at once if we hold the stage already; None where another peer owns it or won.
        Raises RecordError (bad arguments) or TransportError (nobody could be asked).
        """
        slot = (job, stage)
        async with self._locks.setdefault(slot, asyncio.Lock()):
            if (held := self._mine.get(slot)) is not None:
                return held
            claims = await self.claims(job, stage)
            owner = winner(claims)
            # A claim of ours that we do not hold is from before a restart: take the stage again, at a higher term.
            if owner is not None and owner.peer != self.peer_id:
                return None
            term = next_term(claims, self.known_term(job, stage))
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
            won = False
            try:
                await self._publish(ours)
                await asyncio.sleep(self._config.confirm_seconds)
                others = [c for c in await self.claims(job, stage) if c.peer != self.peer_id]
                won = winner([*others, ours]) == ours
            finally:
                if not won:
                    await self._withdraw(ours)
            if not won:
                return None
            if any(other.role == "owner" and other.term == ours.term for other in others):
                # The one we beat may have looked before we published and believe that it won: no two holders may
                # share a term, or receivers could not tell them apart.
                ours = replace(ours, term=ours.term + 1)
                await self._publish(ours)
            self.observe(job, stage, ours.term)
            self._mine[slot] = ours
            return ours

    def update(
        self,
        job: JobId,
        stage: int,
        *,
        step: int | None = None,
        load: float | None = None,
        ready: bool | None = None,
    ) -> None:
        """Change what our claim says; published with the next heartbeat, at once where `ready` changed. Ignored for a
        stage that we do not hold."""
        held = self._mine.get((job, stage))
        if held is None:
            return
        changed = replace(
            held,
            step=held.step if step is None else step,
            load=held.load if load is None else load,
            ready=held.ready if ready is None else ready,
        )
        self._mine[job, stage] = changed
        if changed.ready != held.ready:
            self._wake.set()

    async def release(self, job: JobId, stage: int) -> None:
        """Give the stage up: our claim becomes "released", so that others need not wait for it to expire."""
        held = self._mine.pop((job, stage), None)
        if held is not None:
            await self._withdraw(held)

    async def beat(self) -> None:
        """Renew every claim of ours, then give up those that a higher claim has beaten."""
        await asyncio.gather(*(self._renew(slot) for slot in list(self._mine)))

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
        del self._mine[slot]
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
        await self._withdraw(held)

    async def _renew_for_ever(self) -> None:
        while True:
            self._wake.clear()
            await self.beat()
            try:
                async with asyncio.timeout(self._config.heartbeat_seconds):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _publish(self, claim: ClaimRecord) -> None:
        await self._directory.publish(claim, ttl_seconds=self._config.ttl_seconds)

    async def _withdraw(self, claim: ClaimRecord) -> None:
        try:
            await self._publish(replace(claim, role="released", ready=False))
        except SwarmError as error:
            logger.warning("release of stage %d of job %.8s not published: %s", claim.stage, claim.job, error)
