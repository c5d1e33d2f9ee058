"""Small changes to a placement, kept while the predicted step time falls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from fusion.dag.placement.recut import FEW_SLACK, SLACK, recut
from fusion.dag.placement.search_space import Choice, Outlook, Space
from fusion.dag.placement.step_model import busy

Neighbour = tuple[tuple[int, ...], tuple[int, ...]]  # an order, and the bounds to search around

_SPARE = 8  # devices without a stage that are tried in one
_PAIRS = 400  # of places in an order that are looked at
_FALLS = 1e-9  # by a smaller share, it does not fall


def best_of(space: Space, choices: Iterable[Choice]) -> tuple[Outlook, Choice] | None:
    """The first of the fastest; None if none is allowed."""
    best: tuple[Outlook, Choice] | None = None
    for choice in choices:
        outlook = space.outlook(choice)
        if outlook.seconds < (best[0].seconds * (1 - _FALLS) if best else np.inf):
            best = outlook, choice
    return best


def improve(space: Space, start: tuple[Outlook, Choice], tries: int) -> tuple[Outlook, Choice]:
    """`start` or better: devices swapped, moved, left out or taken in, then cuts shifted. `tries` orders are looked
    at; a fixed seed says in which turn."""
    random = np.random.default_rng(0)
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
        found = None
        for choice in _shifted(best[1], _busiest(space, best[1])):
            outlook = space.outlook(choice)
            if outlook.seconds < (found or best)[0].seconds * (1 - _FALLS):
                found = outlook, choice
        if found is None:
            return best
        best = found
    return best


def _shifted(choice: Choice, stage: int) -> Iterator[Choice]:
    """The same order with a cut beside `stage` one, two or four bounds earlier or later."""
    bounds = choice.bounds
    for cut in {stage, stage + 1} - {0, len(bounds) - 1}:
        for step in (-1, 1, -2, 2, -4, 4):
            moved = bounds[cut] + step
            if bounds[cut - 1] < moved < bounds[cut + 1]:
                yield Choice(choice.order, (*bounds[:cut], moved, *bounds[cut + 1 :]))


def _busiest(space: Space, choice: Choice) -> int:
    work = space.work(choice)
    load = busy(work)
    by_stage = np.stack(
        [t.sum(axis=0) for t in (load.stages, load.uplinks, load.downlinks, load.codecs)]
    ).max(axis=0)
    if load.pairs.size:
        np.maximum.at(by_stage, work.producer, load.pairs.max(axis=0))
    return int(by_stage.argmax())


def _orders(space: Space, choice: Choice, random: np.random.Generator) -> Iterator[Neighbour]:
    """Neighbouring orders: first those that change the busiest stage, then all others as they are drawn."""
    moves, count, stage = _Moves(choice.order, choice.bounds), len(choice.order), _busiest(space, choice)
    here = [s for s in (stage, stage + 1, stage - 1) if 0 <= s < count]
    if count > 1:
        yield from map(moves.drop, here)
    spare = _spare(space, choice, stage, random)
    for device in spare:
        yield from (moves.replace(device, s) for s in here)
        yield from (moves.take(device, s) for s in (stage, stage + 1))
    for other in random.permutation(count).tolist():
        if other != stage:
            yield moves.swap(stage, other)
            yield moves.move(stage, other)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if len(pairs) > _PAIRS:
        pairs = [pairs[int(i)] for i in random.permutation(len(pairs))[:_PAIRS]]
    rest: list[Callable[[], Neighbour]] = [
        *(partial(moves.drop, s) for s in range(count) if count > 1),
        *(partial(moves.swap if a < b else moves.move, a, b) for a, b in pairs),
        *(partial(moves.move, a, b) for a, b in pairs if a < b),
        *(partial(moves.take, device, s) for device in spare for s in range(count + 1)),
        *(partial(moves.replace, device, s) for device in spare for s in range(count)),
    ]
    for i in random.permutation(len(rest)).tolist():
        yield rest[i]()


def _spare(space: Space, choice: Choice, stage: int, random: np.random.Generator) -> list[int]:
    """Devices without a stage that are worth a try: fast ones, and where there are many also near ones and some at random."""
    idle = set(range(space.devices)) - set(choice.order)
    fast = sorted(idle, key=lambda device: (-space.flops[device], device))
    if len(fast) <= _SPARE:
        return fast
    rates = space.network.rates[choice.order[stage]]
    near = sorted(fast, key=lambda device: -rates[device])[: _SPARE // 2]
    drawn = random.permutation(fast)[: _SPARE // 4].tolist()
    return list(dict.fromkeys([*near, *fast[: _SPARE // 4], *drawn]))


@dataclass(frozen=True)
class _Moves:
    """What may be done to an order of devices, a stage each, that is cut at `bounds`."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]

    def drop(self, s: int) -> Neighbour:
        gone = min(max(s, 1), len(self.order) - 1)
        return (*self.order[:s], *self.order[s + 1 :]), (*self.bounds[:gone], *self.bounds[gone + 1 :])

    def swap(self, a: int, b: int) -> Neighbour:
        new = list(self.order)
        new[a], new[b] = new[b], new[a]
        return tuple(new), self.bounds

    def move(self, a: int, b: int) -> Neighbour:
        rest = (*self.order[:a], *self.order[a + 1 :])
        return (*rest[:b], self.order[a], *rest[b:]), self.bounds

    def take(self, device: int, s: int) -> Neighbour:
        return (*self.order[:s], device, *self.order[s:]), ()

    def replace(self, device: int, s: int) -> Neighbour:
        return (*self.order[:s], device, *self.order[s + 1 :]), self.bounds
