"""A state of the whole job that all stages can restore, also after the loss of any one peer."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.runtime.training.data.ledger import UNTRAINED, Ledger
from fusion.runtime.training.step.history import INITIAL, UNKNOWN, Version
from fusion.swarm.directory.records import MAX_STEP, Digest, is_digest


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A snapshot that all stages hold, by the digest of its index; step 0 without one: the initial weights."""

    step: int = 0
    digest: Digest | None = None
    ledger: Ledger = UNTRAINED  # of that step, where it is known: a job record has no room for it
    history: str = UNKNOWN  # of the state, where it is known

    def __post_init__(self) -> None:
        # A partner may send any, and one that does not fit into a job record would keep us from publishing ours.
        if not 0 <= self.step <= MAX_STEP or not (self.digest is None or is_digest(self.digest)):
            raise ValueError("a step of at least 0, and the digest of a blob")

    @property
    def sound(self) -> bool:
        """Whether the ledger is that of the step."""
        return self.ledger.steps == self.step

    @property
    def version(self) -> Version:
        """The version of the state."""
        return Version(self.step, INITIAL if self.digest is None else self.history)

    @property
    def rank(self) -> tuple[int, str]:
        """Orders checkpoints from old to new."""
        return (self.step, self.digest or "")


START = Checkpoint()  # the initial weights
