"""Owners that answer but do no work, as our own stage of the same job observed: we vote against them although they answer, and
offer them no stage of the job for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachetools import FIFOCache

from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import JobId, Place
from fusion.swarm.transport import PeerId

REMEMBERED = 4096  # stages, and peers
# A peer that lost its stage so stands by again, and ranks first, as it is idle.
AVOIDED_SECONDS = 600.0
STAYS_SECONDS = 30.0  # of reports to its standbys in vain, before we stand by for the stage ourselves


@dataclass(frozen=True)
class _Idle:
    holding: Holding
    since: float
    until: float  # we vote against it


class IdleOwners:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: FIFOCache[Place, _Idle] = FIFOCache(REMEMBERED)
        self._avoided: FIFOCache[tuple[JobId, PeerId], float] = FIFOCache(REMEMBERED)

    def add(self, place: Place, holding: Holding, seconds: float) -> None:
        """We vote against it for `seconds`."""
        now = self._clock()
        since = self._seen[place].since if self.has(place, holding) else now
        self._seen[place] = _Idle(holding, since, now + seconds)
        self.avoid(place[0], holding.peer)

    def avoid(self, job: JobId, peer: PeerId) -> None:
        """The peer lost a stage of the job because it did no work: offer it none for AVOIDED_SECONDS."""
        self._avoided[job, peer] = self._clock() + AVOIDED_SECONDS

    def avoids(self, job: JobId, peer: PeerId) -> bool:
        return self._clock() < self._avoided.get((job, peer), 0.0)

    def forget(self, job: JobId) -> None:
        """The job goes on: we vote against none of its owners."""
        for place in [place for place in self._seen if place[0] == job]:
            del self._seen[place]

    def stays(self, place: Place) -> bool:
        """Whether we have voted against its owner for STAYS_SECONDS, and it is still there."""
        idle, now = self._seen.get(place), self._clock()
        return idle is not None and now < idle.until and now - idle.since >= STAYS_SECONDS

    def has(self, place: Place, holding: Holding) -> bool:
        """Whether we vote against that holding, also under a higher term, as the peer may have raised its term itself."""
        idle = self._seen.get(place)
        if idle is None or self._clock() >= idle.until:
            return False
        return idle.holding.peer == holding.peer and idle.holding.term <= holding.term
