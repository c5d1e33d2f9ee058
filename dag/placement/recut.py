"""Where to cut for devices in a given order: min-max dynamic programming over the period of stages and links, then, for
some tolerances, the cuts with the shortest fill within that period.

Values that skip stages are counted as if every stage between forwarded them; the step model decides between the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion.dag.placement.search_space import Choice, Space

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# Factors of the shortest period: how far the period may grow for a shorter fill.
SLACK = (1.0, 1.01, 1.05, 1.2, 1.5, 2.0, np.inf)
FEW_SLACK = (1.0, 1.1, np.inf)
_MAX_SECONDS = 1e18  # a segment that does not fit takes inf
_FULL_SEARCH = 100_000  # entries of a table that is searched in full; a larger one is searched in a band around a first guess
_FULL_SEARCH_AROUND = 20_000  # the same where the caller gives the guess
_BAND = 12  # bounds to either side of the guess


@dataclass(frozen=True, eq=False)
class Tables:
    """Costs by stage and by the first and last bound of its segment, each as an index into the stage's window of bounds."""

    bounds: Indices  # (stages + 1, window)
    # (stages, window, window): the period of the stage and of the link after it; inf: does not fit
    period: Floats
    fill: Floats  # what both add to the fill


def recut(
    space: Space, order: tuple[int, ...], slacks: Sequence[float] = SLACK, around: Sequence[int] | None = None
) -> Iterator[Choice]:
    """Cuts for the step model to compare, the shortest period first; none if the model does not fit these devices. `around`:
    bounds to search around where a full search would take long."""
    size, count = len(space.segments.bounds), len(order)
    if count >= size:
        return
    in_full = count * size * size <= (_FULL_SEARCH if around is None else _FULL_SEARCH_AROUND)
    centre = None if in_full else (around if around is not None else proportional_bounds(space, order))
    band = _BAND
    while True:
        tables = _tables(space, order, _windows(count, size, centre, band))
        best_period, _ = _search(tables, tables.period, np.maximum)
        if np.isfinite(best_period) or centre is None or band > 8 * _BAND:
            break
        band *= 4
    if not np.isfinite(best_period):
        return
    seen = set()
    for slack in slacks:
        allowed = np.where(
            tables.period <= min(best_period * slack * (1 + 1e-12), _MAX_SECONDS), tables.fill, np.inf
        )
        _, bounds = _search(tables, allowed, np.add)
        if bounds not in seen:
            seen.add(bounds)
            yield Choice(order, bounds)


def proportional_bounds(space: Space, order: Sequence[int]) -> tuple[int, ...]:
    """Segments in proportion to speed, less where memory binds: each device takes what it computes within a limit, the
    shortest one that suffices for the whole graph. Links are ignored."""
    segments, size, count = space.segments, len(space.segments.bounds), len(order)
    held = space.min_in_flight(count)
    forward, backward = segments.passes(0, np.arange(size)[None, :], space.seconds[:, list(order), None])
    seconds = forward + backward

    def bounds_within(limit: float) -> list[int]:
        bounds = [0]
        for s, device in enumerate(order):
            at = bounds[-1]
            by_time = int(np.searchsorted(seconds[s], seconds[s, at] + limit, side="right")) - 1
            memory = segments.memory(at, slice(at, None), held[s])
            # What is tied to a variable outside goes away with the last of its readers: memory need not rise.
            by_memory = at + int(np.flatnonzero(memory <= space.memory[device]).max(initial=0))
            bounds.append(max(at + 1, min(by_time, by_memory, size - count + s)))
        return bounds

    low, high = 0.0, float(seconds[:, -1].max())
    for _ in range(16):
        middle = (low + high) / 2
        if bounds_within(middle)[-1] >= size - 1:
            high = middle
        else:
            low = middle
    return (*bounds_within(high)[:-1], size - 1)


def _windows(count: int, size: int, centre: Sequence[int] | None, band: int) -> Indices:
    """(stages + 1, window) bounds that each stage may begin at; -1 is padding."""
    if centre is None:
        bounds = np.tile(np.arange(size), (count + 1, 1))
    else:
        bounds = np.array(centre)[:, None] + np.arange(-band, band + 1)[None, :]
    stage = np.arange(count + 1)[:, None]
    outside = (bounds < stage) | (bounds > size - 1 - (count - stage))
    outside[0] = bounds[0] != 0
    outside[-1] = bounds[-1] != size - 1
    return np.where(outside, -1, bounds)


def stage_costs(
    space: Space, devices: Indices, first: Indices, last: Indices, held: Indices | int
) -> tuple[Floats, Floats]:
    """(period, fill) of segments on devices without the links between them; inf where one does not fit. Arguments broadcast."""
    crossing_costs = space.crossing_costs
    forward, backward = space.segments.passes(first, last, space.seconds[:, devices])
    # A peer computes, sends, receives and encodes at the same time; its lines carry both passes.
    period = np.maximum(
        forward + backward, (crossing_costs[0, last] + crossing_costs[3, first]) / space.up[devices]
    )
    period = np.maximum(period, (crossing_costs[0, first] + crossing_costs[3, last]) / space.down[devices])
    codec = (
        crossing_costs[1, last]
        + crossing_costs[2, first]
        + crossing_costs[4, first]
        + crossing_costs[5, last]
    )
    legal = (first >= 0) & (last > first)
    legal = legal & (space.segments.memory(first, last, held) <= space.memory[devices])
    return np.where(legal, np.maximum(period, codec), np.inf), np.where(legal, forward + backward, np.inf)


def link_costs(space: Space, producer: Indices, consumer: Indices, bound: Indices) -> tuple[Floats, Floats]:
    """(period, fill) of the link that a bound lies on, forward and backward. Arguments broadcast."""
    network, period, fill = space.network, np.zeros(1), np.zeros(1)
    for direction, (sender, receiver) in enumerate(((producer, consumer), (consumer, producer))):
        bytes_, encode, decode = space.crossing_costs[3 * direction : 3 * direction + 3, bound]
        period = np.maximum(period, bytes_ / network.pair_rates[sender, receiver])
        fill = fill + bytes_ / network.rates[sender, receiver] + encode + decode
        if direction == 0 or space.training:
            fill = fill + network.alphas[sender, receiver]
    return period, fill


def _tables(space: Space, order: Sequence[int], bounds: Indices) -> Tables:
    devices, count = np.array(order), len(order)
    held = space.min_in_flight(count)
    period, fill = stage_costs(
        space, devices[:, None, None], bounds[:-1, :, None], bounds[1:, None, :], held[:, None, None]
    )
    if count > 1:
        link, hop = link_costs(space, devices[:-1, None], devices[1:, None], bounds[1:-1])
        np.maximum(period[:-1], link[:, None, :], out=period[:-1])
        fill[:-1] += hop[:, None, :]
    return Tables(bounds, period, fill)


def _search(tables: Tables, costs: Floats, combine: np.ufunc) -> tuple[float, tuple[int, ...]]:
    """The least combined cost of all stages, and its bounds."""
    so_far = np.where(tables.bounds[0] == 0, 0.0, np.inf)
    choices = []
    for cost in costs:
        costs_so_far = combine(so_far[:, None], cost)
        chosen = costs_so_far.argmin(axis=0)
        choices.append(chosen)
        so_far = costs_so_far[chosen, np.arange(len(chosen))]
    last = int(so_far.argmin())
    best, picked = float(so_far[last]), [last]
    for chosen in reversed(choices):
        picked.append(int(chosen[picked[-1]]))
    return best, tuple(int(tables.bounds[s, w]) for s, w in enumerate(reversed(picked)))
