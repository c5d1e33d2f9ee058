"""OP-Fence (FusionLLM, arXiv 2410.12707): devices with fast links between them form clusters, the DAG is cut into
contiguous segments along a path through the clusters, and cuts between clusters fall where few bytes cross.

    bandwidth graph -> Louvain communities -> path over clusters -> order of devices -> segments in proportion to
    speed, snapped to cheap cuts -> min-max dynamic programming -> local moves while the predicted step time falls

Deviations from the paper: the graph's weights are log bandwidths (home links span three orders of magnitude), devices
may be left out, and every choice between variants is made by the step model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import networkx
import numpy as np

from fusion.dag.placement.local_moves import best_of, improve
from fusion.dag.placement.network import Matrix, Network
from fusion.dag.placement.recut import FEW_SLACK, recut
from fusion.dag.placement.search_space import Choice, Estimate, Space

_SEED = 0
_NEIGHBOURS = 24  # links of each device that the bandwidth graph keeps: all of them would make Louvain slow
_FEW_DEVICES = 16  # up to which only all of them together are clustered
_MAX_RUNS = 36  # contiguous parts of the path through the clusters that are tried
_EXHAUSTIVE_PATHS = 7  # clusters; up to so many every path is tried
_MOVE_BUDGET = 9_000  # orders that local moves evaluate, times stages: longer orders take longer
_BUDGET_SHARES = (0.4, 0.2, 0.2, 0.2)  # for the best starts, in order


def op_fence(space: Space) -> Choice | None:
    """The fastest placement found; None if none fits. Where devices are few, the search is repeated without the last ones as
    long as that helps: it is a heuristic, and one more device must not make its result worse."""
    best = _search(space)
    for fewer in _without_the_last(space):
        without = _search(fewer)
        if without is None or (best is not None and without[0].seconds >= best[0].seconds):
            break
        best = without
    return best[1] if best else None


def _search(space: Space) -> tuple[Estimate, Choice] | None:
    starts = _with_best_cuts(space, _orders_by_speed(space)) or _with_best_cuts(
        space, _orders_by_memory(space)
    )
    starts.sort(key=lambda item: (item[0].seconds, item[1]))
    budget = _MOVE_BUDGET if space.devices > _FEW_DEVICES else 2 * _MOVE_BUDGET
    improved = [
        improve(space, start, int(share * budget / (len(start[1].order) + 20)))
        for start, share in zip(starts, _BUDGET_SHARES, strict=False)
    ]
    return min(improved, key=lambda item: (item[0].seconds, item[1])) if improved else None


def _with_best_cuts(space: Space, orders: Iterable[tuple[int, ...]]) -> list[tuple[Estimate, Choice]]:
    """The best cuts of each order for which the model fits."""
    cuts = (best_of(space, recut(space, order, FEW_SLACK)) for order in dict.fromkeys(orders))
    return [best for best in cuts if best]


def _without_the_last(space: Space) -> Iterator[Space]:
    """The space with ever fewer devices, which keep their numbers."""
    if space.devices <= _FEW_DEVICES:
        for count in range(space.devices - 1, (space.stages or 1) - 1, -1):
            yield replace(
                space,
                network=Network(devices=space.network.devices[:count], links=space.network.links),
            )


def clusters(rates: Matrix) -> list[list[int]]:
    """Louvain communities of devices, as rows of `rates`, weighted by the log of bandwidth; a device in none joins the
    community that it has the best link to."""
    count = len(rates)
    rates = np.minimum(rates, rates.T)
    np.fill_diagonal(rates, 0.0)
    finite = np.where(np.isfinite(rates), rates, 1e15)
    off = finite[~np.eye(count, dtype=bool)]
    if count < 3 or off.min() == off.max():
        return [list(range(count))]
    weights = np.log(np.maximum(finite, off.min()) / off.min())
    graph = networkx.Graph()
    graph.add_nodes_from(range(count))
    random = np.random.default_rng(_SEED)
    for a in range(count):
        # Ties are broken at random, or all devices would keep links to the same few.
        shuffled = random.permutation(count)
        best = shuffled[np.argsort(-weights[a, shuffled], kind="stable")][:_NEIGHBOURS]
        graph.add_weighted_edges_from(
            (a, int(b), float(weights[a, b])) for b in best if weights[a, b] > 0 and b != a
        )
    communities = [
        sorted(c) for c in networkx.community.louvain_communities(graph, weight="weight", seed=_SEED)
    ]
    groups = [c for c in communities if len(c) > 1]
    if not groups:
        return [list(range(count))]
    for (single,) in (c for c in communities if len(c) == 1):
        max(groups, key=lambda group: float(finite[single, group].max())).append(single)
    return sorted(sorted(group) for group in groups)


def path(between: Matrix) -> list[int]:
    """An order of the clusters that maximises the bandwidth of its narrowest crossing, then the sum of log bandwidths;
    `between[i, j]` is the bandwidth from cluster i to j. All orders of few clusters are tried, else greedy ones."""
    count = len(between)
    log_width = np.log(np.clip(between, 1.0, 1e15))

    def width(order: Iterable[int]) -> tuple[float, float]:
        clusters_in_order = list(order)
        steps = log_width[clusters_in_order[:-1], clusters_in_order[1:]]
        return float(steps.min(initial=np.inf)), float(steps.sum())

    if count <= _EXHAUSTIVE_PATHS:
        return list(max(permutations(range(count)), key=width))
    best: list[int] = []
    for first in range(count) if count <= 64 else (0,):
        order, remaining = [first], set(range(count)) - {first}
        while remaining:
            order.append(max(remaining, key=lambda c: (log_width[order[-1], c], -c)))
            remaining.remove(order[-1])
        if not best or width(order) > width(best):
            best = order
    return best


def _orders_by_speed(space: Space) -> Iterator[tuple[int, ...]]:
    """Initial orders: of all devices, and of ever fewer of the fastest, as slow ones blur the clusters."""
    fast = sorted(range(space.devices), key=lambda d: (-space.flops[d], d))
    roomy = sorted(range(space.devices), key=lambda d: (-space.memory[d], -space.flops[d], d))
    for members in _ever_fewer(fast):
        yield from _clustered(space, members)
    for count in _stage_counts(space, space.most_stages):
        for chosen in (fast, roomy):
            yield from _if_allowed(space, _chain(space.network, [sorted(chosen[:count])]))


def _orders_by_memory(space: Space) -> Iterator[tuple[int, ...]]:
    """Initial orders where memory is scarce: the devices with most memory, placed by memory alone."""
    roomy = sorted(range(space.devices), key=lambda d: (-space.memory[d], -space.flops[d], d))
    for count in _stage_counts(space, space.most_stages):
        yield from _if_allowed(space, _fitting(space, roomy[:count]))


def _fitting(space: Space, members: Sequence[int]) -> list[int]:
    """An order of these devices in which the model fits, by best fit: each segment goes to the device with the least memory that
    can hold its first node, which takes as much as it has room for. Empty where none is found."""
    segments, size = space.segments, len(space.segments.bounds)
    held = space.min_in_flight(len(members))
    remaining = sorted(members, key=lambda d: (space.memory[d], d))
    order, bounds = list[int](), [0]
    while bounds[-1] < size - 1:
        at = bounds[-1]
        needed = segments.memory(at, slice(at + 1, None), held[min(len(order), len(members) - 1)])
        reach = [int(np.flatnonzero(needed <= space.memory[d]).max(initial=-1)) + 1 for d in remaining]
        chosen = next((n for n, pieces in enumerate(reach) if pieces), None)
        if chosen is None:
            return []
        order.append(remaining.pop(chosen))
        bounds.append(at + reach[chosen])
    # Where the number of stages is given, the devices left over take the ends of long segments.
    for device in reversed(remaining) if space.stages is not None else ():
        for s in sorted(range(len(order)), key=lambda s: bounds[s] - bounds[s + 1]):
            end = bounds[s + 1]
            if end - bounds[s] > 1 and segments.memory(end - 1, end, held[s + 1]) <= space.memory[device]:
                order.insert(s + 1, device)
                bounds.insert(s + 1, end - 1)
                break
    return order


def _ever_fewer(fast: Sequence[int]) -> Iterator[list[int]]:
    count = len(fast)
    yield sorted(fast)
    while count > _FEW_DEVICES:
        count //= 3
        yield sorted(fast[:count])


def _clustered(space: Space, members: Sequence[int]) -> Iterator[tuple[int, ...]]:
    network, rows = space.network, np.array(members)
    groups = [[members[i] for i in group] for group in clusters(network.rates[np.ix_(rows, rows)])]
    rates = np.minimum(network.rates, network.rates.T)
    between = np.array([[rates[np.ix_(a, b)].max() for b in groups] for a in groups])
    line = [groups[c] for c in path(between)]
    runs = [line[a:b] for a in range(len(line)) for b in range(a + 1, len(line) + 1)]
    # Keep the whole path, the clusters that compute most, and windows around them
    if len(runs) > _MAX_RUNS:
        speed = [float(np.sort(space.flops[group])[-_FEW_DEVICES:].sum()) for group in line]
        best = np.argsort(speed)[::-1]
        runs = [line, *([line[int(c)]] for c in best[: _MAX_RUNS // 2])]
        runs += [line[max(0, c - w) : c + w + 1] for c in best[:4].tolist() for w in (1, 2, 4, 8)]
    for run in runs:
        fast = sorted((d for group in run for d in group), key=lambda d: (-space.flops[d], d))
        for count in _stage_counts(space, min(space.most_stages, len(fast))):
            kept = set(fast[:count])
            part = [[d for d in group if d in kept] for group in run]
            order = _chain(network, [group for group in part if group])
            yield from _if_allowed(space, order)
            yield from _if_allowed(space, _narrow_ends(space, order))


def _if_allowed(space: Space, order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    legal = tuple(order)[: space.stages]
    if 0 < len(legal) <= space.most_stages and space.allowed(legal):
        yield legal


def _stage_counts(space: Space, most: int) -> list[int]:
    """Numbers of stages to try: 1 to 4, then geometrically spaced."""
    if space.stages is not None:
        return [space.stages] if space.stages <= most else []
    counts = list(range(1, min(most, 4) + 1))
    while counts[-1] < most:
        counts.append(min(most, int(counts[-1] * (1.5 if most <= 64 else 2))))
    return counts


def _chain(network: Network, groups: Sequence[Sequence[int]]) -> list[int]:
    """Devices cluster by cluster, nearest neighbour by bandwidth first; each cluster ends with its device nearest to the next."""
    rates, alphas = np.minimum(network.rates, network.rates.T), network.alphas
    order: list[int] = []
    for i, group in enumerate(groups):
        remaining = list(group)
        exit_ = None
        if i + 1 < len(groups) and len(remaining) > 1:
            crossing = rates[np.ix_(remaining, list(groups[i + 1]))].max(axis=1)
            exit_ = remaining[int(crossing.argmax())]
            remaining.remove(exit_)
        if not order:
            first = remaining[0] if exit_ is None else min(remaining, key=lambda d: (rates[d, exit_], d))
            order.append(first)
            remaining.remove(first)
        while remaining:
            current, options = order[-1], np.array(remaining)
            nearest = np.lexsort((options, alphas[current, options], -rates[current, options]))[0]
            order.append(remaining.pop(int(nearest)))
        if exit_ is not None:
            order.append(exit_)
    return order


def _narrow_ends(space: Space, order: Sequence[int]) -> list[int]:
    """`order` with the two devices of the narrowest lines at its ends, which have one neighbour instead of two."""
    if len(order) < 3 or not np.isfinite(np.minimum(space.up, space.down)[list(order)]).any():
        return list(order)
    narrow = sorted(order, key=lambda d: (min(space.up[d], space.down[d]), d))[:2]
    a, b = sorted(narrow, key=list(order).index)
    return [a, *(d for d in order if d not in narrow), b]
