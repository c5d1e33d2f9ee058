"""Chooses the holder of each stage for a request: the cheapest route. Pure.

A route costs, for each stage, compute + queue, and for each
link on the way alpha + bytes * beta: shortest path over one layer of holders per stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion.swarm.transport import PeerId


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A peer that can run the stage for us."""

    peer: PeerId
    compute_seconds: float  # for the request's microbatch or token
    queue_seconds: float = 0.0  # before its turn comes

    def __post_init__(self) -> None:
        if not (self.compute_seconds >= 0 and self.queue_seconds >= 0):
            raise ValueError("compute_seconds and queue_seconds must not be below 0")


@dataclass(frozen=True)
class LinkTime:
    """The one-way cost of a link: `alpha_seconds + bytes * seconds_per_byte`."""

    alpha_seconds: float
    seconds_per_byte: float


LinkCost = Callable[[PeerId, PeerId], LinkTime]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The bytes over the links of a route: `hop_bytes[s]` from stage s to s + 1; with `start`, `start_bytes` from there to the first
    stage and `answer_bytes` from the last stage back to it; with `ring`, `ring_bytes` from the last stage to the first."""

    hop_bytes: tuple[float, ...]
    start: PeerId | None = None
    start_bytes: float = 0.0
    answer_bytes: float = 0.0
    ring: bool = False
    ring_bytes: float = 0.0


@dataclass(frozen=True)
class Route:
    peers: tuple[PeerId, ...]  # one per stage
    seconds: float


def cheapest(stages: Sequence[Sequence[Holder]], demand: Demand, link: LinkCost) -> Route:
    """The cheapest route; of equal ones that through the holders listed first. Raises ValueError where a stage has none.

    O(stages * holders^2), times the holders of the first stage where the route is a ring.
    """
    if not stages or not all(stages):
        raise ValueError("every stage needs a holder")
    if len(demand.hop_bytes) != len(stages) - 1:
        raise ValueError(
            f"hop_bytes has one entry less than the {len(stages)} stages, not {len(demand.hop_bytes)}"
        )
    firsts = [[holder] for holder in stages[0]] if demand.ring else [list(stages[0])]
    best: Route | None = None
    for first in firsts:
        found = _path([first, *stages[1:]], demand, link)
        if best is None or found.seconds < best.seconds:
            best = found
    assert best is not None
    return best


def seconds(route: Sequence[Holder], demand: Demand, link: LinkCost) -> float:
    """The cost of one given route."""
    return cheapest([[holder] for holder in route], demand, link).seconds


def _path(layers: Sequence[Sequence[Holder]], demand: Demand, link: LinkCost) -> Route:
    """Shortest path through the layers. For a ring the first layer is one holder."""

    def cost(one: PeerId, two: PeerId, size: float) -> float:
        if one == two:
            return 0.0
        hop = link(one, two)
        return hop.alpha_seconds + size * hop.seconds_per_byte

    ways: list[tuple[float, tuple[PeerId, ...]]] = []
    for holder in layers[0]:
        begin = 0.0 if demand.start is None else cost(demand.start, holder.peer, demand.start_bytes)
        ways.append((begin + holder.compute_seconds + holder.queue_seconds, (holder.peer,)))
    for layer, size in zip(layers[1:], demand.hop_bytes, strict=True):
        onward = []
        for holder in layer:
            best, path = math.inf, ways[0][1]
            for spent, way in ways:
                total = spent + cost(way[-1], holder.peer, size)
                if total < best:
                    best, path = total, way
            onward.append((best + holder.compute_seconds + holder.queue_seconds, (*path, holder.peer)))
        ways = onward
    closed = []
    for spent, way in ways:
        if demand.start is not None:
            spent += cost(way[-1], demand.start, demand.answer_bytes)
        if demand.ring:
            spent += cost(way[-1], way[0], demand.ring_bytes)
        closed.append((spent, way))
    total, peers = min(closed, key=lambda entry: entry[0])
    return Route(peers, total)
