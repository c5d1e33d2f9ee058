"""What became of the moves that were made for what a peer says of itself: pure. A peer to which a stage went because its
figures promised a shorter step, and with which the steps are no shorter, is believed no more: no stage of the job goes
to it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.runtime.training.lead.moves import Move

WITNESSES = 3  # looks in a row at steps that are no shorter
KEPT = 0.5  # of what was promised to be saved, at least
SETTLING_SECONDS = 20.0  # after what the move costs: the steps that it held up tell nothing
ASKED_SECONDS = 20.0  # a move that was asked for may take so long to be seen


@dataclass(frozen=True)
class Promises:
    """`pending`: the last move, since when, and how many looks have seen it broken. `broken`: who is believed no more."""

    pending: Move | None = None
    made_at: float = 0.0
    seen: int = 0
    broken: frozenset[str] = frozenset()

    def made(self, move: Move, now: float) -> Promises:
        return replace(self, pending=move, made_at=now, seen=0)

    def looked(self, owners: Sequence[str], step_seconds: float, now: float) -> Promises:
        """After a look at the job, whose last step took so long."""
        move = self.pending
        if move is None:
            return self
        if owners[move.stage] != move.peer:
            # It has not begun there yet, or is elsewhere again.
            return self if now - self.made_at < ASKED_SECONDS else replace(self, pending=None)
        if now - self.made_at < move.cost_seconds + SETTLING_SECONDS:
            return self
        if step_seconds <= move.before_seconds - KEPT * (move.before_seconds - move.after_seconds):
            return replace(self, pending=None)
        if self.seen + 1 < WITNESSES:
            return replace(self, seen=self.seen + 1)
        return replace(self, pending=None, broken=self.broken | {move.peer})
