"""Our own claims of stages, and how the swarm is told of them.

Which claims we have is decided elsewhere (`fusion.swarm.claims.leases`, `fusion.swarm.claims.standbys`). What is said of a stage is
always what we have of it at that moment.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from cachetools import FIFOCache

from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import ClaimRecord, Place
from fusion.swarm.errors import SwarmError

logger = logging.getLogger(__name__)


PUBLISHED_PLACES = 65_536


class ClaimPublisher:
    """At most one claim of each stage. `ttl_seconds`: how long the directory keeps what is said."""

    def __init__(self, directory: Directory, ttl_seconds: float) -> None:
        self.owned: dict[Place, ClaimRecord] = {}
        # Of stages that we stand by for or run beside their owner.
        self.standby_claims: dict[Place, ClaimRecord] = {}
        self.claiming: dict[Place, ClaimRecord] = {}  # to be won or lost: nothing else is said of these
        self.wake = asyncio.Event()  # set when there is something for `publish_due`
        self.late: set[asyncio.Task[None]] = set()  # publications that nobody waits for any more
        self._directory = directory
        self._ttl_seconds = ttl_seconds
        self._due: dict[Place, ClaimRecord] = {}
        self._now = directory.now
        # How long what we said of a stage lasts, unix seconds.
        self._until: FIFOCache[Place, float] = FIFOCache(PUBLISHED_PLACES)

    def of(self, place: Place) -> ClaimRecord | None:
        """Our claim of the stage, an owner's or a standby's, as others may see it."""
        claim = self.owned.get(place) or self.standby_claims.get(place)
        return None if claim is None else self.dated(claim)

    def dated(self, claim: ClaimRecord) -> ClaimRecord:
        """With the end of what the directory was told last."""
        return replace(claim, expires_at=self._until.get((claim.job, claim.stage), 0.0))

    def claims(self, claim: ClaimRecord) -> ClaimRecord:
        """From now on this is what we claim, until it is won or lost; with its end."""
        place = (claim.job, claim.stage)
        self.claiming[place] = claim
        self._until[place] = self._now() + self._ttl_seconds
        return self.dated(claim)

    def lapsed(self, claim: ClaimRecord) -> bool:
        """Whether nobody can see the claim any more."""
        return self._until.get((claim.job, claim.stage), 0.0) <= self._now()

    def publish_soon(self, claim: ClaimRecord) -> None:
        """Leave it to the next `publish_due`."""
        self._due[claim.job, claim.stage] = claim
        self.wake.set()

    def withdraw_soon(self, claim: ClaimRecord) -> None:
        """As `withdraw`, with the next `publish_due`."""
        self.publish_soon(_released(claim))

    def drop_due(self, place: Place) -> None:
        """Forget what `publish_soon` was told of the stage."""
        self._due.pop(place, None)

    async def publish_due(self) -> None:
        due, self._due = self._due, {}
        await asyncio.gather(*(self.publish_current(claim) for claim in due.values()))

    async def publish_current(self, claim: ClaimRecord) -> None:
        """Publish what we have to say of a stage now: what owns it or stands by for it, else `claim`."""
        place = (claim.job, claim.stage)
        if place in self.claiming:
            return
        claim = self.of(place) or claim
        try:
            await self.publish(claim)
        except SwarmError as error:
            logger.warning(
                "%s claim of stage %d of job %.8s not published: %s",
                claim.role,
                claim.stage,
                claim.job,
                error,
            )

    async def withdraw(self, claim: ClaimRecord) -> None:
        """Say in place of a claim that we do not hold that we stand by, or that it is released."""
        self.drop_due((claim.job, claim.stage))
        await self.publish_current(_released(claim))

    async def publish(self, claim: ClaimRecord, patience_seconds: float | None = None) -> None:
        """Raises SwarmError. With patience, what takes longer goes on in the background: one node that does not answer
        must not hold up a takeover."""
        work = self._store(claim)
        if patience_seconds is None:
            await work
            return
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=patience_seconds)
        finally:
            if not task.done():
                self.late.add(task)
                task.add_done_callback(self._published_late)
        if task.done():
            task.result()

    async def _store(self, claim: ClaimRecord) -> None:
        until = self._now() + self._ttl_seconds
        await self._directory.publish(claim, ttl_seconds=self._ttl_seconds)
        self._until[claim.job, claim.stage] = until

    def _published_late(self, task: asyncio.Task[None]) -> None:
        self.late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a claim was not published: %s", error)


def _released(claim: ClaimRecord) -> ClaimRecord:
    return replace(claim, role="released", ready=False)
