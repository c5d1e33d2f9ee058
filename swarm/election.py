"""Who owns a stage: a pure rule over the live claims, the same for everyone who sees the same claims.

A DHT has no compare-and-swap, so two peers may for a moment both believe that they won. Safety never rests on this
rule but on terms: every frame carries its sender's term and receivers refuse a lower one (`StaleTerm`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fusion.swarm.records import ClaimRecord
from fusion.swarm.transport import PeerId

HEAD_START_SECONDS = 6.0  # a vacant stage waits this long for the peer that the placement proposed


def winner(claims: Iterable[ClaimRecord]) -> ClaimRecord | None:
    """The claim that owns the stage: of those with role "owner" the highest (term, score, hash(peer, stage)).
    `claims` are the live ones of one stage, in any order."""
    owners = [claim for claim in claims if claim.role == "owner"]
    return max(owners, key=rank, default=None)


def rank(claim: ClaimRecord) -> tuple[int, float, bytes]:
    """What elections compare. The hash spreads stages over peers of equal score and never ties between peers."""
    return claim.term, claim.score, _lot(claim.peer, claim.stage)


def next_term(claims: Iterable[ClaimRecord], floor: int = 0) -> int:
    """The term of a new claim: above every term seen, released and standby claims and `floor` included; at least 1."""
    return 1 + max([floor, *(claim.term for claim in claims)])


def should_claim(claims: Iterable[ClaimRecord], peer: PeerId, *, score: float, vacant_seconds: float) -> bool:
    """Whether `peer` should claim the stage now. `vacant_seconds`: how long it has been seen without an owner.

    A stage with an owner is left alone, whatever the scores: moving it would cost more than it gains. A vacant one is
    for the proposed peer (score 1.0) at once, for others after a head start; the best standby goes before the rest.
    """
    claims = tuple(claims)
    if winner(claims) is not None:
        return False
    standbys = [claim for claim in claims if claim.role == "standby"]
    best = max(
        standbys, key=lambda claim: (claim.step, claim.score, _lot(claim.peer, claim.stage)), default=None
    )
    if score >= 1.0 or (best is not None and best.peer == peer):
        return True
    return vacant_seconds >= HEAD_START_SECONDS


def _lot(peer: str, stage: int) -> bytes:
    return hashlib.sha256(f"{peer}/{stage}".encode()).digest()
