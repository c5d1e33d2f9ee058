"""Every claim of ours renewed once a heartbeat, each by itself. What a renewal does is decided by whoever holds the claims
(`fusion.swarm.claims.leases`, `fusion.swarm.claims.standbys`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.claims.claim_publisher import ClaimPublisher
from fusion.swarm.directory.records import Place

Renew = Callable[[Place], Coroutine[Any, Any, None]]


class Heartbeat:
    """Of the claims of `ours`: `renew` renews one to own a stage, `renew_standby` another one. Neither may raise anything but
    CancelledError."""

    def __init__(self, ours: ClaimPublisher, renew: Renew, renew_standby: Renew, seconds: float) -> None:
        self._ours = ours
        self._renew = renew
        self._renew_standby = renew_standby
        self._seconds = seconds
        self._renewing: dict[Place, asyncio.Task[None]] = {}

    async def aclose(self) -> None:
        """End the renewals under way."""
        await cancel_all(self._renewing.values())

    def beat(self) -> list[asyncio.Task[None]]:
        """Begin one renewal of each claim: these tasks, to be awaited or not. One whose directory nodes are slow must not hold up the
        others: where the last renewal of an owner's claim is not done yet, the claim is only published once more, unless it has
        lapsed meanwhile."""
        begun: list[asyncio.Task[None]] = []
        for place, held in list(self._ours.owned.items()):
            if place not in self._renewing:
                begun.append(self._begin(place, self._renew))
            elif not self._ours.lapsed(held):
                self._ours.publish_soon(held)
        for place in list(self._ours.standby_claims):
            if place not in self._renewing:
                begun.append(self._begin(place, self._renew_standby))
        return [self._begin_publishing(), *begun]

    async def run(self) -> None:
        """A heartbeat every so many seconds, and what is due in between at once, for ever. Waits for none of what it begins."""
        clock, beat_at, due = asyncio.get_running_loop(), 0.0, True
        while True:
            if due:
                beat_at = clock.time() + self._seconds
                self.beat()
            else:
                self._begin_publishing()
            self._ours.wake.clear()
            try:
                async with asyncio.timeout_at(beat_at):
                    await self._ours.wake.wait()
                due = False
            except TimeoutError:
                due = True

    def _begin(self, place: Place, renew: Renew) -> asyncio.Task[None]:
        self._ours.drop_due(place)
        task = self._renewing[place] = asyncio.create_task(renew(place), name="renewing a claim")
        task.add_done_callback(lambda _: self._renewing.pop(place))
        return task

    def _begin_publishing(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self._ours.publish_due(), name="publishing claims")
        self._ours.late.add(task)
        task.add_done_callback(self._ours.late.discard)
        return task
