"""Which stages a peer stands by for: a pure decision, the same on all peers that see the same claims and peers.

A standby fetches what a stage needs ahead of time, so that an owner that dies is replaced in seconds. Idle peers go first. A
peer covers as many stages as fit its disk: it needs the memory of one of them, not of all, since it takes over one at a time
and leaves the others to the next standby.

Peers do not negotiate. Each computes the assignment of all candidates to all uncovered stages, fewest standbys first, and
takes its own part. Where views differ, a stage gets too few (the next candidates follow after `PATIENCE_SECONDS`) or too many
(the surplus leaves, but only above `SPARE`, so that the assignment does not oscillate).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion.swarm.claims.election import tie_break
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import JobId, Place
from fusion.swarm.transport import PeerId

WANTED = 2  # standbys a stage
SPARE = 1  # more than wanted that may stay
# Standbys of a stage up to which peers with stages of their own are assigned, where there are no idle ones.
BUSY_WANTED = 1
PATIENCE_SECONDS = (
    4 * HEARTBEAT_SECONDS
)  # for an assigned candidate to stand by, before another one is assigned
CANDIDATES = 64  # that share the uncovered stages of one job


@dataclass(frozen=True, kw_only=True)
class Standby:
    """Another peer that stands by for a stage, by its claim."""

    peer: PeerId
    score: float
    ready: bool


@dataclass(frozen=True, kw_only=True)
class UncoveredStage:
    """A stage with an owner, which standbys may cover."""

    job: JobId
    stage: int
    owner: PeerId | None  # None: not known, or still loading: standbys stay, none is added
    memory_bytes: int
    disk_bytes: int
    opset: int = 1  # that it needs
    standbys: tuple[Standby, ...] = ()  # not counting ourselves
    covered: bool = False  # we stand by for it now
    short_seconds: float = 0.0  # for how long it has had fewer standbys than wanted
    next_owner: PeerId | None = None  # owns the next stage, and holds a copy of this one's snapshots anyway

    @property
    def place(self) -> Place:
        return self.job, self.stage


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A peer that could stand by, by its own record."""

    peer: PeerId
    free_memory_bytes: int
    idle: bool  # it owns no stage
    opset: int = 1  # that it knows


@dataclass(frozen=True, kw_only=True)
class StandbyCapacity:
    """What this peer has for standing by, for all stages together."""

    disk_bytes: int
    max_stages: int


def places_to_cover(
    openings: Iterable[UncoveredStage],
    us: Candidate,
    others: Iterable[Candidate],
    score: float,
    room: StandbyCapacity,
) -> tuple[Place, ...]:
    """The stages that `us` stands by for from now on, those with the fewest standbys first. `score` is that of our own
    standby claims, `others` are the other candidates."""
    openings = [opening for opening in openings if opening.memory_bytes <= us.free_memory_bytes]
    kept = [opening for opening in openings if opening.covered and not _surplus(opening, us, score)]
    uncovered = [o for o in openings if not o.covered and o.owner not in (None, us.peer)]
    taken = _assigned_to(us, uncovered, kept, others)
    chosen: list[Place] = []
    disk_bytes = room.disk_bytes
    for group in (kept, taken):  # those that are here already first
        for opening in sorted(group, key=_need):
            if len(chosen) < room.max_stages and opening.disk_bytes <= disk_bytes:
                disk_bytes -= opening.disk_bytes
                chosen.append(opening.place)
    return tuple(chosen)


def is_short(standbys: int) -> bool:
    """Whether a stage with so many standbys needs another one."""
    return standbys < WANTED


def _surplus(opening: UncoveredStage, us: Candidate, score: float) -> bool:
    """Whether enough other standbys that are ready rank above us."""
    spare = SPARE if us.idle else 0
    if len(opening.standbys) + 1 <= WANTED + spare:
        return False
    own = (score, tie_break(us.peer, *opening.place))
    above = [s for s in opening.standbys if s.ready and (s.score, tie_break(s.peer, *opening.place)) > own]
    return len(above) >= WANTED


def _assigned_to(
    us: Candidate,
    openings: Sequence[UncoveredStage],
    kept: Sequence[UncoveredStage],
    others: Iterable[Candidate],
) -> list[UncoveredStage]:
    """Of `openings`, those assigned to us when all candidates share them: in each round, the stage with the fewest standbys
    goes to the candidate with the fewest stages to stand by for, an idle one if there is one."""
    candidates = {us.peer: us, **{other.peer: other for other in others if other.peer != us.peer}}
    load = Counter(standby.peer for opening in (*openings, *kept) for standby in opening.standbys)
    load[us.peer] += len(kept)
    of_job = {job: _candidates_of(candidates.values(), job) for job in {opening.job for opening in openings}}
    assigned: dict[Place, list[PeerId]] = {opening.place: [] for opening in openings}
    for number in range(WANTED):
        for opening in sorted((o for o in openings if len(o.standbys) <= number), key=_need):
            # So many were assigned before and did not stand by.
            late = int(opening.short_seconds / PATIENCE_SECONDS) if number == len(opening.standbys) else 0
            free = [c for c in of_job[opening.job] if c.peer not in assigned[opening.place]]
            order = [(_rank(c, opening, load[c.peer]), c.peer) for c in free if _may_take(c, opening, number)]
            takers = [peer for _, peer in heapq.nsmallest(1 + late, order)]
            assigned[opening.place] += takers
            load.update(takers)
    return [opening for opening in openings if us.peer in assigned[opening.place]]


def _candidates_of(candidates: Iterable[Candidate], job: JobId) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (not c.idle, tie_break(c.peer, job, 0)))[:CANDIDATES]


def _may_take(candidate: Candidate, opening: UncoveredStage, number: int) -> bool:
    """`number`: of standbys that the stage has or is assigned already."""
    holders = {opening.owner, *(standby.peer for standby in opening.standbys)}
    return (
        candidate.peer not in holders
        and candidate.free_memory_bytes >= opening.memory_bytes
        and candidate.opset >= opening.opset
        and (candidate.idle or number < BUSY_WANTED)
    )


def _rank(candidate: Candidate, opening: UncoveredStage, load: int) -> tuple[bool, bool, int, bytes]:
    holds_copy = not candidate.idle and candidate.peer == opening.next_owner
    return not candidate.idle, not holds_copy, load, tie_break(candidate.peer, *opening.place)


def _need(opening: UncoveredStage) -> tuple[int, bytes]:
    """Orders stages by how much they need a standby; equal ones in an order that differs from job to job."""
    return len(opening.standbys), tie_break(*opening.place)
