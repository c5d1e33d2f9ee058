"""Moves of a running completion: away from a peer that is about to leave, and to a better route when there is one. The next session is
opened beside the current one, which goes on if that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from fusion.runtime.job.errors import JobFailed, NoRoute
from fusion.runtime.serving.answers.failover import Fault, Faulted
from fusion.runtime.serving.answers.gateway_session import GatewaySession
from fusion.runtime.serving.answers.routes import Routes
from fusion.runtime.serving.answers.session_pair import SessionPair
from fusion.runtime.serving.ring.session import Hop
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.printable import error_line

log = logging.getLogger(__name__)

MOVE_TRIES = 10  # to find the successor of a peer that leaves, whose claim may not be in the directory yet
MOVE_PAUSE_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two searches for a better route
CHOICELESS_LOOKS = 5  # only every so many searches run while no stage has a replica
SETTLE_SECONDS = 5.0  # between two moves to a better route


class Moves:
    """`flows`: whether tokens arrive; after a fault they do not, and no move begins."""

    def __init__(
        self,
        pair: SessionPair,
        routes: Routes,
        flows: Callable[[], bool],
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        self._pair = pair
        self._routes = routes
        self._flows = flows
        self._clock = clock
        self._random = random
        self._settled_at = clock()  # when the session may move to a better route again
        self._opening: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether a next session is open or being opened."""
        return self._pair.next is not None or (self._opening is not None and not self._opening.done())

    async def aclose(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])

    def leave(self, session: GatewaySession, stage: int) -> None:
        """The peer that runs `stage` of the current session is about to leave."""
        if not self.under_way:
            self._routes.avoid(session.model.job, stage, session.route[stage].peer)
            self._opening = asyncio.create_task(self._move_to_successor(session))

    async def _move_to_successor(self, session: GatewaySession) -> None:
        """Move to the leaving peer's successor. If this fails, the end of the session is a fault like any other."""
        for _ in range(MOVE_TRIES):
            self._routes.forget(session.model.job)
            try:
                route = await self._routes.route(session.model, self._pair.remaining)
                if route != session.route:
                    await self._pair.open_next(route)
                    return
            except (NoRoute, JobFailed, SwarmError, Faulted) as error:
                log.debug("no other way yet: %s", error)
            await asyncio.sleep(MOVE_PAUSE_SECONDS)

    async def watch(self) -> None:
        """Move to a better route whenever there is one, until the completion ends."""
        pair, model, looks = self._pair, self._pair.task.model, 0
        while True:
            await asyncio.sleep(LOOK_SECONDS * self._random.uniform(0.8, 1.2))
            looks += 1
            session = pair.current
            if session is None or session.waiting or not self._flows():
                continue
            if self.under_way or self._clock() < self._settled_at:
                continue
            if looks % CHOICELESS_LOOKS and not self._routes.has_choice(model.job):
                continue
            try:
                route = await self._routes.better(model, pair.remaining, session.route)
            except (NoRoute, JobFailed, SwarmError) as error:
                log.debug("no better way: %s", error_line(error))
                continue
            if route is None or session is not pair.current or self.under_way:
                continue
            self._settled_at = self._clock() + SETTLE_SECONDS
            names = ", ".join(friendly_name(hop.peer) for hop in route)
            log.info("%s: the way over %s is better", model.manifest.name, names)
            self._opening = asyncio.create_task(self._move_to(route))

    async def _move_to(self, route: tuple[Hop, ...]) -> None:
        try:
            await self._pair.open_next(route)
        except Faulted as error:
            log.debug("no way over there: %s", error)
            self._avoid(route, error.fault)

    def lost(self, session: GatewaySession, fault: Fault) -> None:
        """The next session has failed before it took over."""
        log.debug("the session opened meanwhile was lost: %s", fault.message)
        self._pair.drop_next()
        self._avoid(session.route, fault)

    def _avoid(self, route: tuple[Hop, ...], fault: Fault) -> None:
        for stage in fault.stages:
            self._routes.avoid(self._pair.task.model.job, stage, route[stage].peer)
