"""A clock that a test advances."""

from __future__ import annotations


class ManualClock:
    """Seconds that pass only by `advance`."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
