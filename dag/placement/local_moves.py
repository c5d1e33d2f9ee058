"""Small changes to a placement, kept while the predicted step time falls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from fusion.dag.placement.recut import FEW_SLACK, SLACK, recut
from fusion.dag.placement.search_space import Choice, Estimate, Space
from fusion.dag.placement.step_model import busy_seconds

Neighbour = tuple[tuple[int, ...], tuple[int, ...]]  # an order, and the bounds to search around

_MAX_SPARE = 8  # idle devices that are tried in a stage
_MAX_PAIRS = 400  # pairs of stages that are swapped or moved
_MIN_GAIN = 1e-9  # a smaller relative gain is rounding


def best_of(space: Space, choices: Iterable[Choice]) -> tuple[Estimate, Choice] | None:
    """The fastest choice, the first of equal ones; None if none is allowed."""
    best: tuple[Estimate, Choice] | None = None
    for choice in choices:
        estimate = space.estimate(choice)
        if estimate.seconds < (best[0].seconds * (1 - _MIN_GAIN) if best else np.inf):
            best = estimate, choice
    return best


def improve(space: Space, start: tuple[Estimate, Choice], tries: int) -> tuple[Estimate, Choice]:
    """`start` or better: devices swapped, moved, dropped or inserted, then cuts shifted. At most `tries` orders are
    evaluated, in the order of a fixed seed."""
    random = np.random.default_rng(0)
    best = _with_best_cuts(space, start)
    seen = {best[1].order}
    while tries > 0:
        improved = False
        for order, around in _orders(space, best[1], random):
            order = order[: space.stages]
            if order in seen or not order or not space.allowed(order):
                continue
            if tries <= 0:
                break
            seen.add(order)
            tries -= 1
            candidate = best_of(
                space, recut(space, order, FEW_SLACK, around if len(around) == len(order) + 1 else None)
            )
            if candidate and candidate[0].seconds < best[0].seconds * (1 - _MIN_GAIN):
                best, improved = _with_best_cuts(space, candidate), True
                break
        if not improved:
            break
    return best


def _with_best_cuts(space: Space, start: tuple[Estimate, Choice]) -> tuple[Estimate, Choice]:
    """The order of `start` with the best cuts found for it."""
    order, around = start[1].order, start[1].bounds
    recuts = best_of(space, recut(space, order, SLACK, around))
    return shift_cuts(space, min(start, recuts or start, key=lambda item: item[0].seconds))


def shift_cuts(space: Space, start: tuple[Estimate, Choice]) -> tuple[Estimate, Choice]:
    """`start` with the cuts of the busiest stage shifted while that makes the step faster."""
    best, size = start, len(space.segments.bounds)
    for _ in range(size):
        better = None
        for choice in _shifted(best[1], _busiest(space, best[1])):
            estimate = space.estimate(choice)
            if estimate.seconds < (better or best)[0].seconds * (1 - _MIN_GAIN):
                better = estimate, choice
        if better is None:
            return best
        best = better
    return best


def _shifted(choice: Choice, stage: int) -> Iterator[Choice]:
    """Choices with one cut of `stage` moved by one, two or four bounds."""
    bounds = choice.bounds
    for cut in {stage, stage + 1} - {0, len(bounds) - 1}:
        for step in (-1, 1, -2, 2, -4, 4):
            moved = bounds[cut] + step
            if bounds[cut - 1] < moved < bounds[cut + 1]:
                yield Choice(choice.order, (*bounds[:cut], moved, *bounds[cut + 1 :]))


def _busiest(space: Space, choice: Choice) -> int:
    arrays = space.arrays(choice)
    busy = busy_seconds(arrays)
    by_stage = np.stack(
        [t.sum(axis=0) for t in (busy.stages, busy.uplinks, busy.downlinks, busy.codecs)]
    ).max(axis=0)
    if busy.links.size:
        np.maximum.at(by_stage, arrays.producer, busy.links.max(axis=0))
    return int(by_stage.argmax())


def _orders(space: Space, choice: Choice, random: np.random.Generator) -> Iterator[Neighbour]:
    """Neighbouring orders: first those that change the busiest stage, then all others at random."""
    moves, count, stage = _Moves(choice.order, choice.bounds), len(choice.order), _busiest(space, choice)
    near_busiest = [s for s in (stage, stage + 1, stage - 1) if 0 <= s < count]
    if count > 1:
        yield from map(moves.drop, near_busiest)
    spare = _spare(space, choice, stage, random)
    for device in spare:
        yield from (moves.replace(device, s) for s in near_busiest)
        yield from (moves.insert(device, s) for s in (stage, stage + 1))
    for other in random.permutation(count).tolist():
        if other != stage:
            yield moves.swap(stage, other)
            yield moves.move(stage, other)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if len(pairs) > _MAX_PAIRS:
        pairs = [pairs[int(i)] for i in random.permutation(len(pairs))[:_MAX_PAIRS]]
    rest: list[Callable[[], Neighbour]] = [
        *(partial(moves.drop, s) for s in range(count) if count > 1),
        *(partial(moves.swap if a < b else moves.move, a, b) for a, b in pairs),
        *(partial(moves.move, a, b) for a, b in pairs if a < b),
        *(partial(moves.insert, device, s) for device in spare for s in range(count + 1)),
        *(partial(moves.replace, device, s) for device in spare for s in range(count)),
    ]
    for i in random.permutation(len(rest)).tolist():
        yield rest[i]()


def _spare(space: Space, choice: Choice, stage: int, random: np.random.Generator) -> list[int]:
    """Idle devices to try: all if they are few, else near ones, fast ones and some at random."""
    idle = set(range(space.devices)) - set(choice.order)
    fast = sorted(idle, key=lambda device: (-space.flops[device], device))
    if len(fast) <= _MAX_SPARE:
        return fast
    rates = space.network.rates[choice.order[stage]]
    near = sorted(fast, key=lambda device: -rates[device])[: _MAX_SPARE // 2]
    drawn = random.permutation(fast)[: _MAX_SPARE // 4].tolist()
    return list(dict.fromkeys([*near, *fast[: _MAX_SPARE // 4], *drawn]))


@dataclass(frozen=True)
class _Moves:
    """Neighbours of an order of devices, a stage each, that is cut at `bounds`; no bounds where they are to be searched anew."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]

    def drop(self, s: int) -> Neighbour:
        bound = min(max(s, 1), len(self.order) - 1)
        return (*self.order[:s], *self.order[s + 1 :]), (*self.bounds[:bound], *self.bounds[bound + 1 :])

    def swap(self, a: int, b: int) -> Neighbour:
        new = list(self.order)
        new[a], new[b] = new[b], new[a]
        return tuple(new), self.bounds

    def move(self, a: int, b: int) -> Neighbour:
        rest = (*self.order[:a], *self.order[a + 1 :])
        return (*rest[:b], self.order[a], *rest[b:]), self.bounds

    def insert(self, device: int, s: int) -> Neighbour:
        return (*self.order[:s], device, *self.order[s:]), ()

    def replace(self, device: int, s: int) -> Neighbour:
        return (*self.order[:s], device, *self.order[s + 1 :]), self.bounds
