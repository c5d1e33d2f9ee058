"""Owners that are there and do nothing, as a stage of the same job saw for itself: we vote against them though they answer, and
hand them nothing for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachetools import FIFOCache

from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import JobId, Place
from fusion.swarm.transport import PeerId

REMEMBERED = 4096  # stages, and peers
# Whoever had a stage taken from it stands by again, idle as it is: before all others.
AVOIDED_SECONDS = 600.0
STAYS_SECONDS = 30.0  # that its standbys are asked in vain, before we get ready to follow it ourselves


@dataclass(frozen=True)
class _Idle:
    holding: Holding
    since: float
    until: float  # we vote against it


class IdleOwners:
    """`clock` gives seconds that only rise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: FIFOCache[Place, _Idle] = FIFOCache(REMEMBERED)
        self._avoided: FIFOCache[tuple[JobId, PeerId], float] = FIFOCache(REMEMBERED)

    def add(self, place: Place, holding: Holding, seconds: float) -> None:
        """For so long we vote against it."""
        now = self._clock()
        since = self._seen[place].since if self.has(place, holding) else now
        self._seen[place] = _Idle(holding, since, now + seconds)
        self.avoid(place[0], holding.peer)

    def avoid(self, job: JobId, peer: PeerId) -> None:
        """A stage of the job was taken from that peer, which did nothing for it."""
        self._avoided[job, peer] = self._clock() + AVOIDED_SECONDS

    def avoids(self, job: JobId, peer: PeerId) -> bool:
        return self._clock() < self._avoided.get((job, peer), 0.0)

    def forget(self, job: JobId) -> None:
        """The job goes on: we vote against nobody."""
        for place in [place for place in self._seen if place[0] == job]:
            del self._seen[place]

    def stays(self, place: Place) -> bool:
        """Whether we have voted against its owner for long."""
        idle, now = self._seen.get(place), self._clock()
        return idle is not None and now < idle.until and now - idle.since >= STAYS_SECONDS

    def has(self, place: Place, holding: Holding) -> bool:
        """Whether we vote against it: also under a higher term, to which it may have raised its claim itself."""
        idle = self._seen.get(place)
        if idle is None or self._clock() >= idle.until:
            return False
        return idle.holding.peer == holding.peer and idle.holding.term <= holding.term
