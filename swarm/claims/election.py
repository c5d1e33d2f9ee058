"""Who owns a stage: a pure rule over the live claims, the same for everyone who sees the same claims.

A DHT has no compare-and-swap, so two peers may for a moment both believe that they won. Safety never rests on this
rule but on terms: every frame carries its sender's term and receivers refuse a lower one (`StaleTerm`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fusion.swarm.directory.api import HEARTBEAT_SECONDS
from fusion.swarm.directory.records import ClaimRecord
from fusion.swarm.transport import PeerId

HEAD_START_SECONDS = 6.0  # a vacant stage waits this long for the peer that the placement proposed


def winner(claims: Iterable[ClaimRecord]) -> ClaimRecord | None:
    """The claim that owns the stage: of those with role "owner" the highest (term, score, hash(peer, stage)).
    `claims` are the live ones of one stage, in any order."""
    owners = [claim for claim in claims if claim.role == "owner"]
    return max(owners, key=rank, default=None)


def rank(claim: ClaimRecord) -> tuple[int, float, bytes]:
    """What elections compare. The hash spreads stages over peers of equal score and never ties."""
    return claim.term, claim.score, tie_break(claim.peer, claim.stage)


def latest(known: ClaimRecord | None, shown: ClaimRecord) -> ClaimRecord:
    """Which of two claims of one peer it made last: `known` from the directory, `shown` to us directly as the owner's.

    A peer's terms only rise, and at one term it first owns the stage, then releases it, then stands by.
    """
    return known if known is not None and known.term >= shown.term else shown


def successors(claims: Iterable[ClaimRecord]) -> tuple[ClaimRecord, ...]:
    """Who takes the stage over when its owner is gone, best first: the standbys that own no stage, so that work and the
    copies of it spread; then those that are ready, replicas before others, then by the step that they have, then by
    score."""
    standbys = [claim for claim in claims if stands_by(claim)]
    return tuple(sorted(standbys, key=_fitness, reverse=True))


def stands_by(claim: ClaimRecord) -> bool:
    """Whether the peer could take the stage over: a replica, which runs it beside its owner, is a standby too."""
    return claim.role in ("standby", "replica")


def should_claim(claims: Iterable[ClaimRecord], peer: PeerId, *, score: float, vacant_seconds: float) -> bool:
    """Whether `peer` should claim the stage now. `vacant_seconds`: how long it has been seen without an owner.

    A stage with an owner is left alone, whatever the scores: moving it would cost more than it gains. A vacant one is
    for the proposed peer (score 1.0) and the best standby at once, for each other standby a heartbeat later than for
    the one before it, for others after a head start.
    """
    claims = tuple(claims)
    if winner(claims) is not None:
        return False
    if score >= 1.0 or vacant_seconds >= HEAD_START_SECONDS:
        return True
    order = [claim.peer for claim in successors(claims)]
    return peer in order and vacant_seconds >= order.index(peer) * HEARTBEAT_SECONDS


def is_idle(standby: ClaimRecord) -> bool:
    """Whether the peer that stands by owns no stage. Only such peers are replicas, whose load is that of sessions."""
    return standby.role == "replica" or standby.load == 0


def _fitness(claim: ClaimRecord) -> tuple[bool, bool, bool, int, float, bytes]:
    replica = claim.role == "replica"
    return is_idle(claim), claim.ready, replica, claim.step, claim.score, tie_break(claim.peer, claim.stage)


def tie_break(*parts: str | int) -> bytes:
    """A pseudo-random order, the same for every reader and another for each stage, so that no peer is always first."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).digest()
