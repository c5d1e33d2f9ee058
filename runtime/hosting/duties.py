"""Which stages a peer should claim now: a pure decision. When a stage is free to claim is `fusion.swarm.election`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion.swarm.directory import HEARTBEAT_SECONDS
from fusion.swarm.election import HEAD_START_SECONDS
from fusion.swarm.records import JobId, PeerRecord
from fusion.swarm.transport import PeerId

# Idle peers may see a hole a heartbeat later than we did, and look at it again a heartbeat after it is theirs.
IDLE_FIRST_SECONDS = HEAD_START_SECONDS + 2 * HEARTBEAT_SECONDS


@dataclass(frozen=True, kw_only=True)
class Vacancy:
    """A stage that this peer may claim now."""

    job: JobId
    stage: int
    score: float  # 1.0 where the placement proposed this peer, else its own fitness below 1
    empty_seconds: float  # how long this peer has seen it without an owner
    memory_bytes: int


def stages_to_claim(
    vacancies: Sequence[Vacancy], free_memory_bytes: int, free_seats: int
) -> tuple[Vacancy, ...]:
    """Those of `vacancies` to claim, the best score first, then the longest empty: at most `free_seats`, and together
    they fit the memory."""
    chosen: list[Vacancy] = []
    for vacancy in sorted(vacancies, key=lambda v: (-v.score, -v.empty_seconds, v.job, v.stage)):
        if len(chosen) < free_seats and vacancy.memory_bytes <= free_memory_bytes:
            free_memory_bytes -= vacancy.memory_bytes
            chosen.append(vacancy)
    return tuple(chosen)


def beside_the_idle(
    vacancies: Sequence[Vacancy], us: PeerId, peers: Sequence[PeerRecord]
) -> tuple[Vacancy, ...]:
    """Those of `vacancies` that a peer with work of its own claims now: a hole that a peer without any could fill is
    left to it for a while, so that work spreads."""
    idle = [peer for peer in peers if peer.peer != us and peer.role == "peer" and _is_idle(peer)]

    def has_taker(vacancy: Vacancy) -> bool:
        return any(peer.free_memory_bytes >= vacancy.memory_bytes for peer in idle)

    return tuple(
        vacancy
        for vacancy in vacancies
        if vacancy.score >= 1.0 or vacancy.empty_seconds >= IDLE_FIRST_SECONDS or not has_taker(vacancy)
    )


def _is_idle(peer: PeerRecord) -> bool:
    return peer.free_memory_bytes == peer.memory_bytes
