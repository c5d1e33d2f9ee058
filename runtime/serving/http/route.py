"""Which peers run the stages of an answer, for a stream whose client asked (`stream_options.include_route`): said at its
beginning, and again whenever another peer has taken a stage over or the swarm has said more of the links between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from fusion.runtime.job.context import Context
from fusion.runtime.serving.http.answers import Part
from fusion.runtime.serving.http.shapes import Json
from fusion.swarm.errors import SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.links.view import LinkView
from fusion.swarm.transport import PeerId

# A look at what others say of their links is believed for so long: who asks often makes none of them.
FRESH_SECONDS = 5.0
LOOK_SECONDS = 1.0  # for such a look


def route_json(choice: int, us: PeerId, route: Sequence[PeerId], view: LinkView) -> Json:
    """For answer number `choice`: the peer that was asked, and its stages in order. `round_trip_ms` is from each to the next one
    and back, from the last stage to the first; null where nobody knows it, or both are one peer."""
    ways = zip([us, *route], [*route, route[0]], strict=True)
    trips = [None if one == two else view.link(one, two).rtt_seconds for one, two in ways]
    gateway, *stages = [_hop(peer, trip) for peer, trip in zip([us, *route], trips, strict=True)]
    return {"index": choice, "gateway": gateway, "stages": stages}


def _hop(peer: PeerId, trip: float | None) -> Json:
    milliseconds = None if trip is None else round(1e3 * trip, 3)
    return {"peer": str(peer), "name": friendly_name(peer), "round_trip_ms": milliseconds}


class RouteReporter:
    """One stream's. Entered once, while the stream is sent."""

    def __init__(self, context: Context) -> None:
        self._us = context.peer_id
        self._links = context.links
        self._routes: dict[int, tuple[PeerId, ...]] = {}
        # the route, and whether after the look
        self._reported: dict[int, tuple[tuple[PeerId, ...], bool]] = {}
        self._looking: asyncio.Future[None]

    def __enter__(self) -> None:
        self._looking = asyncio.create_task(self._look())

    def __exit__(self, *_: object) -> None:
        self._looking.cancel()

    def news(self, part: Part) -> list[Json]:
        """What has to be said before `part` is."""
        if not part.said.route:
            return []  # no stage has been asked yet, or none is: of a prompt that is told of
        self._routes[part.choice] = part.said.route
        return self._unreported([part.choice])

    async def last_news(self) -> list[Json]:
        """Likewise after the last part."""
        await asyncio.wait([self._looking])
        return self._unreported(list(self._routes))

    def _unreported(self, choices: Sequence[int]) -> list[Json]:
        # Round trips change all the time: only another route, or what the look has shown, is worth an event.
        new = [each for each in choices if self._reported.get(each) != self._state(each)]
        if not new:
            return []
        self._reported |= {choice: self._state(choice) for choice in new}
        view = LinkView() if self._links is None else self._links.snapshot()
        return [route_json(choice, self._us, self._routes[choice], view) for choice in new]

    def _state(self, choice: int) -> tuple[tuple[PeerId, ...], bool]:
        return self._routes[choice], self._looking.done()

    async def _look(self) -> None:
        if self._links is not None:
            with suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._links.refresh(FRESH_SECONDS)
