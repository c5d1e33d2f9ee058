"""Small changes to a placement, kept while the predicted step time falls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fusion.dag.placement.recut import FEW_SLACK, SLACK, recut
from fusion.dag.placement.search_space import Choice, Outlook, Space
from fusion.dag.placement.step_model import busy

_SPARE = 8  # devices without a stage that are tried in one
_FALLS = 1e-9  # by a smaller share, it does not fall


def best_of(space: Space, choices: Iterable[Choice]) -> tuple[Outlook, Choice] | None:
    """The first of the fastest; None if none is allowed."""
    best: tuple[Outlook, Choice] | None = None
    for choice in choices:
        outlook = space.outlook(choice)
        if outlook.seconds < (best[0].seconds * (1 - _FALLS) if best else np.inf):
            best = outlook, choice
    return best


def improve(space: Space, start: tuple[Outlook, Choice], tries: int, seed: int = 0) -> tuple[Outlook, Choice]:
    """`start` or better: devices swapped, moved, left out or taken in, then cuts shifted. `tries` orders are looked
    at; a fixed seed says in which turn."""
    random = np.random.default_rng(seed)
    best = _settled(space, start)
    seen = {best[1].order}
    while tries > 0:
        improved = False
        for order, near in _orders(space, best[1], random):
            order = order[: space.stages]
            if order in seen or not order or not space.allowed(order):
                continue
            if tries <= 0:
                break
            seen.add(order)
            tries -= 1
            found = best_of(
                space, recut(space, order, FEW_SLACK, near if len(near) == len(order) + 1 else None)
            )
            if found and found[0].seconds < best[0].seconds * (1 - _FALLS):
                best, improved = _settled(space, found), True
                break
        if not improved:
            break
    return best


def _settled(space: Space, start: tuple[Outlook, Choice]) -> tuple[Outlook, Choice]:
    """The best cuts for the same order."""
    order, near = start[1].order, start[1].bounds
    recuts = best_of(space, recut(space, order, SLACK, near))
    return shift_cuts(space, min(start, recuts or start, key=lambda item: item[0].seconds))


def shift_cuts(space: Space, start: tuple[Outlook, Choice]) -> tuple[Outlook, Choice]:
    """The cuts at the stages that are busiest, shifted by a bound or some while that helps."""
    best, size = start, len(space.segments.bounds)
    for _ in range(size):
        bounds = best[1].bounds
        stage = _busiest(space, best[1])
        found = None
        for cut in {stage, stage + 1} - {0, len(bounds) - 1}:
            for step in (-1, 1, -2, 2, -4, 4):
                moved = bounds[cut] + step
                if bounds[cut - 1] < moved < bounds[cut + 1]:
                    choice = Choice(best[1].order, (*bounds[:cut], moved, *bounds[cut + 1 :]))
                    outlook = space.outlook(choice)
                    if outlook.seconds < (found or best)[0].seconds * (1 - _FALLS):
                        found = outlook, choice
        if found is None:
            return best
        best = found
    return best


def _busiest(space: Space, choice: Choice) -> int:
    work = space.work(choice)
    load = busy(work)
    by_stage = np.stack(
        [t.sum(axis=0) for t in (load.stages, load.uplinks, load.downlinks, load.codecs)]
    ).max(axis=0)
    if load.pairs.size:
        np.maximum.at(by_stage, work.producer, load.pairs.max(axis=0))
    return int(by_stage.argmax())


def _orders(
    space: Space, choice: Choice, random: np.random.Generator
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Neighbouring orders, each with the bounds to search around: first those that change the busiest stage."""
    order, bounds = choice.order, choice.bounds
    count, spare = len(order), sorted(set(range(space.devices)) - set(choice.order))
    stage = _busiest(space, choice)
    here = [s for s in (stage, stage + 1, stage - 1) if 0 <= s < count]

    def without(s: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        gone = min(max(s, 1), count - 1)
        return (*order[:s], *order[s + 1 :]), (*bounds[:gone], *bounds[gone + 1 :])

    def swapped(a: int, b: int) -> tuple[int, ...]:
        new = list(order)
        new[a], new[b] = new[b], new[a]
        return tuple(new)

    def moved(a: int, b: int) -> tuple[int, ...]:
        rest = (*order[:a], *order[a + 1 :])
        return (*rest[:b], order[a], *rest[b:])

    if count > 1:
        yield from (without(s) for s in here)
    fast = sorted(spare, key=lambda d: (-space.flops[d], d))
    some = fast
    if len(fast) > _SPARE:
        rates = space.network.rates[order[stage]]
        near = sorted(fast, key=lambda d: -rates[d])[: _SPARE // 2]
        some = list(
            dict.fromkeys([*near, *fast[: _SPARE // 4], *random.permutation(fast)[: _SPARE // 4].tolist()])
        )
    for device in some:
        for s in here:
            yield (*order[:s], device, *order[s + 1 :]), bounds
        yield from (((*order[:s], device, *order[s:]), ()) for s in (stage, stage + 1))
    for a in here[:1]:
        for b in random.permutation(count).tolist():
            if a != b:
                yield swapped(a, b), bounds
                yield moved(a, b), bounds
    rest: list[tuple[str, int, int]] = []
    if count > 1:
        rest += [("drop", s, s) for s in range(count)]
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if len(pairs) > 400:
        pairs = [pairs[int(i)] for i in random.permutation(len(pairs))[:400]]
    rest += [("swap" if a < b else "move", a, b) for a, b in pairs]
    rest += [("move", a, b) for a, b in pairs if a < b]
    rest += [("take", d, s) for d in some for s in range(count + 1)]
    rest += [("replace", d, s) for d in some for s in range(count)]
    for i in random.permutation(len(rest)).tolist():
        kind, a, b = rest[i]
        if kind == "drop":
            yield without(a)
        elif kind == "swap":
            yield swapped(a, b), bounds
        elif kind == "move":
            yield moved(a, b), bounds
        elif kind == "take":
            yield (*order[:b], a, *order[b:]), ()
        else:
            yield (*order[:b], a, *order[b + 1 :]), bounds
