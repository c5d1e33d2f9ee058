"""Whether a process's resources still rise: a line through their samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence

FLAT = 0.05  # of the mean, that a second half may rise


def rise(samples: Sequence[tuple[float, float]]) -> float:
    """The rise of a value over the second half of its samples (time, value), by least squares, as a share of its mean. Negative
    if it falls, 0 for fewer than four samples."""
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
