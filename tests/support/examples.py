"""On how many examples a property is tried: `make test-all` tries all of them, the tiers before it a third."""

from __future__ import annotations

import os

FEWER = "FUSION_PEER_TEST_FEWER"  # in the environment of a run that leaves out what is slow
LEAST = 20


def examples(number: int) -> int:
    return max(min(number, LEAST), number // 3) if FEWER in os.environ else number
