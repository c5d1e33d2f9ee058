"""What time it is for the swarm: records last seconds, and clocks err by more. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS

_NOISE_SECONDS = 1.0


def middle(offsets: Iterable[float]) -> float:
    """Of others' clocks less ours, the one in the middle; of two the one nearer to ours. 0 where there is none."""
    ordered = sorted(offsets)
    if not ordered:
        return 0.0
    return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)


def correction(offsets: Iterable[float]) -> float:
    """Seconds to add to our clock. `offsets`: others' clocks less ours.

    Ours counts as one more, so that one other alone moves nothing, and a majority moves it by no more than honest clocks
    may be apart. Only if there are several, most of them agree and none agrees with ours is ours taken to be wrong: one honest
    neighbour is enough to keep a right clock right, and one liar is not to keep a wrong one wrong.
    """
    others = list(offsets)
    found = middle([0.0, *others])
    if abs(found) <= _NOISE_SECONDS:
        return 0.0
    agreeing = [other for other in others if abs(other - found) <= CLOCK_TOLERANCE_SECONDS]
    alone = all(abs(other) > 2 * CLOCK_TOLERANCE_SECONDS for other in others)
    if max(others) - min(others) <= CLOCK_TOLERANCE_SECONDS or (
        alone and 3 * len(agreeing) > 2 * len(others)
    ):
        return found
    return max(-CLOCK_TOLERANCE_SECONDS, min(found, CLOCK_TOLERANCE_SECONDS))
