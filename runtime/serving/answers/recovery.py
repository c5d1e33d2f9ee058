"""Recovery of a completion after its session failed: owners are reported, holders avoided, and the completion goes on elsewhere or
fails. Carries out the policy in `fusion.runtime.serving.answers.failover`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from fusion.runtime.job.errors import JobFailed, NoRoute, StagesFull
from fusion.runtime.serving.answers.failover import (
    FailoverConfig,
    Fault,
    FaultHistory,
    FaultKind,
    explain,
    respond,
)
from fusion.runtime.serving.answers.routes import Routes
from fusion.runtime.serving.answers.served_model import ServedModel
from fusion.runtime.serving.answers.session_pair import SessionPair
from fusion.runtime.serving.grammar.matcher import GrammarTooCostly
from fusion.runtime.serving.ring.session import Hop
from fusion.swarm.cancelling import cancel_all
from fusion.swarm.errors import SwarmError

log = logging.getLogger(__name__)

FLOWING = FaultHistory(answered=True)  # tokens arrive
WAKING_SECONDS = 0.05  # poll interval for a silent stage that resumes while it is reported

# Reports the owner of a stage as failed; returns its owner now, None where no other peer took over.
Suspect = Callable[[ServedModel, int, Hop], Awaitable[Hop | None]]


_GIVEN_UP: dict[FaultKind, type[JobFailed] | type[NoRoute]] = {
    "absent": NoRoute,
    "full": StagesFull,
    "grammar": GrammarTooCostly,
}


class Recovery:
    def __init__(self, pair: SessionPair, routes: Routes, suspect: Suspect, config: FailoverConfig) -> None:
        self._pair = pair
        self._routes = routes
        self._suspect = suspect
        self._config = config
        self._faults = FaultHistory(answered=bool(pair.task.answered))
        self._reports: set[asyncio.Task[bool]] = set()  # in the background

    @property
    def flows(self) -> bool:
        """Whether a token has arrived since the last fault."""
        return self._faults is FLOWING

    def token(self) -> None:
        self._faults = FLOWING

    async def aclose(self) -> None:
        await cancel_all(self._reports)

    async def after(self, fault: Fault, stalled_seconds: float) -> None:
        """Respond to a fault: report, avoid, wait. Raises NoRoute or JobFailed where the completion fails. The current session is closed,
        unless it may resume."""
        pair, model = self._pair, self._pair.task.model
        name, before = model.manifest.name, pair.route
        fault = fault.on([hop.peer for hop in before])
        self._faults = self._faults.with_fault(fault)
        if fault.kind == "broken":
            pair.reuses = False  # a stage's prefix cache may be wrong
        # Avoid all of them, even where only one is at fault.
        others = [
            self._routes.avoid(model.job, stage, before[stage].peer) for stage in fault.stages if before
        ]
        elsewhere = bool(others) and all(others)
        retry = respond(self._faults, fault, stalled_seconds, self._config, elsewhere=elsewhere)
        if retry is None:
            line = explain(fault, name, model.manifest.memory_bytes, stalled_seconds)
            raise _GIVEN_UP.get(fault.kind, JobFailed)(line)
        log.info("%s: %s (%s); looking for another way", name, fault.message, fault.kind)
        followed = False
        if retry.suspects and elsewhere:
            report = asyncio.create_task(self._report(retry.suspects, keep=False))
            self._reports.add(report)
            report.add_done_callback(self._reports.discard)
        elif retry.suspects:
            followed = await self._report(retry.suspects, keep=retry.keep)
        if retry.keep and pair.current is not None:
            if not pair.events.empty():
                return  # it has resumed
            with suppress(NoRoute, SwarmError):
                if await self._routes.route(model, pair.remaining) == before:
                    return  # no takeover: it may still resume
        pair.drop_current()
        if not retry.suspects:
            self._routes.forget(model.job)
        if not followed:  # each takeover needs a majority, so retries without a pause are bounded
            await asyncio.sleep(retry.pause_seconds)

    async def _report(self, stages: Sequence[int], *, keep: bool) -> bool:
        """Report the owners of these stages, and update the routes. Returns whether all have been taken over."""
        model, route = self._pair.task.model, self._pair.route
        stages = [stage for stage in stages if self._routes.owns(model.job, stage, route[stage].peer)]
        reports = asyncio.gather(*(self._suspect(model, stage, route[stage]) for stage in stages))
        try:
            while not reports.done():
                await asyncio.wait([reports], timeout=WAKING_SECONDS)
                if keep and not self._pair.events.empty():
                    return False
            hops = reports.result()
        finally:
            reports.cancel()
        self._routes.replace(model.job, route, {s: hop for s, hop in zip(stages, hops, strict=True) if hop})
        return bool(hops) and all(hops)
