"""Which peers run the stages of a completion, for a stream with `stream_options.include_route`: reported at its beginning, and again
whenever another peer has taken a stage over or more is known of the links between them."""

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

# Link records read from the directory are reused for so long, however many clients ask.
FRESH_SECONDS = 5.0
LOOK_SECONDS = 1.0  # timeout for reading them


def route_json(choice: int, own_id: PeerId, route: Sequence[PeerId], view: LinkView) -> Json:
    """For completion number `choice`: the gateway, and the stages in order. `round_trip_ms` is from each peer to the next (from the
    last stage to the first); null where it is unknown, or both are the same peer."""
    ways = zip([own_id, *route], [*route, route[0]], strict=True)
    trips = [None if one == two else view.link(one, two).rtt_seconds for one, two in ways]
    gateway, *stages = [_hop(peer, trip) for peer, trip in zip([own_id, *route], trips, strict=True)]
    return {"index": choice, "gateway": gateway, "stages": stages}


def _hop(peer: PeerId, trip: float | None) -> Json:
    milliseconds = None if trip is None else round(1e3 * trip, 3)
    return {"peer": str(peer), "name": friendly_name(peer), "round_trip_ms": milliseconds}


class RouteReporter:
    """Reports the route of one stream. Entered once, for as long as the stream is sent."""

    def __init__(self, context: Context) -> None:
        self._own_id = context.peer_id
        self._links = context.links
        self._routes: dict[int, tuple[PeerId, ...]] = {}
        # choice -> the route, and whether the links had been read by then
        self._reported: dict[int, tuple[tuple[PeerId, ...], bool]] = {}
        self._refreshing: asyncio.Future[None]

    def __enter__(self) -> None:
        self._refreshing = asyncio.create_task(self._refresh_links())

    def __exit__(self, *_: object) -> None:
        self._refreshing.cancel()

    def changes(self, part: Part) -> list[Json]:
        """The route events to send before `part`."""
        if not part.output.route:
            return []  # no stage runs yet, or none is needed: an echoed prompt
        self._routes[part.choice] = part.output.route
        return self._unreported([part.choice])

    async def last_changes(self) -> list[Json]:
        """The route events to send after the last part."""
        await asyncio.wait([self._refreshing])
        return self._unreported(list(self._routes))

    def _unreported(self, choices: Sequence[int]) -> list[Json]:
        # Round trips change all the time: only another route, or freshly read links, are worth an event.
        new = [each for each in choices if self._reported.get(each) != self._state(each)]
        if not new:
            return []
        self._reported |= {choice: self._state(choice) for choice in new}
        view = LinkView() if self._links is None else self._links.snapshot()
        return [route_json(choice, self._own_id, self._routes[choice], view) for choice in new]

    def _state(self, choice: int) -> tuple[tuple[PeerId, ...], bool]:
        return self._routes[choice], self._refreshing.done()

    async def _refresh_links(self) -> None:
        if self._links is not None:
            with suppress(SwarmError, TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._links.refresh(FRESH_SECONDS)
