"""Owners that are there and do nothing, as a stage of the same job saw for itself: we vote against them though they answer."""

from __future__ import annotations

from collections.abc import Callable

from cachetools import FIFOCache

from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import JobId, Place

REMEMBERED = 4096  # stages


class IdleOwners:
    """`clock` gives seconds that only rise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: FIFOCache[Place, tuple[Holding, float]] = FIFOCache(REMEMBERED)

    def add(self, place: Place, holding: Holding, seconds: float) -> None:
        """For so long."""
        self._seen[place] = holding, self._clock() + seconds

    def forget(self, job: JobId) -> None:
        for place in [place for place in self._seen if place[0] == job]:
            del self._seen[place]

    def has(self, place: Place, holding: Holding) -> bool:
        """Whether it is one: also under a higher term, to which it may have raised its claim itself."""
        idle, until = self._seen.get(place, (None, 0.0))
        return (
            idle is not None
            and idle.peer == holding.peer
            and idle.term <= holding.term
            and self._clock() < until
        )
