"""Which stages a peer should claim now: a pure decision. `fusion.swarm.claims.election` decides when a stage is free to claim."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fusion.swarm.claims.election import HEAD_START_SECONDS, is_idle, successors, tie_break
from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import ClaimRecord, JobId, PeerRecord, Place
from fusion.swarm.transport import PeerId

# Idle peers may see a vacant stage a heartbeat later than we did, and claim it a heartbeat after their turn has begun.
IDLE_FIRST_SECONDS = HEAD_START_SECONDS + 2 * HEARTBEAT_SECONDS
NOTHING_RUNS: Mapping[PeerId, int] = {}


@dataclass(frozen=True, kw_only=True)
class VacantStage:
    """A stage that this peer may claim now."""

    job: JobId
    stage: int
    score: float  # 1.0 where the placement proposed this peer, else its own fitness below 1
    empty_seconds: float  # how long this peer has seen it without an owner
    memory_bytes: int
    account: PeerId = PeerId("")  # noqa: RUF009 - that its job is charged to
    early: bool = False  # before the head start, because the newest state of the stage is on this peer
    standby: bool = False  # this peer stands by for it
    idle_standby: bool = False  # another peer, which owns no stage, stands by for it


def stages_to_claim(
    vacancies: Sequence[VacantStage],
    free_memory_bytes: int,
    free_stages: int,
    running: Mapping[PeerId, int] = NOTHING_RUNS,
) -> tuple[VacantStage, ...]:
    """Those of `vacancies` to claim: at most `free_stages`, and together they fit the memory. Accounts take turns, those with the
    fewest stages here first (`running`: stages of each account), and get no more than `share_of_one`: a stranger's many
    manifests that propose us displace no other jobs. Of one account the best score first, then the longest vacant."""
    most = share_of_one(free_stages + sum(running.values()))
    turns = Counter(running)
    chosen: list[VacantStage] = []
    left = sorted(vacancies, key=lambda v: (-v.score, -v.empty_seconds, v.job, v.stage))
    while len(chosen) < free_stages:
        fitting = [v for v in left if v.memory_bytes <= free_memory_bytes and turns[v.account] < most]
        if not fitting:
            break
        vacancy = min(fitting, key=lambda v: turns[v.account])  # the first of those
        left = [v for v in fitting if v is not vacancy]
        turns[vacancy.account] += 1
        free_memory_bytes -= vacancy.memory_bytes
        chosen.append(vacancy)
    return tuple(chosen)


def share_of_one(stages: int) -> int:
    """Of so many stages, those that the jobs of one account may take: where there are four, one is for others."""
    return stages - stages // 4


def depends_on_idle_peers(vacancies: Sequence[VacantStage], *, busy: bool) -> bool:
    """Whether our choice depends on which other peers are idle: reading all peers is expensive. `busy`: stages run here."""
    return (busy or len(vacancies) > 1) and any(vacancy.score < 1.0 for vacancy in vacancies)


def our_share(
    vacancies: Sequence[VacantStage], us: PeerId, peers: Sequence[PeerRecord], *, busy: bool
) -> tuple[VacantStage, ...]:
    """Those of `vacancies` that we do not leave to other peers."""
    return (beside_the_idle if busy else one_each)(vacancies, us, peers)


def beside_the_idle(
    vacancies: Sequence[VacantStage], us: PeerId, peers: Sequence[PeerRecord]
) -> tuple[VacantStage, ...]:
    """Those of `vacancies` that a peer that runs stages claims now: one that an idle peer could take is left to it for
    IDLE_FIRST_SECONDS, so that work spreads."""
    idle = [peer for peer in peers if peer.peer != us and peer.role == "peer" and peer.idle]

    def has_taker(vacancy: VacantStage) -> bool:
        return any(peer.free_memory_bytes >= vacancy.memory_bytes for peer in idle)

    return tuple(
        vacancy
        for vacancy in vacancies
        if vacancy.score >= 1.0
        or (vacancy.standby and not vacancy.idle_standby)
        or vacancy.empty_seconds >= IDLE_FIRST_SECONDS
        or not (vacancy.idle_standby or has_taker(vacancy))
    )


def one_each(
    vacancies: Sequence[VacantStage], us: PeerId, peers: Sequence[PeerRecord]
) -> tuple[VacantStage, ...]:
    """Those of `vacancies` that an idle peer claims now: those that it was proposed for, else one, each peer another, and
    more where there are not enough idle peers for all. The stages of a job that one peer holds are lost together."""
    if any(vacancy.score >= 1.0 for vacancy in vacancies):
        return beside_the_idle(vacancies, us, peers)
    first = min(
        vacancies,
        key=lambda v: (not v.early, not v.standby, tie_break(us, v.job, v.stage)),
        default=None,
    )
    others = beside_the_idle([vacancy for vacancy in vacancies if vacancy is not first], us, peers)
    return others if first is None else (first, *others)


def one_to_hand_on(
    hosted: Mapping[Place, Sequence[ClaimRecord]], proposed: Collection[Place]
) -> tuple[JobId, int, tuple[PeerId, ...]] | None:
    """A stage to hand to an idle standby: of the stages `hosted` here, with their claims, one that is not the only one of its
    job here and not in `proposed`, the lead's last; and its idle standbys that are ready, best first."""
    jobs = Counter(job for job, _ in hosted)
    for job, stage in sorted(hosted, key=lambda place: (place[0], -place[1])):
        if jobs[job] < 2 or (job, stage) in proposed:
            continue
        idle = [
            standby.peer for standby in successors(hosted[job, stage]) if standby.ready and is_idle(standby)
        ]
        if idle:
            return job, stage, tuple(idle)
    return None


def one_early(vacancies: Sequence[VacantStage], us: PeerId) -> tuple[VacantStage, ...]:
    """`vacancies` with at most one that is `early`, and none beside one that we were proposed for. After a cold start each
    peer has the state of several stages, of some as a standby's or a neighbour's copy: the first peer that starts must not
    take them all."""
    early = [vacancy for vacancy in vacancies if vacancy.early]
    if any(vacancy.score >= 1.0 for vacancy in vacancies):
        early = []
    first = min(early, key=lambda v: tie_break(us, v.job, v.stage), default=None)
    return tuple(vacancy for vacancy in vacancies if not vacancy.early or vacancy is first)
