"""Routes of served models: a cache of the claims to their stages, and the holders to avoid because they failed.

No token waits for the directory. A route is chosen for each session, and reconsidered beside it while it runs. The claims of a model
are read at most once a heartbeat. For a few heartbeats a session begins with stale claims while they are read again
(stale-while-revalidate): a stage that has moved says so sooner than the directory.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from cachetools import LRUCache

from fusion.runtime.belief.naming import candidates
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobFailed, NoRoute
from fusion.runtime.job.size_text import needs
from fusion.runtime.serving.answers.route_choice import (
    Layers,
    RemainingWork,
    RouteOptions,
    holders,
)
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.ring.session import Hop
from fusion.swarm.cancelling import cancel_all
from fusion.swarm.claims.election import stands_by
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import ClaimRecord, JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.links.view import LinkView
from fusion.swarm.transport import PeerId

# Models whose holders are cached: clients name the model, and anybody may publish one.
MAX_LOOKS = 256
AVOIDED_SECONDS = 3 * HEARTBEAT_SECONDS  # after which the claim of a dead peer has expired
STALE_TIMES = 3.0  # an entry is used for so many times its fresh period while it is read again; no longer than a lease lasts
# Link records of idle links are used for so long before a session waits for newer ones.
LINKED_SECONDS = 60.0


class NoOwner(NoRoute):
    def __init__(self, stage: int, message: str) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class _Claims:
    """The claims to the stages of a model, as read at one time."""

    at: float
    stages: Layers


class Routes:
    """`own_sessions`: how many sessions of this gateway run at each holder of a stage; `on_unowned` is called with a model of which some
    stage has no owner. `fresh_seconds`: for how long claims are used before they are read again."""

    def __init__(
        self,
        context: Context,
        own_sessions: Callable[[JobId], Mapping[tuple[int, PeerId], int]] = lambda job: {},
        on_unowned: Callable[[JobId], object] = lambda job: None,
        *,
        fresh_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._context = context
        self._own_sessions = own_sessions
        self._on_unowned = on_unowned
        self._fresh_seconds = fresh_seconds
        self._clock = context.clock.monotonic
        self._reading_links: asyncio.Task[None] | None = None  # reads link records
        self._links_read_at = float("-inf")  # when that was last done
        self._cached_claims: LRUCache[JobId, _Claims] = LRUCache(MAX_LOOKS)
        self._reading_claims: dict[JobId, asyncio.Task[_Claims]] = {}
        self._invalidated: set[asyncio.Task[_Claims]] = set()  # reads that still run and were invalidated
        self._avoided: dict[tuple[JobId, int, PeerId], float] = {}  # until when

    async def aclose(self) -> None:
        reading_links = [] if self._reading_links is None else [self._reading_links]
        await cancel_all([*self._reading_claims.values(), *self._invalidated, *reading_links])

    async def is_held(self, model: ServedModel) -> bool:
        """Whether all of its stages are held and loaded."""
        try:
            claims = await self._claims_of(model)
        except (NoOwner, JobFailed):
            return False
        return all(any(claim.ready for claim in layer) for layer in claims.stages)

    async def route(self, model: ServedModel, work: RemainingWork) -> tuple[Hop, ...]:
        """The cheapest route. Its owners may still be loading their stages: opening a session there waits for that. Raises NoOwner for
        the first stage without a holder, JobFailed where the model is no longer served."""
        return (await self._options(model, LINKED_SECONDS)).choose(work)

    async def better(
        self, model: ServedModel, work: RemainingWork, current: Sequence[Hop]
    ) -> tuple[Hop, ...] | None:
        """The route to which a session on `current` should move; None: it should stay. Raises as `route`."""
        if not self.has_choice(model.job):
            return None
        return (await self._options(model, self._fresh_seconds)).better(work, current)

    def has_choice(self, job: JobId) -> bool:
        """Whether some stage had more than one holder at the last read."""
        cached = self._cached_claims.get(job)
        return cached is not None and any(len(layer) > 1 for layer in cached.stages)

    async def _claims_of(self, model: ServedModel) -> _Claims:
        job = model.job
        cached = self._cached_claims.get(job)
        age = math.inf if cached is None else self._clock() - cached.at
        if cached is not None and age < self._fresh_seconds:
            return cached
        if (reading_claims := self._reading_claims.get(job)) is None:
            reading_claims = self._reading_claims[job] = asyncio.create_task(self._read_claims(model))
            reading_claims.add_done_callback(partial(self._claims_read, job))
        if cached is not None and age < STALE_TIMES * self._fresh_seconds:
            return cached
        return await asyncio.shield(reading_claims)

    def _claims_read(self, job: JobId, reading_claims: asyncio.Task[_Claims]) -> None:
        if self._reading_claims.get(job) is reading_claims:  # it was not invalidated meanwhile
            del self._reading_claims[job]
            if reading_claims.cancelled() or reading_claims.exception() is not None:
                self._cached_claims.pop(job, None)
            else:
                self._cached_claims[job] = reading_claims.result()
        elif not reading_claims.cancelled():
            reading_claims.exception()  # raised to those that wait for it

    async def _read_claims(self, model: ServedModel) -> _Claims:
        leases = self._context.leases
        claims = await leases.claims_of(model.job, range(model.manifest.stages))
        try:
            stages = [
                _holders_of(model, stage, stage_claims, leases.stale_claim(model.job, stage))
                for stage, stage_claims in enumerate(claims)
            ]
        except NoOwner:
            self._on_unowned(model.job)
            known = await candidates(self._context, await self._context.directory.job_records(model.job))
            for each in known:
                if each.belief.over:
                    raise JobFailed(
                        f"{model.manifest.name} is not served any more: {each.record.state}"
                    ) from None
            raise
        return _Claims(self._clock(), stages)

    async def _options(self, model: ServedModel, links_seconds: float) -> RouteOptions:
        """The route options, with link records that are at most so old."""
        job = model.job
        claims = await self._claims_of(model)
        stages = [self._not_avoided(job, stage, layer) or layer for stage, layer in enumerate(claims.stages)]
        return RouteOptions(
            stages=stages,
            links=await self._links(stages, links_seconds),
            gateway=self._context.peer_id,
            costs=model.costs,
            own_sessions=self._own_sessions(job),
        )

    async def _links(self, stages: Layers, known_seconds: float) -> LinkView:
        """The links, where some stage has several holders. Other peers' link records are read again once they are not fresh, and waited
        for once they are older than `known_seconds`."""
        links = self._context.links
        if links is None or all(len(held) == 1 for held in stages):
            return LinkView()
        age = self._clock() - self._links_read_at
        if age >= self._fresh_seconds and self._reading_links is None:
            self._reading_links = asyncio.create_task(self._read_links())
        if age >= known_seconds and self._reading_links is not None:
            await asyncio.shield(self._reading_links)
        return links.snapshot()

    async def _read_links(self) -> None:
        links = self._context.links
        assert links is not None, "nobody asks without any"
        try:
            with suppress(SwarmError):
                await links.refresh(self._fresh_seconds)
                self._links_read_at = self._clock()
        finally:
            self._reading_links = None

    # --- holders that fail

    def avoid(self, job: JobId, stage: int, peer: PeerId) -> bool:
        """Avoid the holder of a stage, which failed, for a while. Returns whether the stage has other holders."""
        now = self._clock()
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        self._avoided[job, stage, peer] = now + AVOIDED_SECONDS
        cached = self._cached_claims.get(job)
        return cached is not None and bool(self._not_avoided(job, stage, cached.stages[stage]))

    def _not_avoided(self, job: JobId, stage: int, layer: Sequence[ClaimRecord]) -> list[ClaimRecord]:
        """The holders of a stage that are not avoided."""
        now = self._clock()
        return [claim for claim in layer if self._avoided.get((job, stage, claim.peer), now) <= now]

    def owns(self, job: JobId, stage: int, peer: PeerId) -> bool:
        """Whether the peer is the stage's owner, as far as is known, and not a replica."""
        cached = self._cached_claims.get(job)
        return cached is None or all(c.role == "owner" for c in cached.stages[stage] if c.peer == peer)

    def replace(self, job: JobId, route: Sequence[Hop], new_owners: Mapping[int, Hop]) -> None:
        """Some owners of `route` have failed. `found`: the new owners by stage; empty: the claims are read again next time."""
        cached = self._cached_claims.get(job)
        if not new_owners or cached is None:
            self.forget(job)
            return
        stages = [list(layer) for layer in cached.stages]
        for stage, hop in new_owners.items():
            owner = stages[stage][0]
            gone = {route[stage].peer, hop.peer}
            if owner.role == "owner" and owner.term > hop.term:
                continue
            new = replace(owner, role="owner", peer=hop.peer, term=hop.term, load=0.0)
            stages[stage] = [new, *(c for c in stages[stage] if c.role == "replica" and c.peer not in gone)]
            self._avoided.pop((job, stage, hop.peer), None)
        self._cached_claims[job] = _Claims(self._clock(), stages)
        self._invalidate_read(job)

    def newer(self, job: JobId, stage: int, hop: Hop) -> Hop | None:
        """The owner of the stage under a higher term than `hop`, if one is cached."""
        cached = self._cached_claims.get(job)
        owner = None if cached is None else cached.stages[stage][0]
        if owner is None or owner.role != "owner" or owner.term <= hop.term:
            return None
        return Hop(owner.peer, owner.term)

    def forget(self, job: JobId) -> None:
        """The route failed: read the claims again next time."""
        self._cached_claims.pop(job, None)
        self._invalidate_read(job)

    def _invalidate_read(self, job: JobId) -> None:
        """Invalidate a read that still runs: those that wait for it get it, and nobody else."""
        if (reading_claims := self._reading_claims.pop(job, None)) is not None:
            self._invalidated.add(reading_claims)
            reading_claims.add_done_callback(self._invalidated.discard)


def _holders_of(
    model: ServedModel, stage: int, claims: tuple[ClaimRecord, ...], stale: ClaimRecord | None
) -> tuple[ClaimRecord, ...]:
    """The holders of the stage; where no lease is valid any more, `stale` (from `Leases.stale_claim`), the newest expired claim. Raises NoOwner."""
    held = holders(claims if stale is None else (*claims, stale))
    if held:
        return held
    name = model.manifest.name
    if any(stands_by(claim) for claim in claims):
        raise NoOwner(stage, f"stage {stage} of {name} has no owner now; a standby is about to take it over")
    raise NoOwner(stage, needs(stage, model.manifest.memory_bytes, name))
