"""The ledger of a job: which samples its committed steps used, none skipped and none twice.

Every stage that reads data reports a digest of the sample indices that it used; the lead commits a step only
if they agree with each other and with the plan, and chains them:

    head(s + 1) = SHA-256(head(s), s, fed(s))

Two runs of one plan that end with the same head were trained on the same samples in the same order, whatever was
killed in between. The ledger of a step is stored in the snapshot of that step, so a restore restores it too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GENESIS = "0" * 64


@dataclass(frozen=True, kw_only=True)
class Ledger:
    steps: int = 0  # committed: the state that this belongs to is that of step `steps`
    samples: int = 0  # used by them, repeats in later epochs counted
    head: str = GENESIS  # of the chain, hex

    def commit(self, step: int, fed: str, samples: int) -> Ledger:
        """The ledger after `step`, which used `samples` samples with the digest `fed`. Raises ValueError unless it is the next step."""
        if step != self.steps:
            raise ValueError(f"step {step} cannot be committed after {self.steps} steps")
        link = hashlib.sha256(bytes.fromhex(self.head) + struct.pack("<q", step) + fed.encode())
        return Ledger(steps=step + 1, samples=self.samples + samples, head=link.hexdigest())


UNTRAINED = Ledger()  # before the first step


def fed_digest(microbatches: Iterable[Sequence[int]]) -> str:
    """The digest of the sample indices of one step, in hex, microbatch by microbatch."""
    digest = hashlib.sha256()
    for indices in microbatches:
        digest.update(struct.pack(f"<q{len(indices)}q", len(indices), *indices))
    return digest.hexdigest()
