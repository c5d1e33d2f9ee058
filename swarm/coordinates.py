"""Network coordinates: the round trip between two peers that never measured each other, from their round trips to others. Pure.

Vivaldi with height vectors (Dabek, Cox, Kaashoek and Morris, "Vivaldi: A Decentralized Network Coordinate System",
SIGCOMM 2004): the plane models the core of the network, the height a peer's access link. All in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DIMENSIONS = 2
LARGEST_MS = 10_000.0  # of any part: a peer may publish anything
LEAST_HEIGHT_MS = 0.1
LEAST_ERROR = 0.02  # a smaller error would keep others from moving a peer
LARGEST_ERROR = 1.5
NEAR_MS = 20.0  # the least denominator of an error: of shorter round trips all predictions would be far off
MOST_PUSH_MS = 25.0  # that one round trip moves us
_MOVE, _TRUST = 0.25, 0.25  # the paper's c_c and c_e


@dataclass(frozen=True)
class Coordinate:
    """`vector` of DIMENSIONS and `height` in ms; `error`: the relative error of distances from here."""

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
        """From the `parts` and error in records and probes. Raises ValueError for anything else."""
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


def moved(own: Coordinate, other: Coordinate, rtt_ms: float, tie_break: float) -> Coordinate:
    """Our coordinate after a round trip of `rtt_ms` to a peer at `other`. `tie_break` in [0, 1): the direction in which two at the same
    place move apart. Raises ValueError unless `rtt_ms` is positive and finite.

    The other's error counts as at least what this round trip shows, and no round trip moves us by more than MOST_PUSH_MS: neighbours
    may publish anything, and answer as late as they like."""
    if not 0 < rtt_ms < math.inf:
        raise ValueError(f"rtt_ms must be positive, not {rtt_ms}")
    rtt_ms = min(rtt_ms, LARGEST_MS)
    apart = distance_ms(own, other)
    seen_error = abs(apart - rtt_ms) / max(rtt_ms, NEAR_MS)
    own_error, other_error = max(own.error, LEAST_ERROR), max(other.error, LEAST_ERROR, seen_error)
    weight = own_error / (own_error + other_error)
    wrong = min(abs(apart - rtt_ms) / rtt_ms, LARGEST_ERROR)
    error = wrong * _TRUST * weight + own_error * (1.0 - _TRUST * weight)
    push = min(max(_MOVE * weight * (rtt_ms - apart), -MOST_PUSH_MS), MOST_PUSH_MS)
    if math.dist(own.vector, other.vector) > 1e-6:
        away = [(a - b) / apart for a, b in zip(own.vector, other.vector, strict=True)]
    else:
        turn = 2.0 * math.pi * tie_break
        away = [0.5 * math.cos(turn), 0.5 * math.sin(turn)]
    rise = (own.height + other.height) / apart if apart > 0 else 0.0
    vector = tuple(_clamped(a + push * b) for a, b in zip(own.vector, away, strict=True))
    height = min(max(own.height + push * rise, LEAST_HEIGHT_MS), LARGEST_MS)
    return Coordinate(vector, height, min(max(error, LEAST_ERROR), LARGEST_ERROR))


def _clamped(part: float) -> float:
    return min(max(part, -LARGEST_MS), LARGEST_MS)
