"""Where to cut for devices in a given order: min-max dynamic programming over the pace of stages and links, then, for
some tolerances, the cuts that keep that pace and fill the pipeline soonest.

Values that skip stages are counted as if every stage between passed them on: the model decides in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion.dag.placement.search_space import Choice, Space

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# Times the shortest period there can be: how uneven stages may get to fill the pipeline sooner.
SLACK = (1.0, 1.01, 1.05, 1.2, 1.5, 2.0, np.inf)
FEW_SLACK = (1.0, 1.1, np.inf)
_FOREVER = 1e18  # seconds: a segment that does not fit takes longer
_WHOLE = 100_000  # entries of a table that is searched whole; a larger one, in a band around a first guess
_NEAR = 20_000  # the same where a guess is at hand
_BAND = 12  # bounds to either side of the guess


@dataclass(frozen=True, eq=False)
class Tables:
    """By stage, and by the first and last bound of its segment, each out of a window of its own."""

    bounds: Indices  # (stages + 1, window)
    # (stages, window, window): what the busiest part of stage and links takes; inf: does not fit
    pace: Floats
    once: Floats  # how much the stage and the link after it add to the fill


def recut(
    space: Space, order: tuple[int, ...], slacks: Sequence[float] = SLACK, near: Sequence[int] | None = None
) -> Iterator[Choice]:
    """Cuts worth asking the model about, the most even first; none if the model does not fit the devices so. `near`:
    bounds to search around where searching everywhere would take long."""
    size, count = len(space.segments.bounds), len(order)
    if count >= size:
        return
    whole = count * size * size <= (_WHOLE if near is None else _NEAR)
    centre = None if whole else (near if near is not None else even(space, order))
    band = _BAND
    while True:
        tables = _tables(space, order, _windows(count, size, centre, band))
        slowest, _ = _search(tables, tables.pace, np.maximum)
        if np.isfinite(slowest) or centre is None or band > 8 * _BAND:
            break
        band *= 4
    if not np.isfinite(slowest):
        return
    seen = set()
    for slack in slacks:
        allowed = np.where(tables.pace <= min(slowest * slack * (1 + 1e-12), _FOREVER), tables.once, np.inf)
        _, bounds = _search(tables, allowed, np.add)
        if bounds not in seen:
            seen.add(bounds)
            yield Choice(order, bounds)


def even(space: Space, order: Sequence[int]) -> tuple[int, ...]:
    """Segments in proportion to speed, less where memory binds: each device takes what it can do in a time, the
    shortest in which all is done. Links are not looked at."""
    segments, size, count = space.segments, len(space.segments.bounds), len(order)
    held = space.least_held(count)
    forward, backward = segments.passes(0, np.arange(size)[None, :], space.seconds[:, list(order), None])
    seconds = forward + backward

    def filled(limit: float) -> list[int]:
        bounds = [0]
        for s, device in enumerate(order):
            at = bounds[-1]
            by_time = int(np.searchsorted(seconds[s], seconds[s, at] + limit, side="right")) - 1
            memory = segments.memory(at, slice(at, None), held[s])
            # What is tied to a variable outside goes away with the last of its readers: it need not rise.
            by_memory = at + int(np.flatnonzero(memory <= space.memory[device]).max(initial=0))
            bounds.append(max(at + 1, min(by_time, by_memory, size - count + s)))
        return bounds

    low, high = 0.0, float(seconds[:, -1].max())
    for _ in range(16):
        middle = (low + high) / 2
        if filled(middle)[-1] >= size - 1:
            high = middle
        else:
            low = middle
    return (*filled(high)[:-1], size - 1)


def _windows(count: int, size: int, centre: Sequence[int] | None, band: int) -> Indices:
    """(stages + 1, window) bounds that each stage may begin at, -1 where there is none."""
    if centre is None:
        found = np.tile(np.arange(size), (count + 1, 1))
    else:
        found = np.array(centre)[:, None] + np.arange(-band, band + 1)[None, :]
    at = np.arange(count + 1)[:, None]
    outside = (found < at) | (found > size - 1 - (count - at))
    outside[0] = found[0] != 0
    outside[-1] = found[-1] != size - 1
    return np.where(outside, -1, found)


def alone(
    space: Space, devices: Indices, first: Indices, last: Indices, held: Indices | int
) -> tuple[Floats, Floats]:
    """(pace, once) of segments on devices without the links between them; inf where one does not fit. All broadcast."""
    crossed = space.crossed
    forward, backward = space.segments.passes(first, last, space.seconds[:, devices])
    # A peer computes, sends, receives and encodes at the same time; its lines carry both passes.
    pace = np.maximum(forward + backward, (crossed[0, last] + crossed[3, first]) / space.up[devices])
    pace = np.maximum(pace, (crossed[0, first] + crossed[3, last]) / space.down[devices])
    codec = crossed[1, last] + crossed[2, first] + crossed[4, first] + crossed[5, last]
    legal = (first >= 0) & (last > first)
    legal = legal & (space.segments.memory(first, last, held) <= space.memory[devices])
    return np.where(legal, np.maximum(pace, codec), np.inf), np.where(legal, forward + backward, np.inf)


def between(space: Space, one: Indices, two: Indices, at: Indices) -> tuple[Floats, Floats]:
    """(pace, once) of the link that a bound lies on, there and back. All broadcast."""
    network, pace, once = space.network, np.zeros(1), np.zeros(1)
    for way, (sender, receiver) in enumerate(((one, two), (two, one))):
        bytes_, encode, decode = space.crossed[3 * way : 3 * way + 3, at]
        pace = np.maximum(pace, bytes_ / network.pair_rates[sender, receiver])
        once = once + bytes_ / network.rates[sender, receiver] + encode + decode
        if way == 0 or space.training:
            once = once + network.alphas[sender, receiver]
    return pace, once


def _tables(space: Space, order: Sequence[int], bounds: Indices) -> Tables:
    at, count = np.array(order), len(order)
    held = space.least_held(count)
    pace, once = alone(
        space, at[:, None, None], bounds[:-1, :, None], bounds[1:, None, :], held[:, None, None]
    )
    if count > 1:
        link, hop = between(space, at[:-1, None], at[1:, None], bounds[1:-1])
        np.maximum(pace[:-1], link[:, None, :], out=pace[:-1])
        once[:-1] += hop[:, None, :]
    return Tables(bounds, pace, once)


def _search(tables: Tables, costs: Floats, combine: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The bounds that minimise the costs of all stages combined."""
    so_far = np.where(tables.bounds[0] == 0, 0.0, np.inf)
    choices = []
    for cost in costs:
        whole = combine(so_far[:, None], cost)
        chosen = whole.argmin(axis=0)
        choices.append(chosen)
        so_far = whole[chosen, np.arange(len(chosen))]
    at = int(so_far.argmin())
    best, picked = float(so_far[at]), [at]
    for chosen in reversed(choices):
        picked.append(int(chosen[picked[-1]]))
    return best, tuple(int(tables.bounds[s, w]) for s, w in enumerate(reversed(picked)))
