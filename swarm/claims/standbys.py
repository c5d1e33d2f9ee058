"""Standing by for stages that others own: ready to take them over, or running them beside their owner as a replica.

Who takes a stage over, and when, is the rule of `fusion.swarm.claims.election`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusion.swarm.claims.claim_cache import ClaimCache
from fusion.swarm.claims.claim_publisher import ClaimPublisher
from fusion.swarm.claims.election import is_idle
from fusion.swarm.directory.records import ClaimRecord, JobId, Place
from fusion.swarm.transport import PeerId


class Standbys:
    """The stages that this peer stands by for. A stage that it owns is never one of them, nor one that it claims."""

    def __init__(
        self,
        peer_id: PeerId,
        ours: ClaimPublisher,
        cache: ClaimCache,
        chain: Callable[[JobId], tuple[bytes, ...]],
    ) -> None:
        """`chain`: the grants that we show in a job."""
        self._chain = chain
        self._peer_id = peer_id
        self._ours = ours
        self._cache = cache

    def mine(self) -> tuple[ClaimRecord, ...]:
        """Our claims of stages that we stand by for."""
        return tuple(self._ours.standby_claims.values())

    def stand_by(
        self, job: JobId, stage: int, *, score: float, step: int, ready: bool = False, busy: bool = False
    ) -> None:
        """Say, now and every heartbeat until `stand_down` or a won `Leases.claim`, that we could take the stage over:
        with its state of `step` here, and `ready` in memory; `busy` with stages of our own, so that others go first.
        Ignored for a stage that we own. A replica stays one unless it is `busy`."""
        place = (job, stage)
        if place in self._ours.owned or place in self._ours.claiming:
            return
        before = self._ours.standby_claims.get(place)
        if before is not None and before.role == "replica" and not busy:
            claim = replace(before, score=score, step=step, grants=self._chain(job))
        else:
            claim = ClaimRecord(
                job=job,
                stage=stage,
                peer=self._peer_id,
                role="standby",
                term=self._cache.term(place),
                score=score,
                step=step,
                load=1.0 if busy else 0.0,
                ready=ready,
                grants=self._chain(job),
            )
        self._ours.standby_claims[place] = claim
        if before is None or replace(before, term=claim.term, step=step) != claim:
            self._ours.publish_soon(claim)

    def serve_beside(self, job: JobId, stage: int) -> int:
        """Say from now on that we run the stage beside its owner, ready for sessions. The term of that claim, which
        stays the same for as long as we say so; 0 where we may not: only who stands by for the stage and owns none
        does."""
        place = (job, stage)
        claim = self._ours.standby_claims.get(place)
        if claim is None or not is_idle(claim):
            return 0
        if claim.role != "replica":
            term = max(1, claim.term, self._cache.term(place))
            claim = self._ours.standby_claims[place] = replace(
                claim, role="replica", term=term, load=0.0, ready=True
            )
            self._ours.publish_soon(claim)
        return claim.term

    def only_stand_by(self, job: JobId, stage: int) -> None:
        """Say that we run the stage beside its owner no longer, and only stand by for it."""
        place = (job, stage)
        claim = self._ours.standby_claims.get(place)
        if claim is not None and claim.role == "replica":
            term = max(claim.term, self._cache.term(place))
            claim = self._ours.standby_claims[place] = replace(claim, role="standby", term=term, load=0.0)
            self._ours.publish_soon(claim)

    def beside(self, job: JobId, stage: int) -> bool:
        """Whether we say that we run the stage beside its owner, or are about to own it ourselves."""
        place = (job, stage)
        claim = self._ours.standby_claims.get(place)
        return place in self._ours.claiming or (claim is not None and claim.role == "replica")

    def stand_down(self, job: JobId, stage: int) -> None:
        """No longer stand by for the stage."""
        claim = self._ours.standby_claims.pop((job, stage), None)
        if claim is not None:
            self._ours.withdraw_soon(claim)

    async def renew(self, place: Place) -> None:
        """Say once more that we stand by for the stage, if we do."""
        claim = self._ours.standby_claims.get(place)
        if claim is not None:
            term = claim.term
            if claim.role == "standby":  # sessions know a replica by its term
                # Not below a claim of ours that was an owner's: readers go by the term where they have seen both.
                term = max(term, self._cache.term(place))
            self._ours.standby_claims[place] = replace(claim, term=term, grants=self._chain(claim.job))
            await self._ours.publish_current(claim)
