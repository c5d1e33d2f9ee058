"""Stages without an owner, as one peer sees them: since when, and who owned them last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cachetools import FIFOCache

from fusion.runtime.hosting.claim_choice import VacantStage
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.claims.election import HEAD_START_SECONDS, is_idle, should_claim, successors, winner
from fusion.swarm.directory.api import RECORD_TTL_SECONDS
from fusion.swarm.directory.records import ClaimRecord, Place
from fusion.swarm.transport import PeerId

REMEMBERED_PLACES = 65_536
# For an owner that goes on under a stale term without knowing: its neighbours refuse it for as long as a lease lasts, and it
# claims the stage under a higher one.
BEHIND_SECONDS = 2 * RECORD_TTL_SECONDS
# For an owner that answers that it holds the stage although the directory has no claim of it. It would publish one at every
# heartbeat: after so long without one its answer does not count.
NO_CLAIM_SECONDS = 5 * RECORD_TTL_SECONDS


class VacantStages:
    """`us`: the peer that may claim them; `fitness`: its score for stages that it was not proposed for; `clock`: monotonic
    seconds."""

    def __init__(self, us: PeerId, fitness: float, clock: Callable[[], float]) -> None:
        self._us = us
        self._fitness = fitness
        self._clock = clock
        self._empty_since: FIFOCache[Place, float] = FIFOCache(REMEMBERED_PLACES)
        self._last_owner: FIFOCache[Place, PeerId] = FIFOCache(REMEMBERED_PLACES)

    def look(
        self,
        place: Place,
        manifest: Manifest,
        claims: Sequence[ClaimRecord],
        *,
        account: PeerId,
        early: bool,
        behind: Callable[[], bool] = lambda: False,
    ) -> VacantStage | None:
        """The stage, if it has no owner and it is our turn to claim it. `claims`: those in the directory now; `account`: whom its job
        is charged to; `early`: we have its newest state and are idle, so that we need not wait where it has no standby;
        `behind`: whether a peer claims it under a stale term, and gets time to learn of it."""
        us, (job, stage) = self._us, place
        owner = winner(claims)
        if owner is not None:
            self._empty_since.pop(place, None)
            self._last_owner[place] = owner.peer
            return None
        now = self._clock()
        since = self._empty_since.get(place, now)
        self._empty_since[place] = since
        score = 1.0 if manifest.proposed[stage] == us else self._fitness
        standbys = successors(claims)
        order = [standby.peer for standby in standbys]
        early = early and not order and score < 1.0 and now - since < HEAD_START_SECONDS
        if not early and not should_claim(claims, us, score=score, vacant_seconds=now - since):
            return None
        if now - since < BEHIND_SECONDS and behind():
            return None
        return VacantStage(
            job=job,
            stage=stage,
            score=(1.0 + score) / 2 if early else score,
            empty_seconds=now - since,
            memory_bytes=manifest.needed_bytes(stage),
            account=account,
            early=early,
            standby=us in order,
            idle_standby=any(is_idle(standby) and standby.peer != us for standby in standbys),
        )

    def vanished(self, place: Place, claims: Sequence[ClaimRecord]) -> PeerId | None:
        """The last owner of the stage, unless it has published since that it released it."""
        owner = self._last_owner.get(place)
        return None if owner == self._us or any(claim.peer == owner for claim in claims) else owner

    def filled(self, place: Place) -> None:
        """We own the stage now."""
        self._empty_since.pop(place, None)
        self._last_owner.pop(place, None)
