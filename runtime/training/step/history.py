"""Which state a stage has: how many steps were applied to the initial one, and which.

Two states of one step need not be the same: a job that was cut in two goes on in both halves, on other peers, with
other codecs. So every stage keeps a hash chain over what it applied,

    history(s + 1) = SHA-256(history(s), s, learning rate, clip factor, contents(s))

where the lead tells the contents of a step with its commit: a digest of the samples, of every stage's squared norm of
the gradients and of the loss, all bits of them. It is of what was computed, not of who committed it when: a step that
is run again to the same bits keeps its history, so nobody goes back for that, and two runs of one plan that end with
the same history have computed the same. What is not known (of a peer that does not say it) is taken for equal.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

INITIAL = "0" * 64  # of the initial weights
UNKNOWN = ""


@dataclass(frozen=True)
class Version:
    """A state of a job, or of a stage of it."""

    step: int  # committed steps; -1: no state at all
    history: str = UNKNOWN  # hex

    @staticmethod
    def agree(states: Iterable[Version]) -> bool:
        """Whether all are of one step, and none of another history than the others."""
        found = set(states)
        return len({state.step for state in found}) == 1 and len({s.history for s in found} - {UNKNOWN}) <= 1

    def matches(self, other: Version) -> bool:
        """Whether both are of one step, and of one history as far as that is known."""
        return Version.agree((self, other))


def contents(fed: str, squared_norms: Sequence[float], losses: Sequence[float]) -> str:
    """The digest of what a step was made of: of the samples `fed`, and what the stages report, in stage order."""
    digest = hashlib.sha256(fed.encode())
    for numbers in (squared_norms, losses):
        digest.update(struct.pack(f"<q{len(numbers)}d", len(numbers), *numbers))
    return digest.hexdigest()


def extend(history: str, step: int, learning_rate: float, clip_factor: float, made_of: str) -> str:
    """The history once `step`, of those contents, is applied as the commit says; unknown where either is."""
    if UNKNOWN in (history, made_of):
        return UNKNOWN
    link = struct.pack("<qdd", step, learning_rate, clip_factor)
    return hashlib.sha256(history.encode() + link + made_of.encode()).hexdigest()
