"""Baselines for OP-Fence: equal numbers of operators, equal FLOPs (those of FusionLLM, arXiv 2410.12707), and, where
devices and cuts are few, the optimum of a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusion.dag.placement.local_moves import best_of
from fusion.dag.placement.recut import link_costs, stage_costs
from fusion.dag.placement.search_space import Choice, Space

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

MAX_DEVICES = 12
MAX_ENTRIES = 40_000_000  # of the tables that `exact` fills in each round


def equal_ops(space: Space) -> Choice | None:
    """An equal number of nodes for each device, in the order of the network; None if there is no such placement."""
    return _equal(space, np.array(space.segments.bounds, dtype=np.float64))


def equal_flops(space: Space) -> Choice | None:
    """Equal FLOPs for each device, whatever its speed, in the order of the network; None if there is no such placement."""
    return _equal(space, space.segments.flops)


def _equal(space: Space, cumulative: Floats) -> Choice | None:
    order = tuple(range(space.devices)[: space.stages or space.most_stages])
    order = order[: len(cumulative) - 1]
    count, size = len(order), len(cumulative)
    if not space.allowed(order):
        return None
    bounds = [0]
    for s in range(1, count):
        nearest = int(np.abs(cumulative - cumulative[-1] * s / count).argmin())
        bounds.append(min(max(nearest, bounds[-1] + 1), size - 1 - (count - s)))
    return Choice(order, (*bounds, size - 1))


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """`seconds` is a lower bound for every placement of a chain. It leaves out latency that too few microbatches in flight
    expose, the optimizer's work and the handshake of a step, so the step model's time for `choice` is that or more. Values
    that skip stages are counted at every stage between."""

    choice: Choice
    seconds: float


def too_large(space: Space) -> str | None:
    """The reason why `exact` does not search this space, for people; None where it does."""
    count, size = space.devices, len(space.segments.bounds)
    if count > MAX_DEVICES:
        return f"it searches at most {MAX_DEVICES} peers, and there are {count}"
    if (count << count) * size * (count + size) > MAX_ENTRIES:
        return f"{count} peers and {size - 2} cuts are too many for its tables: it takes fewer peers"
    return None


def exact(space: Space) -> Optimum | None:
    """The best of all subsets and orders of devices and all sets of cuts, by dynamic programming over (devices used, the
    first of them, the bound that it begins at), from the last stage to the first. Each round minimises the fill under a
    limit on the period, then lowers the limit, until nothing fits. None if nothing fits, or if `too_large`."""
    if too_large(space):
        return None
    tables = _Tables.of(space)
    shortest = tables.search(np.inf, np.maximum)
    if shortest is None:
        return None
    least_period, best, choices = shortest[0], np.inf, [shortest[1]]
    limit = np.inf
    while (cheapest := tables.search(limit, np.add)) is not None:
        seconds, choice = cheapest
        if seconds + (space.microbatches - 1) * least_period >= best:
            break
        limit = tables.period(choice)
        best = min(best, seconds + (space.microbatches - 1) * limit)
        choices.append(choice)
        limit *= 1 - 1e-9
    fastest = best_of(space, choices)
    return Optimum(choice=fastest[1], seconds=best) if fastest else None


@dataclass(frozen=True, eq=False)
class _Tables:
    space: Space
    # (period, fill) by device, first and last bound; [n]: n stages follow
    by_stages: tuple[tuple[Floats, Floats], ...]
    links: tuple[Floats, Floats]  # (period, fill) by two devices and the bound between them

    @staticmethod
    def of(space: Space) -> _Tables:
        devices, at = np.arange(space.devices), np.arange(len(space.segments.bounds))
        max_stages = space.most_stages
        held = space.min_in_flight(max_stages)[::-1]
        by_stages = tuple(
            stage_costs(space, devices[:, None, None], at[:, None], at[None, :], int(held[n]))
            for n in range(max_stages)
        )
        return _Tables(
            space, by_stages, link_costs(space, devices[:, None, None], devices[None, :, None], at)
        )

    def period(self, choice: Choice) -> float:
        order, bounds = choice.order, choice.bounds
        stages = [
            float(self.by_stages[len(order) - 1 - s][0][d, bounds[s], bounds[s + 1]])
            for s, d in enumerate(order)
        ]
        links = [float(self.links[0][a, b, c]) for a, b, c in zip(order, order[1:], bounds[1:], strict=False)]
        return max(*stages, *links, 0.0)

    def search(self, limit: float, combine: np.ufunc) -> tuple[float, Choice] | None:
        """The least combined cost of a choice whose period is nowhere above `limit`."""
        space, sums_fill = self.space, combine is np.add
        count, size = space.devices, len(space.segments.bounds)

        def within_limit(period: Floats, fill: Floats) -> Floats:
            return np.where(period <= limit, fill if sums_fill else period, np.inf)

        segments, link = [within_limit(*t) for t in self.by_stages], within_limit(*self.links)
        cost = np.full((1 << count, count, size), np.inf)  # devices used, the first of them, where it begins
        for d in range(count):
            cost[1 << d, d] = segments[0][d, :, -1]
        for used in range(1, space.most_stages):
            masks = np.array([m for m in range(1 << count) if m.bit_count() == used])
            for e in range(count):
                free = masks[(masks >> e) & 1 == 0]
                # (masks, bound that the rest begins at)
                rest = combine(cost[free], link[e][None]).min(axis=1)
                whole = combine(rest[:, None, :], segments[used][e][None])
                cost[free | 1 << e, e] = whole.min(axis=2)
        ends = [(float(cost[m, d, 0]), m, d) for m, d in self._ends() if np.isfinite(cost[m, d, 0])]
        if not ends:
            return None
        best, mask, first = min(ends)
        order, bounds = [first], [0]
        while mask != 1 << order[-1]:
            d, a, rest_mask = order[-1], bounds[-1], mask & ~(1 << order[-1])
            used = rest_mask.bit_count()
            options = combine(combine(cost[rest_mask], link[d]), segments[used][d, a][None])
            following, bound = divmod(int(options.argmin()), size)
            order.append(following)
            bounds.append(bound)
            mask = rest_mask
        return best, Choice(tuple(order), (*bounds, size - 1))

    def _ends(self) -> Iterator[tuple[int, int]]:
        space = self.space
        for mask in range(1, 1 << space.devices):
            if space.stages is None or mask.bit_count() == space.stages:
                for d in range(space.devices):
                    if mask >> d & 1:
                        yield mask, d
