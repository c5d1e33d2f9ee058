"""Our own claims of stages, and their publication in the directory.

Which claims we have is decided elsewhere (`fusion.swarm.claims.leases`, `fusion.swarm.claims.standbys`). A publication always has the
current claim of its stage, not the one that was current when it was requested.
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
    """At most one claim of each stage. `ttl_seconds`: how long the directory keeps a published one."""

    def __init__(self, directory: Directory, ttl_seconds: float) -> None:
        self.owned: dict[Place, ClaimRecord] = {}
        # Of stages that we stand by for or run beside their owner.
        self.standby_claims: dict[Place, ClaimRecord] = {}
        self.claiming: dict[
            Place, ClaimRecord
        ] = {}  # not won or lost yet: `publish_current` leaves these alone
        self.wake = asyncio.Event()  # set when `publish_due` has something to publish
        self.background: set[asyncio.Task[None]] = set()  # publications that nobody awaits
        self._directory = directory
        self._ttl_seconds = ttl_seconds
        self._due: dict[Place, ClaimRecord] = {}
        self._now = directory.now
        # When our published claim of a stage expires, unix seconds.
        self._until: FIFOCache[Place, float] = FIFOCache(PUBLISHED_PLACES)

    def current(self, place: Place) -> ClaimRecord | None:
        """Our claim of the stage, as owner or standby, with its expiry."""
        claim = self.owned.get(place) or self.standby_claims.get(place)
        return None if claim is None else self.with_expiry(claim)

    def with_expiry(self, claim: ClaimRecord) -> ClaimRecord:
        """The claim with the expiry of our last publication of its stage."""
        return replace(claim, expires_at=self._until.get((claim.job, claim.stage), 0.0))

    def begin_claiming(self, claim: ClaimRecord) -> ClaimRecord:
        """Enter the claim, with its expiry, in `claiming` until it is won or lost."""
        place = (claim.job, claim.stage)
        self.claiming[place] = claim
        self._until[place] = self._now() + self._ttl_seconds
        return self.with_expiry(claim)

    def lapsed(self, claim: ClaimRecord) -> bool:
        """Whether our last publication of the claim's stage has expired."""
        return self._until.get((claim.job, claim.stage), 0.0) <= self._now()

    def publish_soon(self, claim: ClaimRecord) -> None:
        """Publish the claim with the next `publish_due`."""
        self._due[claim.job, claim.stage] = claim
        self.wake.set()

    def withdraw_soon(self, claim: ClaimRecord) -> None:
        """As `withdraw`, with the next `publish_due`."""
        self.publish_soon(_released(claim))

    def drop_due(self, place: Place) -> None:
        """Undo `publish_soon` for the stage."""
        self._due.pop(place, None)

    async def publish_due(self) -> None:
        due, self._due = self._due, {}
        await asyncio.gather(*(self.publish_current(claim) for claim in due.values()))

    async def publish_current(self, claim: ClaimRecord) -> None:
        """Publish our current claim of the stage, as owner or standby, else `claim`. Logs a SwarmError."""
        place = (claim.job, claim.stage)
        if place in self.claiming:
            return
        claim = self.current(place) or claim
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
        """Replace a published claim that we do not hold: by our standby claim, else by its release."""
        self.drop_due((claim.job, claim.stage))
        await self.publish_current(_released(claim))

    async def publish(self, claim: ClaimRecord, patience_seconds: float | None = None) -> None:
        """Raises SwarmError. With patience, a publication that takes longer goes on in the background: one node that does not
        answer must not hold up a takeover."""
        work = self._store(claim)
        if patience_seconds is None:
            await work
            return
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=patience_seconds)
        finally:
            if not task.done():
                self.background.add(task)
                task.add_done_callback(self._log_failure)
        if task.done():
            task.result()

    async def _store(self, claim: ClaimRecord) -> None:
        until = self._now() + self._ttl_seconds
        await self._directory.publish(claim, ttl_seconds=self._ttl_seconds)
        self._until[claim.job, claim.stage] = until

    def _log_failure(self, task: asyncio.Task[None]) -> None:
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a claim was not published: %s", error)


def _released(claim: ClaimRecord) -> ClaimRecord:
    return replace(claim, role="released", ready=False)
