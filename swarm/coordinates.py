"""Network coordinates: the round trip between two peers who never met, from where each stands to others. Pure.

Vivaldi with height vectors (Dabek, Cox, Kaashoek and Morris, "Vivaldi: A Decentralized Network Coordinate System",
SIGCOMM 2004): the plane stands for the core of the network, the height for a peer's own way to it. All in
milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DIMENSIONS = 2
LARGEST_MS = 10_000.0  # of any part: what a peer says of itself may be anything
LEAST_HEIGHT_MS = 0.1
LEAST_ERROR = 0.02  # nobody is so sure of himself that others stop moving him
LARGEST_ERROR = 1.5
NEAR_MS = 20.0  # no shorter round trip says how wrong a prediction is: within one room all would be far off
MOST_PUSH_MS = 25.0  # that one round trip moves us
_MOVE, _TRUST = 0.25, 0.25  # the paper's c_c and c_e


@dataclass(frozen=True)
class Coordinate:
    """`vector` of DIMENSIONS and `height` in ms; `error`: how wrong distances from here are, as a share of them."""

    vector: tuple[float, ...] = (0.0,) * DIMENSIONS
    height: float = LEAST_HEIGHT_MS
    error: float = 1.0

    def __post_init__(self) -> None:
        parts = (*self.vector, self.height)
        if len(self.vector) != DIMENSIONS or not all(abs(part) <= LARGEST_MS for part in parts):
            raise ValueError(f"a coordinate has {DIMENSIONS} numbers and a height within {LARGEST_MS:g} ms")
        if not (self.height >= 0 and 0 <= self.error <= LARGEST_ERROR):
            raise ValueError(f"a coordinate's height is not below 0, its error 0 to {LARGEST_ERROR}")

    @classmethod
    def from_parts(cls, parts: Sequence[float], error: float) -> Coordinate:
        """From `parts` and an error as records and probes carry them. ValueError for anything else."""
        numbers = [float(part) for part in parts if isinstance(part, (int, float))]
        if len(numbers) != len(parts) or len(parts) != DIMENSIONS + 1:
            raise ValueError(f"a coordinate is {DIMENSIONS + 1} numbers")
        return cls(tuple(numbers[:-1]), numbers[-1], float(error))

    @property
    def parts(self) -> tuple[float, ...]:
        return (*self.vector, self.height)


def distance_ms(one: Coordinate, two: Coordinate) -> float:
    """The round trip that the coordinates predict."""
    return math.dist(one.vector, two.vector) + one.height + two.height


def moved(ours: Coordinate, theirs: Coordinate, rtt_ms: float, tie_break: float) -> Coordinate:
    """Where we stand after a round trip of `rtt_ms` to somebody who stands at `theirs`. `tie_break` in [0, 1): the direction
    in which two at the same place part. ValueError unless `rtt_ms` is positive and finite.

    Of an error that is told to be small no more is believed than this round trip bears out, and none moves us by more than
    MOST_PUSH_MS: neighbours may say anything, and answer as late as they like."""
    if not 0 < rtt_ms < math.inf:
        raise ValueError(f"rtt_ms must be positive, not {rtt_ms}")
    rtt_ms = min(rtt_ms, LARGEST_MS)
    apart = distance_ms(ours, theirs)
    seen_error = abs(apart - rtt_ms) / max(rtt_ms, NEAR_MS)
    ours_error, theirs_error = max(ours.error, LEAST_ERROR), max(theirs.error, LEAST_ERROR, seen_error)
    weight = ours_error / (ours_error + theirs_error)
    wrong = min(abs(apart - rtt_ms) / rtt_ms, LARGEST_ERROR)
    error = wrong * _TRUST * weight + ours_error * (1.0 - _TRUST * weight)
    push = min(max(_MOVE * weight * (rtt_ms - apart), -MOST_PUSH_MS), MOST_PUSH_MS)
    if math.dist(ours.vector, theirs.vector) > 1e-6:
        away = [(a - b) / apart for a, b in zip(ours.vector, theirs.vector, strict=True)]
    else:
        turn = 2.0 * math.pi * tie_break
        away = [0.5 * math.cos(turn), 0.5 * math.sin(turn)]
    rise = (ours.height + theirs.height) / apart if apart > 0 else 0.0
    vector = tuple(_held(a + push * b) for a, b in zip(ours.vector, away, strict=True))
    height = min(max(ours.height + push * rise, LEAST_HEIGHT_MS), LARGEST_MS)
    return Coordinate(vector, height, min(max(error, LEAST_ERROR), LARGEST_ERROR))


def _held(part: float) -> float:
    return min(max(part, -LARGEST_MS), LARGEST_MS)
