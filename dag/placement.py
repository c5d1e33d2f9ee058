"""Which peer runs which stage: contiguous segments of the DAG by min-max dynamic programming over device speed, memory
and link cost, for each order of the devices that is tried.

The predicted time is that of a synchronous pipeline, in which the slowest stage or link sets the pace (FusionLLM, arXiv
2410.12707): every stage and link once, then the slowest once for each further microbatch. `orders` is the seat of
OP-Fence, which will choose orders by clusters of bandwidth; until then few devices are tried in every order and many
in a handful.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
import numpy.typing as npt

from fusion.dag.cuts import candidate_cuts
from fusion.dag.errors import PlacementError
from fusion.dag.ir import Graph
from fusion.dag.schedule import in_flight
from fusion.dag.segments import Segments, measure

Matrix = npt.NDArray[np.float64]
Links = Mapping[tuple[str, str], "Link"]

CANDIDATES = 128  # cuts that are considered
_EVERY_ORDER = 5  # devices up to which every order is tried
# Times the shortest bottleneck there can be: how uneven stages may get to save time on links.
_SLACK = (1.0, 1.005, 1.01, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, np.inf)
_FOREVER = 1e18  # seconds: a segment that does not fit takes longer
_BETTER = 1e-3  # an order, or one more stage, is worth it if it is faster by this share


@dataclass(frozen=True, kw_only=True)
class Device:
    """`flops_per_second` is what a peer reaches, not its peak; `memory_bytes_per_second` paces what is not arithmetic."""

    peer: str
    flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float = 8e9

    def __post_init__(self) -> None:
        if not (self.flops_per_second > 0 and self.memory_bytes_per_second > 0 and self.memory_bytes >= 0):
            raise ValueError(f"device {self.peer}: speeds must be above zero and memory not below it")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Time to send n bytes: alpha_seconds + n / bytes_per_second."""

    alpha_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (self.alpha_seconds >= 0 and self.bytes_per_second > 0):
            raise ValueError("link: alpha_seconds must not be below zero, and bytes_per_second above it")


# For a pair that nothing is known of: a home uplink.
UNKNOWN_LINK = Link(alpha_seconds=0.02, bytes_per_second=1.25e6)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`owners[i]` runs stage i of `split(graph, cuts)`. Seconds are predicted: of a step (training) or of running the
    sequence once (serving), and of each stage alone for one microbatch, its share of the optimizer's work included."""

    cuts: tuple[int, ...]
    owners: tuple[str, ...]
    predicted_seconds: float
    stage_seconds: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]  # forward over each cut, for one microbatch

    @property
    def bottleneck(self) -> int:
        """The stage that takes longest."""
        return max(range(len(self.owners)), key=lambda i: self.stage_seconds[i])


def place(
    graph: Graph,
    devices: Sequence[Device],
    links: Links,
    sizes: Mapping[str, int],
    microbatches: int,
    stages: int | None = None,
    training: bool = True,
) -> Placement:
    """The fastest placement found, of exactly `stages` stages on as many devices, or, with None, of as many as help.

    `links` by (from, to); a pair that is missing counts as UNKNOWN_LINK. `sizes` are those of one microbatch.
    PlacementError if there are too few devices or cuts, or the model does not fit their memory.
    """
    if microbatches < 1:
        raise PlacementError(f"microbatches must be at least 1, not {microbatches}")
    segments = measure(graph, candidate_cuts(graph, sizes, CANDIDATES), sizes, training)
    most = min(len(devices), len(segments.bounds) - 1)
    if stages is not None and not 1 <= stages <= most:
        raise PlacementError(
            f"{stages} stages were asked for: there are {len(devices)} peers, and the model can be cut into "
            f"{len(segments.bounds) - 1}"
        )
    if not devices:
        raise PlacementError("there is no peer to place the model on")
    best: Placement | None = None
    for count in (stages,) if stages is not None else _counts(most):
        for order in orders(devices, links, count):
            found = _fill(segments, order, links, microbatches, training)
            if found and (not best or found.predicted_seconds < best.predicted_seconds * (1 - _BETTER)):
                best = found
    if best is None:
        raise PlacementError(_misfit(segments, devices, stages, microbatches))
    return best


def _counts(most: int) -> list[int]:
    """Numbers of stages to try: all small ones, then ever fewer."""
    found = list(range(1, min(most, 8) + 1))
    while found[-1] < most:
        found.append(min(most, found[-1] * 3 // 2))
    return found


def orders(devices: Sequence[Device], links: Links, count: int) -> Iterator[tuple[Device, ...]]:
    """Sequences of `count` devices worth trying, the same kinds of devices on the same kinds of links only once."""
    if len(devices) <= _EVERY_ORDER:
        tried: Iterator[tuple[Device, ...]] = permutations(devices, count)
    else:
        tried = _by_speed_and_links(devices, links, count)
    seen = set()
    for order in tried:
        ring = zip(order, (*order[1:], order[0]), strict=True)
        alike = (
            tuple((d.flops_per_second, d.memory_bytes, d.memory_bytes_per_second) for d in order),
            tuple((_link(links, a, b), _link(links, b, a)) for a, b in ring),
        )
        if alike not in seen:
            seen.add(alike)
            yield order


def _by_speed_and_links(devices: Sequence[Device], links: Links, count: int) -> Iterator[tuple[Device, ...]]:
    fast = sorted(devices, key=lambda d: (-d.flops_per_second, d.peer))[:count]
    roomy = sorted(devices, key=lambda d: (-d.memory_bytes, -d.flops_per_second, d.peer))[:count]
    for chosen in (fast, roomy):
        yield tuple(chosen)
        for first in chosen[:3]:
            order, left = [first], [d for d in chosen if d is not first]
            while left:
                # The nearest neighbour next: bandwidth first, as activations are large.
                here = order[-1]
                order.append(max(left, key=lambda d: (_link(links, here, d).bytes_per_second, d.peer)))
                left.remove(order[-1])
            yield tuple(order)


def _link(links: Links, a: Device, b: Device) -> Link:
    return links.get((a.peer, b.peer), UNKNOWN_LINK)


def _fill(
    segments: Segments, order: Sequence[Device], links: Links, microbatches: int, training: bool
) -> Placement | None:
    """The best cuts for devices in this order; None if the model does not fit them so."""
    held = [in_flight(s, len(order), microbatches) if training else 1 for s in range(len(order))]
    memory = [segments.memory(h) for h in held]
    compute = [segments.seconds(d.flops_per_second, d.memory_bytes_per_second, microbatches) for d in order]
    uplink, hops = _link_seconds(segments, order, links)
    pace = []
    for s, device in enumerate(order):
        # A peer computes and sends at the same time; its uplink carries both passes.
        busy = np.maximum(compute[s], uplink[s][0][:, None] + uplink[s][1][None, :])
        pace.append(np.where(memory[s] <= device.memory_bytes, busy, np.inf))
    slowest, _ = _search(pace, np.maximum)
    if not np.isfinite(slowest):
        return None
    back = 0.0 if training or len(order) == 1 else _link(links, order[-1], order[0]).alpha_seconds
    best: Placement | None = None
    for slack in _SLACK:
        once = [
            np.where(p <= min(slowest * slack, _FOREVER), c + hop[None, :], np.inf)
            for p, c, hop in zip(pace, compute, hops, strict=True)
        ]
        total, bounds = _search(once, np.add)
        at = [(s, a, b) for s, (a, b) in enumerate(pairwise(bounds))]
        seconds = total + (microbatches - 1) * max(float(pace[s][a, b]) for s, a, b in at) + back
        # The first of equals stays: it is the most even.
        if best is None or seconds < best.predicted_seconds * (1 - 1e-9):
            best = Placement(
                cuts=tuple(segments.bounds[b] for b in bounds[1:-1]),
                owners=tuple(d.peer for d in order),
                predicted_seconds=seconds,
                stage_seconds=tuple(float(compute[s][a, b]) for s, a, b in at),
                memory_bytes=tuple(int(memory[s][a, b]) for s, a, b in at),
                sent_bytes=tuple(int(segments.forward_bytes[b]) for b in bounds[1:-1]),
            )
    return best


def _link_seconds(
    segments: Segments, order: Sequence[Device], links: Links
) -> tuple[list[tuple[Matrix, Matrix]], list[Matrix]]:
    """For each stage: how long its uplink is busy, by its first bound (gradients back) and by its last (activations
    on); and how long a microbatch takes over the link after it, there and back, by that bound."""
    nothing = np.zeros(len(segments.bounds))
    uplinks, hops = [], []
    for s, device in enumerate(order):
        back = forth = hop = nothing
        if s > 0:
            back = segments.backward_bytes / _link(links, device, order[s - 1]).bytes_per_second
        if s + 1 < len(order):
            there, again = _link(links, device, order[s + 1]), _link(links, order[s + 1], device)
            forth = segments.forward_bytes / there.bytes_per_second
            hop = there.alpha_seconds + forth
            if segments.training:
                hop = hop + again.alpha_seconds + segments.backward_bytes / again.bytes_per_second
        uplinks.append((back, forth))
        hops.append(hop)
    return uplinks, hops


def _search(costs: Sequence[Matrix], combine: np.ufunc) -> tuple[float, list[int]]:
    """Bounds b0 = 0 < b1 < ... = last that minimise costs[0][b0, b1] combined with costs[1][b1, b2] and so on."""
    size = len(costs[0])
    so_far = np.full(size, np.inf)
    so_far[0] = 0.0
    choices = []
    for cost in costs:
        whole = combine(
            so_far[:, None], np.where(np.triu(np.ones((size, size), dtype=bool), 1), cost, np.inf)
        )
        choices.append(np.argmin(whole, axis=0))
        so_far = np.min(whole, axis=0)
    bounds = [size - 1]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    return float(so_far[-1]), bounds[::-1]


def _misfit(segments: Segments, devices: Sequence[Device], stages: int | None, microbatches: int) -> str:
    gib = 1 << 30
    needs = float(segments.memory(1)[0, -1]) / gib
    offered = sorted((d.memory_bytes / gib for d in devices), reverse=True)
    where = f"in {stages} stages " if stages else ""
    listed = ", ".join(f"{m:.2f}" for m in offered[:8])
    return (
        f"the model does not fit {where}with {microbatches} microbatches: it needs at least {needs:.2f} GiB, and "
        f"{len(devices)} peers offer {listed} GiB"
    )
