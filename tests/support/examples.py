"""The number of Hypothesis examples: all in `make test-all`, a third in the tiers before it."""

from __future__ import annotations

import os

FEWER = "FUSION_PEER_TEST_FEWER"  # in the environment of a run that leaves out what is slow
LEAST = 20


def examples(number: int) -> int:
    return max(min(number, LEAST), number // 3) if FEWER in os.environ else number
