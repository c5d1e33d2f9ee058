"""Whether what a process holds has come to rest: a line through its samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FLAT = 0.05  # of the mean, that a second half may rise


def rise(samples: Sequence[tuple[float, float]]) -> float:
    """By how much of its mean a value (time, value) rises over the second half of its samples, by least squares; negative
    where it falls, 0 for fewer than four."""
    half = [*samples[len(samples) // 2 :]]
    if len(half) < 2:
        return 0.0
    mean_at = sum(at for at, _ in half) / len(half)
    mean = sum(value for _, value in half) / len(half)
    spread = sum((at - mean_at) ** 2 for at, _ in half)
    if not spread or not mean:
        return 0.0
    slope = sum((at - mean_at) * (value - mean) for at, value in half) / spread
    return slope * (half[-1][0] - half[0][0]) / mean
