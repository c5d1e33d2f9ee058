"""The swarm's time: records last seconds, and machines' clocks err by more. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS

_NOISE_SECONDS = 1.0


def median(offsets: Iterable[float]) -> float:
    """The median of others' clocks minus ours; of two in the middle the one nearer to ours. 0 where there is none."""
    ordered = sorted(offsets)
    if not ordered:
        return 0.0
    return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)


def correction(offsets: Iterable[float]) -> float:
    """Seconds to add to our clock. `offsets`: others' clocks minus ours.

    Ours counts as one more clock, so one other alone changes nothing. A majority changes it by at most CLOCK_TOLERANCE_SECONDS. Only
    if there are several, most of them agree and none agrees with ours is ours taken to be wrong: one honest neighbour suffices to
    keep a right clock right, and one liar does not suffice to keep a wrong one wrong.
    """
    others = list(offsets)
    found = median([0.0, *others])
    if abs(found) <= _NOISE_SECONDS:
        return 0.0
    agreeing = [other for other in others if abs(other - found) <= CLOCK_TOLERANCE_SECONDS]
    alone = all(abs(other) > 2 * CLOCK_TOLERANCE_SECONDS for other in others)
    if max(others) - min(others) <= CLOCK_TOLERANCE_SECONDS or (
        alone and 3 * len(agreeing) > 2 * len(others)
    ):
        return found
    return max(-CLOCK_TOLERANCE_SECONDS, min(found, CLOCK_TOLERANCE_SECONDS))
