"""Checks that moves kept their promise. Pure. A stage moves to a peer whose announced figures promise a shorter step; if steps
are no shorter there, the peer is distrusted: no stage of the job moves to it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.runtime.training.lead.moves import Move

WITNESSES = 3  # observations in a row of steps that are no shorter
KEPT = 0.5  # of the promised saving, at least
SETTLING_SECONDS = 20.0  # after the cost of the move, before steps are compared
REQUESTED_SECONDS = 20.0  # from the request of a move until it has happened


@dataclass(frozen=True)
class Promises:
    """`pending`: the last move, at `made_at`, seen broken `seen` times in a row. `broken`: distrusted peers."""

    pending: Move | None = None
    made_at: float = 0.0
    seen: int = 0
    broken: frozenset[str] = frozenset()

    def made(self, move: Move, now: float) -> Promises:
        return replace(self, pending=move, made_at=now, seen=0)

    def observed(self, owners: Sequence[str], step_seconds: float, now: float) -> Promises:
        """The job has these owners, and its last step took `step_seconds`."""
        move = self.pending
        if move is None:
            return self
        if owners[move.stage] != move.peer:
            # The stage has not arrived there yet, or has moved on.
            return self if now - self.made_at < REQUESTED_SECONDS else replace(self, pending=None)
        if now - self.made_at < move.cost_seconds + SETTLING_SECONDS:
            return self
        if step_seconds <= move.before_seconds - KEPT * (move.before_seconds - move.after_seconds):
            return replace(self, pending=None)
        if self.seen + 1 < WITNESSES:
            return replace(self, seen=self.seen + 1)
        return replace(self, pending=None, broken=self.broken | {move.peer})
