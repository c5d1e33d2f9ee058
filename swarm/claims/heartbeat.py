"""Renews each of our claims once a heartbeat, in a task of its own. What a renewal does is decided in
`fusion.swarm.claims.leases` and `fusion.swarm.claims.standbys`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.claims.claim_publisher import ClaimPublisher
from fusion.swarm.directory.records import Place

Renew = Callable[[Place], Coroutine[Any, Any, None]]


class Heartbeat:
    """Renews the claims of `publisher`: `renew` one to own a stage, `renew_standby` any other. Neither may raise anything but
    CancelledError."""

    def __init__(self, publisher: ClaimPublisher, renew: Renew, renew_standby: Renew, seconds: float) -> None:
        self._publisher = publisher
        self._renew = renew
        self._renew_standby = renew_standby
        self._seconds = seconds
        self._renewing: dict[Place, asyncio.Task[None]] = {}

    async def aclose(self) -> None:
        """Cancel the renewals under way."""
        await cancel_all(self._renewing.values())

    def beat(self) -> list[asyncio.Task[None]]:
        """Start one renewal of each claim and return the tasks, which need not be awaited: slow directory nodes of one claim must not
        hold up the others. Where the last renewal of an owner's claim still runs, the claim is only published again, unless it has
        lapsed."""
        started: list[asyncio.Task[None]] = []
        for place, held in list(self._publisher.owned.items()):
            if place not in self._renewing:
                started.append(self._start(place, self._renew))
            elif not self._publisher.lapsed(held):
                self._publisher.publish_soon(held)
        for place in list(self._publisher.standby_claims):
            if place not in self._renewing:
                started.append(self._start(place, self._renew_standby))
        return [self._start_publishing(), *started]

    async def run(self) -> None:
        """Beat for ever, and publish what becomes due in between at once. Awaits none of the tasks that it starts."""
        clock, beat_at, due = asyncio.get_running_loop(), 0.0, True
        while True:
            if due:
                beat_at = clock.time() + self._seconds
                self.beat()
            else:
                self._start_publishing()
            self._publisher.wake.clear()
            try:
                async with asyncio.timeout_at(beat_at):
                    await self._publisher.wake.wait()
                due = False
            except TimeoutError:
                due = True

    def _start(self, place: Place, renew: Renew) -> asyncio.Task[None]:
        self._publisher.drop_due(place)
        task = self._renewing[place] = asyncio.create_task(renew(place), name="renewing a claim")
        task.add_done_callback(lambda _: self._renewing.pop(place))
        return task

    def _start_publishing(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self._publisher.publish_due(), name="publishing claims")
        self._publisher.background.add(task)
        task.add_done_callback(self._publisher.background.discard)
        return task
