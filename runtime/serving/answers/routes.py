"""Routes of served models: who runs their stages, as the directory said it lately, and what is known of those who failed.

No token waits for anything here. A route is looked up for each session, and while it runs, beside it, to see whether
there is a better one; nobody looks twice within a heartbeat. Within a few a session begins by what was seen last, while we look
again: where that has changed, a stage says so before the directory has.
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

# Models whose holders are remembered: whoever asks names the model, and anybody may publish one.
MAX_LOOKS = 256
AVOIDED_SECONDS = 3 * HEARTBEAT_SECONDS  # after which the claim of a peer that died has run out
SEEN_TIMES = 3.0  # as long as a look is believed, it is gone by while the next one is under way; no longer than a claim counts
# As long as nobody looks at an idle link, a session begins by what was said of links before.
LINKED_SECONDS = 60.0


class NoOwner(NoRoute):
    def __init__(self, stage: int, message: str) -> None:
        super().__init__(message)
        self.stage = stage


@dataclass(frozen=True)
class _Look:
    """What the directory said of who runs the stages of a model."""

    at: float
    stages: Layers


class Routes:
    """`ours`: how many sessions of this gateway run at each holder of a stage; `unowned` is told of a model of which some stage has
    no owner. `fresh_seconds`: for how long a look into the directory is believed."""

    def __init__(
        self,
        context: Context,
        ours: Callable[[JobId], Mapping[tuple[int, PeerId], int]] = lambda job: {},
        unowned: Callable[[JobId], object] = lambda job: None,
        *,
        fresh_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._context = context
        self._ours = ours
        self._unowned = unowned
        self._fresh_seconds = fresh_seconds
        self._clock = context.clock.monotonic
        self._linking: asyncio.Task[None] | None = None  # reads what is said of links
        self._linked_at = float("-inf")  # when that was last done
        self._looks: LRUCache[JobId, _Look] = LRUCache(MAX_LOOKS)
        self._looking: dict[JobId, asyncio.Task[_Look]] = {}
        self._forgotten: set[asyncio.Task[_Look]] = set()  # which are under way and count no more
        self._avoided: dict[tuple[JobId, int, PeerId], float] = {}  # until when

    async def aclose(self) -> None:
        linking = [] if self._linking is None else [self._linking]
        await cancel_all([*self._looking.values(), *self._forgotten, *linking])

    async def is_held(self, model: ServedModel) -> bool:
        """Whether a session would find all of its stages in memory."""
        try:
            look = await self._look(model)
        except (NoOwner, JobFailed):
            return False
        return all(any(claim.ready for claim in layer) for layer in look.stages)

    async def route(self, model: ServedModel, work: RemainingWork) -> tuple[Hop, ...]:
        """The best of the routes that there are, as far as is known. A stage may still be on its way into its owner's
        memory: the owner then lets us wait. NoOwner names the first stage that nobody holds, JobFailed says that the
        model is served no longer."""
        return (await self._options(model, LINKED_SECONDS)).choose(work)

    async def better(
        self, model: ServedModel, work: RemainingWork, current: Sequence[Hop]
    ) -> tuple[Hop, ...] | None:
        """Where a session that runs on `current` should move to, if anywhere. Raises as `route` does."""
        if not self.has_choice(model.job):
            return None
        return (await self._options(model, self._fresh_seconds)).better(work, current)

    def has_choice(self, job: JobId) -> bool:
        """Whether some stage had more than one holder when we last looked."""
        look = self._looks.get(job)
        return look is not None and any(len(layer) > 1 for layer in look.stages)

    async def _look(self, model: ServedModel) -> _Look:
        job = model.job
        found = self._looks.get(job)
        age = math.inf if found is None else self._clock() - found.at
        if found is not None and age < self._fresh_seconds:
            return found
        if (looking := self._looking.get(job)) is None:
            looking = self._looking[job] = asyncio.create_task(self._look_anew(model))
            looking.add_done_callback(partial(self._looked, job))
        if found is not None and age < SEEN_TIMES * self._fresh_seconds:
            return found
        return await asyncio.shield(looking)

    def _looked(self, job: JobId, looking: asyncio.Task[_Look]) -> None:
        if self._looking.get(job) is looking:  # and nothing has been learned meanwhile
            del self._looking[job]
            if looking.cancelled() or looking.exception() is not None:
                self._looks.pop(job, None)
            else:
                self._looks[job] = looking.result()
        elif not looking.cancelled():
            looking.exception()  # whoever waits for it has it

    async def _look_anew(self, model: ServedModel) -> _Look:
        leases = self._context.leases
        claims = await leases.claims_of(model.job, range(model.manifest.stages))
        try:
            stages = [
                _held(model, stage, said, leases.stale_claim(model.job, stage))
                for stage, said in enumerate(claims)
            ]
        except NoOwner:
            self._unowned(model.job)
            known = await candidates(self._context, await self._context.directory.job_records(model.job))
            for each in known:
                if each.belief.over:
                    raise JobFailed(
                        f"{model.manifest.name} is not served any more: {each.record.state}"
                    ) from None
            raise
        return _Look(self._clock(), stages)

    async def _options(self, model: ServedModel, links_seconds: float) -> RouteOptions:
        """By what is known of links for at most so long."""
        job = model.job
        look = await self._look(model)
        stages = [self._left(job, stage, layer) or layer for stage, layer in enumerate(look.stages)]
        return RouteOptions(
            stages=stages,
            links=await self._links(stages, links_seconds),
            gateway=self._context.peer_id,
            costs=model.costs,
            ours=self._ours(job),
        )

    async def _links(self, stages: Layers, known_seconds: float) -> LinkView:
        """What is known of the links, where there is anything to choose; what others say of theirs is read again once it is not fresh,
        and waited for once it is older than that."""
        links = self._context.links
        if links is None or all(len(held) == 1 for held in stages):
            return LinkView()
        age = self._clock() - self._linked_at
        if age >= self._fresh_seconds and self._linking is None:
            self._linking = asyncio.create_task(self._read_links())
        if age >= known_seconds and self._linking is not None:
            await asyncio.shield(self._linking)
        return links.snapshot()

    async def _read_links(self) -> None:
        links = self._context.links
        assert links is not None, "nobody asks without any"
        try:
            with suppress(SwarmError):
                await links.refresh(self._fresh_seconds)
                self._linked_at = self._clock()
        finally:
            self._linking = None

    # --- holders that fail

    def avoid(self, job: JobId, stage: int, peer: PeerId) -> bool:
        """The peer did not run the stage as it says: for a while go by others, where there are any. Whether there
        are."""
        now = self._clock()
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        self._avoided[job, stage, peer] = now + AVOIDED_SECONDS
        look = self._looks.get(job)
        return look is not None and bool(self._left(job, stage, look.stages[stage]))

    def _left(self, job: JobId, stage: int, layer: Sequence[ClaimRecord]) -> list[ClaimRecord]:
        """Those of a stage's holders that are not avoided."""
        now = self._clock()
        return [claim for claim in layer if self._avoided.get((job, stage, claim.peer), now) <= now]

    def owns(self, job: JobId, stage: int, peer: PeerId) -> bool:
        """Whether the peer owns the stage rather than running it beside its owner, as far as is known."""
        look = self._looks.get(job)
        return look is None or all(c.role == "owner" for c in look.stages[stage] if c.peer == peer)

    def replace(self, job: JobId, route: Sequence[Hop], found: Mapping[int, Hop]) -> None:
        """The owners of `route` did not hold. `found`: who owns some of its stages now; with nothing found we look next
        time."""
        look = self._looks.get(job)
        if not found or look is None:
            self.forget(job)
            return
        stages = [list(layer) for layer in look.stages]
        for stage, hop in found.items():
            owner = stages[stage][0]
            gone = {route[stage].peer, hop.peer}
            if owner.role == "owner" and owner.term > hop.term:
                continue
            new = replace(owner, role="owner", peer=hop.peer, term=hop.term, load=0.0)
            stages[stage] = [new, *(c for c in stages[stage] if c.role == "replica" and c.peer not in gone)]
            self._avoided.pop((job, stage, hop.peer), None)
        self._looks[job] = _Look(self._clock(), stages)
        self._forget_look(job)

    def newer(self, job: JobId, stage: int, hop: Hop) -> Hop | None:
        """Who owns the stage under a higher term than `hop`, as far as we know without looking."""
        look = self._looks.get(job)
        owner = None if look is None else look.stages[stage][0]
        if owner is None or owner.role != "owner" or owner.term <= hop.term:
            return None
        return Hop(owner.peer, owner.term)

    def forget(self, job: JobId) -> None:
        """The route did not hold: look again next time."""
        self._looks.pop(job, None)
        self._forget_look(job)

    def _forget_look(self, job: JobId) -> None:
        """Of one that is under way: whoever waits for it has it, and nobody else."""
        if (looking := self._looking.pop(job, None)) is not None:
            self._forgotten.add(looking)
            looking.add_done_callback(self._forgotten.discard)


def _held(
    model: ServedModel, stage: int, claims: tuple[ClaimRecord, ...], behind: ClaimRecord | None
) -> tuple[ClaimRecord, ...]:
    """Who runs the stage; where nobody holds it by right any more, `behind` (of `Leases`), who claims it all the same."""
    held = holders(claims if behind is None else (*claims, behind))
    if held:
        return held
    name = model.manifest.name
    if any(stands_by(claim) for claim in claims):
        raise NoOwner(stage, f"stage {stage} of {name} has no owner now; a standby is about to take it over")
    raise NoOwner(stage, needs(stage, model.manifest.memory_bytes, name))
