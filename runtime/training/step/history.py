"""The version of a stage's state: how many steps were applied to the initial one, and a hash chain over them.

Two states of one step may differ: after a partition a job goes on in both parts, on other peers, with other codecs. So
every stage keeps a hash chain over what it applied,

    history(s + 1) = SHA-256(history(s), s, learning rate, clip factor, contents(s))

where the lead sends contents(s) with its commit: a digest over the samples, every stage's squared norm of the gradients
and the loss, bit for bit. It covers what was computed, not who committed it when: a step that is run again to the same bits
keeps its history, so no stage has to restore, and two runs of one plan that end with the same history have computed the
same. An unknown history (of a peer that sends none) counts as equal.
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
    """The version of the state of a job or a stage."""

    step: int  # committed steps; -1: no state
    history: str = UNKNOWN  # hex

    @staticmethod
    def agree(states: Iterable[Version]) -> bool:
        """Whether all are of one step and of one history, as far as histories are known."""
        unlike = set(states)
        return (
            len({state.step for state in unlike}) == 1 and len({s.history for s in unlike} - {UNKNOWN}) <= 1
        )

    def matches(self, other: Version) -> bool:
        """`agree`, of two."""
        return Version.agree((self, other))


def contents(fed: str, squared_norms: Sequence[float], losses: Sequence[float]) -> str:
    """The digest, in hex, of a step's contents: the samples' digest `fed`, and the norms and losses in stage order."""
    digest = hashlib.sha256(fed.encode())
    for numbers in (squared_norms, losses):
        digest.update(struct.pack(f"<q{len(numbers)}d", len(numbers), *numbers))
    return digest.hexdigest()


def extend(history: str, step: int, learning_rate: float, clip_factor: float, made_of: str) -> str:
    """The history after `step` with the contents `made_of`; unknown where either is."""
    if UNKNOWN in (history, made_of):
        return UNKNOWN
    link = struct.pack("<qdd", step, learning_rate, clip_factor)
    return hashlib.sha256(history.encode() + link + made_of.encode()).hexdigest()
