"""OP-Fence (FusionLLM, arXiv 2410.12707): devices with fast links between them form clusters, the DAG is cut into
contiguous segments along a path through the clusters, and the few cuts between clusters fall where little crosses.

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
from fusion.dag.placement.search_space import Choice, Outlook, Space

_SEED = 0
_NEIGHBOURS = 24  # links of each device that the bandwidth graph keeps: all of them would make Louvain slow
_FEW = 16  # devices that are looked at together only
_RUNS = 36  # parts of the path through the clusters that are looked at
_EVERY_PATH = 7  # clusters up to which every path is tried
_WORK = 9_000  # how many orders local moves look at: this over the stages, as longer orders take longer
_SHARES = (0.4, 0.2, 0.2, 0.2)  # of it for the best placements to begin with


def op_fence(space: Space) -> Choice | None:
    """The fastest placement found; None if none fits. Of few devices the last is also left out, and the one before it as
    long as that helps: the search finds no optimum, and who came last should not make what was found before worse."""
    best = _search(space)
    for fewer in _without_the_last(space):
        found = _search(fewer)
        if found is None or (best is not None and found[0].seconds >= best[0].seconds):
            break
        best = found
    return best[1] if best else None


def _search(space: Space) -> tuple[Outlook, Choice] | None:
    found = _cut(space, _orders(space)) or _cut(space, _packed(space))
    found.sort(key=lambda item: (item[0].seconds, item[1]))
    work = _WORK if space.devices > _FEW else 2 * _WORK
    ends = [
        improve(space, start, int(share * work / (len(start[1].order) + 20)))
        for start, share in zip(found, _SHARES, strict=False)
    ]
    return min(ends, key=lambda item: (item[0].seconds, item[1])) if ends else None


def _cut(space: Space, orders: Iterable[tuple[int, ...]]) -> list[tuple[Outlook, Choice]]:
    """The best cuts of each order for which the model fits."""
    found = (best_of(space, recut(space, order, FEW_SLACK)) for order in dict.fromkeys(orders))
    return [best for best in found if best]


def _without_the_last(space: Space) -> Iterator[Space]:
    """The same with ever fewer devices, whose numbers stay the same."""
    if space.devices <= _FEW:
        for count in range(space.devices - 1, (space.stages or 1) - 1, -1):
            yield replace(
                space,
                network=Network(devices=space.network.devices[:count], links=space.network.links),
            )


def clusters(rates: Matrix) -> list[list[int]]:
    """Louvain communities of devices, by row, on the log of the bandwidth between each two; a device alone joins the
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
        # Of equal links any will do, but not the same ones for every device.
        turn = random.permutation(count)
        best = turn[np.argsort(-weights[a, turn], kind="stable")][:_NEIGHBOURS]
        graph.add_weighted_edges_from(
            (a, int(b), float(weights[a, b])) for b in best if weights[a, b] > 0 and b != a
        )
    found = [sorted(c) for c in networkx.community.louvain_communities(graph, weight="weight", seed=_SEED)]
    groups = [c for c in found if len(c) > 1]
    if not groups:
        return [list(range(count))]
    for (alone,) in (c for c in found if len(c) == 1):
        max(groups, key=lambda group: float(finite[alone, group].max())).append(alone)
    return sorted(sorted(group) for group in groups)


def path(between: Matrix) -> list[int]:
    """An order of the clusters whose narrowest crossing is as wide as can be, then whose crossings are wide on the
    whole; `between[i, j]` is the bandwidth of a crossing. Every order of few clusters is tried, of many a greedy one."""
    count = len(between)
    wide = np.log(np.clip(between, 1.0, 1e15))

    def worth(order: Iterable[int]) -> tuple[float, float]:
        at = list(order)
        steps = wide[at[:-1], at[1:]]
        return float(steps.min(initial=np.inf)), float(steps.sum())

    if count <= _EVERY_PATH:
        return list(max(permutations(range(count)), key=worth))
    best: list[int] = []
    for first in range(count) if count <= 64 else (0,):
        order, left = [first], set(range(count)) - {first}
        while left:
            order.append(max(left, key=lambda c: (wide[order[-1], c], -c)))
            left.remove(order[-1])
        if not best or worth(order) > worth(best):
            best = order
    return best


def _orders(space: Space) -> Iterator[tuple[int, ...]]:
    """Sequences of devices to begin with: of all, and of ever fewer of the fastest, as slow ones blur the clusters."""
    fast = sorted(range(space.devices), key=lambda d: (-space.flops[d], d))
    roomy = sorted(range(space.devices), key=lambda d: (-space.memory[d], -space.flops[d], d))
    for members in _nested(fast):
        yield from _clustered(space, members)
    for count in _counts(space, space.most_stages):
        for chosen in (fast, roomy):
            yield from _legal(space, _through(space.network, [sorted(chosen[:count])]))


def _packed(space: Space) -> Iterator[tuple[int, ...]]:
    """Where memory is scarce, by it alone: those with most room, as many as `_orders` tries."""
    roomy = sorted(range(space.devices), key=lambda d: (-space.memory[d], -space.flops[d], d))
    for count in _counts(space, space.most_stages):
        yield from _legal(space, _fitting(space, roomy[:count]))


def _fitting(space: Space, members: Sequence[int]) -> list[int]:
    """An order of these devices in which the model fits them: each takes what it has room for, and of those that could take what
    comes next it is the turn of the one with least, so that others are left for larger pieces. Empty where none is found."""
    segments, size = space.segments, len(space.segments.bounds)
    held = space.least_held(len(members))
    left = sorted(members, key=lambda d: (space.memory[d], d))
    order, bounds = list[int](), [0]
    while bounds[-1] < size - 1:
        at = bounds[-1]
        needed = segments.memory(at, slice(at + 1, None), held[min(len(order), len(members) - 1)])
        most = [int(np.flatnonzero(needed <= space.memory[d]).max(initial=-1)) + 1 for d in left]
        turn = next((n for n, pieces in enumerate(most) if pieces), None)
        if turn is None:
            return []
        order.append(left.pop(turn))
        bounds.append(at + most[turn])
    # Where all of them are to have a stage, a piece of a long one.
    for device in reversed(left) if space.stages is not None else ():
        for s in sorted(range(len(order)), key=lambda s: bounds[s] - bounds[s + 1]):
            end = bounds[s + 1]
            if end - bounds[s] > 1 and segments.memory(end - 1, end, held[s + 1]) <= space.memory[device]:
                order.insert(s + 1, device)
                bounds.insert(s + 1, end - 1)
                break
    return order


def _nested(fast: Sequence[int]) -> Iterator[list[int]]:
    count = len(fast)
    yield sorted(fast)
    while count > _FEW:
        count //= 3
        yield sorted(fast[:count])


def _clustered(space: Space, members: Sequence[int]) -> Iterator[tuple[int, ...]]:
    network, own = space.network, np.array(members)
    groups = [[members[i] for i in group] for group in clusters(network.rates[np.ix_(own, own)])]
    rates = np.minimum(network.rates, network.rates.T)
    between = np.array([[rates[np.ix_(a, b)].max() for b in groups] for a in groups])
    line = [groups[c] for c in path(between)]
    runs = [line[a:b] for a in range(len(line)) for b in range(a + 1, len(line) + 1)]
    # Those that matter most: the whole, the clusters that compute most, and those around them
    if len(runs) > _RUNS:
        speed = [float(np.sort(space.flops[group])[-_FEW:].sum()) for group in line]
        best = np.argsort(speed)[::-1]
        runs = [line, *([line[int(c)]] for c in best[: _RUNS // 2])]
        runs += [line[max(0, c - w) : c + w + 1] for c in best[:4].tolist() for w in (1, 2, 4, 8)]
    for run in runs:
        fast = sorted((d for group in run for d in group), key=lambda d: (-space.flops[d], d))
        for count in _counts(space, min(space.most_stages, len(fast))):
            kept = set(fast[:count])
            part = [[d for d in group if d in kept] for group in run]
            order = _through(network, [group for group in part if group])
            yield from _legal(space, order)
            yield from _legal(space, _narrow_ends(space, order))


def _legal(space: Space, order: Sequence[int]) -> Iterator[tuple[int, ...]]:
    legal = tuple(order)[: space.stages]
    if 0 < len(legal) <= space.most_stages and space.allowed(legal):
        yield legal


def _counts(space: Space, most: int) -> list[int]:
    """Numbers of stages to try: all small ones, then ever fewer."""
    if space.stages is not None:
        return [space.stages] if space.stages <= most else []
    found = list(range(1, min(most, 4) + 1))
    while found[-1] < most:
        found.append(min(most, int(found[-1] * (1.5 if most <= 64 else 2))))
    return found


def _through(network: Network, groups: Sequence[Sequence[int]]) -> list[int]:
    """Each cluster's devices in turn, always on to the nearest by bandwidth; a cluster is left near the next one."""
    rates, alphas = np.minimum(network.rates, network.rates.T), network.alphas
    order: list[int] = []
    for i, group in enumerate(groups):
        left = list(group)
        out = None
        if i + 1 < len(groups) and len(left) > 1:
            crossing = rates[np.ix_(left, list(groups[i + 1]))].max(axis=1)
            out = left[int(crossing.argmax())]
            left.remove(out)
        if not order:
            first = left[0] if out is None else min(left, key=lambda d: (rates[d, out], d))
            order.append(first)
            left.remove(first)
        while left:
            here, options = order[-1], np.array(left)
            at = np.lexsort((options, alphas[here, options], -rates[here, options]))[0]
            order.append(left.pop(int(at)))
        if out is not None:
            order.append(out)
    return order


def _narrow_ends(space: Space, order: Sequence[int]) -> list[int]:
    """The two narrowest lines first and last, where they carry one pass out and one in instead of two."""
    if len(order) < 3 or not np.isfinite(np.minimum(space.up, space.down)[list(order)]).any():
        return list(order)
    narrow = sorted(order, key=lambda d: (min(space.up[d], space.down[d]), d))[:2]
    a, b = sorted(narrow, key=list(order).index)
    return [a, *(d for d in order if d not in narrow), b]
