"""Which stages a peer stands by for: a pure decision, the same for everyone who sees the same claims and peers.

Standing by means to hold what a stage needs ahead of time, so that a peer that dies is replaced in seconds. Idle peers
go first. A peer covers as many stages as it has room for: it needs the memory of one of them, not of all, since it
takes over one at a time and leaves the others to the next standby.

Peers do not ask each other. Each plays through who of the candidates takes which hole, fewest standbys first, and
takes what falls to itself. Where views differ, too few come (the next candidates follow after `PATIENCE_SECONDS`) or
too many (the surplus leaves, but only above `SPARE`, so that nobody comes and goes in turns).
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
# Standbys a stage that peers with stages of their own make up for, where there are no idle ones.
BUSY_WANTED = 1
PATIENCE_SECONDS = 4 * HEARTBEAT_SECONDS  # for a candidate that was expected, before one more comes
CANDIDATES = 64  # that share the holes of one job: whoever is beyond need not play


@dataclass(frozen=True, kw_only=True)
class Standby:
    """Another peer that stands by for a stage, as its claim says it."""

    peer: PeerId
    score: float
    ready: bool


@dataclass(frozen=True, kw_only=True)
class UncoveredStage:
    """A stage with an owner, which standbys may cover."""

    job: JobId
    stage: int
    owner: PeerId | None  # None: nobody knows; those who stand by stay, nobody new comes
    memory_bytes: int
    disk_bytes: int
    opset: int = 1  # that whoever runs it has to know
    standbys: tuple[Standby, ...] = ()  # not counting ourselves
    ours: bool = False  # we stand by for it now
    short_seconds: float = 0.0  # for how long it has had fewer standbys than wanted
    next_owner: PeerId | None = None  # owns the next stage, and holds a copy of this one's snapshots anyway

    @property
    def place(self) -> Place:
        return self.job, self.stage


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A peer that could stand by, as its own record says it."""

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
    """The stages that `us` stands by for from now on, those that need it most first. `score` is that of our own
    standby claims, `others` everybody else who could stand by."""
    openings = [opening for opening in openings if opening.memory_bytes <= us.free_memory_bytes]
    kept = [opening for opening in openings if opening.ours and not _surplus(opening, us, score)]
    taken = _fallen_to(
        us, [o for o in openings if not o.ours and o.owner not in (None, us.peer)], kept, others
    )
    chosen: list[Place] = []
    disk_bytes = room.disk_bytes
    for group in (kept, taken):  # what is here already is worth more than what would have to come
        for opening in sorted(group, key=_need):
            if len(chosen) < room.max_stages and opening.disk_bytes <= disk_bytes:
                disk_bytes -= opening.disk_bytes
                chosen.append(opening.place)
    return tuple(chosen)


def is_short(standbys: int) -> bool:
    """Whether a stage with so many standbys needs another one."""
    return standbys < WANTED


def _surplus(opening: UncoveredStage, us: Candidate, score: float) -> bool:
    """Whether enough others that are ready go before us."""
    spare = SPARE if us.idle else 0
    if len(opening.standbys) + 1 <= WANTED + spare:
        return False
    ours = (score, tie_break(us.peer, *opening.place))
    before = [s for s in opening.standbys if s.ready and (s.score, tie_break(s.peer, *opening.place)) > ours]
    return len(before) >= WANTED


def _fallen_to(
    us: Candidate,
    openings: Sequence[UncoveredStage],
    kept: Sequence[UncoveredStage],
    others: Iterable[Candidate],
) -> list[UncoveredStage]:
    """Of `openings`, those that fall to us when all candidates share them: at each turn the stage with the fewest
    standbys goes to the candidate with the least to stand by for, an idle one if there is one."""
    candidates = {us.peer: us, **{other.peer: other for other in others if other.peer != us.peer}}
    load = Counter(standby.peer for opening in (*openings, *kept) for standby in opening.standbys)
    load[us.peer] += len(kept)
    players = {job: _players(candidates.values(), job) for job in {opening.job for opening in openings}}
    taken: dict[Place, list[PeerId]] = {opening.place: [] for opening in openings}
    for turn in range(WANTED):
        for opening in sorted((o for o in openings if len(o.standbys) <= turn), key=_need):
            # So many were expected before and did not come.
            late = int(opening.short_seconds / PATIENCE_SECONDS) if turn == len(opening.standbys) else 0
            free = [c for c in players[opening.job] if c.peer not in taken[opening.place]]
            order = [(_turn(c, opening, load[c.peer]), c.peer) for c in free if _may_take(c, opening, turn)]
            takers = [peer for _, peer in heapq.nsmallest(1 + late, order)]
            taken[opening.place] += takers
            load.update(takers)
    return [opening for opening in openings if us.peer in taken[opening.place]]


def _players(candidates: Iterable[Candidate], job: JobId) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (not c.idle, tie_break(c.peer, job, 0)))[:CANDIDATES]


def _may_take(candidate: Candidate, opening: UncoveredStage, turn: int) -> bool:
    there = {opening.owner, *(standby.peer for standby in opening.standbys)}
    return (
        candidate.peer not in there
        and candidate.free_memory_bytes >= opening.memory_bytes
        and candidate.opset >= opening.opset
        and (candidate.idle or turn < BUSY_WANTED)
    )


def _turn(candidate: Candidate, opening: UncoveredStage, load: int) -> tuple[bool, bool, int, bytes]:
    holds_copy = not candidate.idle and candidate.peer == opening.next_owner
    return not candidate.idle, not holds_copy, load, tie_break(candidate.peer, *opening.place)


def _need(opening: UncoveredStage) -> tuple[int, bytes]:
    """Orders stages by how much they need a standby; equal ones in an order that differs from job to job."""
    return len(opening.standbys), tie_break(*opening.place)
