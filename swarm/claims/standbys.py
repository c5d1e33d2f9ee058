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
    """The stages that this peer stands by for: never one that it owns or is claiming."""

    def __init__(
        self,
        peer_id: PeerId,
        publisher: ClaimPublisher,
        cache: ClaimCache,
        chain: Callable[[JobId], tuple[bytes, ...]],
    ) -> None:
        """`chain`: the grants that we show in a job."""
        self._chain = chain
        self._peer_id = peer_id
        self._publisher = publisher
        self._cache = cache

    def claims(self) -> tuple[ClaimRecord, ...]:
        """Our claims of stages that we stand by for."""
        return tuple(self._publisher.standby_claims.values())

    def stand_by(
        self, job: JobId, stage: int, *, score: float, step: int, ready: bool = False, busy: bool = False
    ) -> None:
        """Publish, now and every heartbeat until `stand_down` or a won `Leases.claim`, that we can take the stage over:
        from its state of `step`, which is here, and with it loaded if `ready`; `busy` with stages of our own, so that others
        go first. Ignored for a stage that we own. A replica stays one unless it is `busy`."""
        place = (job, stage)
        if place in self._publisher.owned or place in self._publisher.claiming:
            return
        before = self._publisher.standby_claims.get(place)
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
        self._publisher.standby_claims[place] = claim
        if before is None or replace(before, term=claim.term, step=step) != claim:
            self._publisher.publish_soon(claim)

    def serve_beside(self, job: JobId, stage: int) -> int:
        """Publish from now on that we run the stage as a replica, ready for sessions. Returns the term of that claim, which
        stays the same while we are one; 0 where we cannot be: only a standby of the stage that owns none can."""
        place = (job, stage)
        claim = self._publisher.standby_claims.get(place)
        if claim is None or not is_idle(claim):
            return 0
        if claim.role != "replica":
            term = max(1, claim.term, self._cache.term(place))
            claim = self._publisher.standby_claims[place] = replace(
                claim, role="replica", term=term, load=0.0, ready=True
            )
            self._publisher.publish_soon(claim)
        return claim.term

    def only_stand_by(self, job: JobId, stage: int) -> None:
        """Stop being a replica of the stage, and only stand by for it."""
        place = (job, stage)
        claim = self._publisher.standby_claims.get(place)
        if claim is not None and claim.role == "replica":
            term = max(claim.term, self._cache.term(place))
            claim = self._publisher.standby_claims[place] = replace(
                claim, role="standby", term=term, load=0.0
            )
            self._publisher.publish_soon(claim)

    def is_beside(self, job: JobId, stage: int) -> bool:
        """Whether we are a replica of the stage, or are claiming it."""
        place = (job, stage)
        claim = self._publisher.standby_claims.get(place)
        return place in self._publisher.claiming or (claim is not None and claim.role == "replica")

    def stand_down(self, job: JobId, stage: int) -> None:
        """No longer stand by for the stage."""
        claim = self._publisher.standby_claims.pop((job, stage), None)
        if claim is not None:
            self._publisher.withdraw_soon(claim)

    async def renew(self, place: Place) -> None:
        """Publish our claim to stand by for the stage again, if we do."""
        claim = self._publisher.standby_claims.get(place)
        if claim is not None:
            term = claim.term
            if claim.role == "standby":  # sessions know a replica by its term
                # Not below our last claim as its owner: a reader that has seen both goes by the higher term.
                term = max(term, self._cache.term(place))
            self._publisher.standby_claims[place] = replace(claim, term=term, grants=self._chain(claim.job))
            await self._publisher.publish_current(claim)
