"""The devices of a swarm and the links between them, as numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from fusion.dag.placement.machine import SEPARATE_MACHINE, Machine
from fusion.dag.placement.speeds import Speeds

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Device:
    """`flops_per_second` is what a peer reaches, not its peak; `memory_bytes_per_second` bounds memory-bound operators. `measured`
    speeds replace both. `up_` and `down_bytes_per_second` are its line's: all that it sends, or receives, shares them."""

    peer: str
    flops_per_second: float
    memory_bytes: int
    memory_bytes_per_second: float = 8e9
    up_bytes_per_second: float = inf
    down_bytes_per_second: float = inf
    measured: Speeds | None = None
    machine: Machine = SEPARATE_MACHINE

    def __post_init__(self) -> None:
        if not (self.flops_per_second > 0 and self.memory_bytes_per_second > 0 and self.memory_bytes >= 0):
            raise ValueError(f"device {self.peer}: speeds must be above zero and memory not below it")
        if not (self.up_bytes_per_second > 0 and self.down_bytes_per_second > 0):
            raise ValueError(f"device {self.peer}: up_ and down_bytes_per_second must be above zero")

    @cached_property
    def speeds(self) -> Speeds:
        return self.measured or Speeds.uniform(self.flops_per_second, self.memory_bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two peers, in the alpha-beta model: n bytes take alpha_seconds + n / bytes_per_second."""

    alpha_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (self.alpha_seconds >= 0 and self.bytes_per_second > 0):
            raise ValueError("link: alpha_seconds must not be below zero, and bytes_per_second above it")


Links = Mapping[tuple[str, str], Link]  # by (from, to)

# Assumed for a pair without a measurement: a home uplink.
UNKNOWN_LINK = Link(alpha_seconds=0.02, bytes_per_second=1.25e6)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A pair without an entry in `links` has UNKNOWN_LINK. ValueError if two devices have one name."""

    devices: tuple[Device, ...]
    links: Links = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.index) != len(self.devices):
            raise ValueError("network: each device needs a name of its own")

    def only(self, peers: Collection[str]) -> Network:
        """The network of these devices alone."""
        return Network(devices=tuple(d for d in self.devices if d.peer in peers), links=self.links)

    def link(self, a: str, b: str) -> Link:
        """The link from a to b, without the limits of their lines."""
        return self.links.get((a, b), UNKNOWN_LINK)

    def rate(self, a: str, b: str) -> float:
        """Bytes a second from a to b while both lines are otherwise idle."""
        up, down = self.device(a).up_bytes_per_second, self.device(b).down_bytes_per_second
        return min(self.link(a, b).bytes_per_second, up, down)

    def device(self, peer: str) -> Device:
        return self.devices[self.index[peer]]

    @cached_property
    def index(self) -> dict[str, int]:
        """The index of each peer in `devices`, and in the rows and columns of the matrices."""
        return {d.peer: i for i, d in enumerate(self.devices)}

    @cached_property
    def machines(self) -> npt.NDArray[np.int64]:
        """(devices,) the machine of each device, by number."""
        names = [d.machine.name for d in self.devices]
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        return np.array([numbers[name] for name in names], dtype=np.int64)

    @cached_property
    def rates(self) -> Matrix:
        """(devices, devices) bytes a second from row to column, as `rate` gives them."""
        up = np.array([d.up_bytes_per_second for d in self.devices])
        down = np.array([d.down_bytes_per_second for d in self.devices])
        rates: Matrix = np.minimum(np.minimum(up[:, None], down[None, :]), self.pair_rates)
        return rates

    @cached_property
    def pair_rates(self) -> Matrix:
        """(devices, devices) bytes a second that the pair's own link allows, from row to column."""
        return self._pairs[1]

    @cached_property
    def alphas(self) -> Matrix:
        """(devices, devices) seconds of latency from row to column."""
        return self._pairs[0]

    @cached_property
    def _pairs(self) -> tuple[Matrix, Matrix]:
        shape = (len(self.devices), len(self.devices))
        alphas = np.full(shape, UNKNOWN_LINK.alpha_seconds)
        rates = np.full(shape, UNKNOWN_LINK.bytes_per_second)
        some = len(self.links) <= len(self.devices) ** 2  # else `links` belongs to a larger network
        pairs = self.links.items() if some else self._own_pairs()
        for (a, b), link in pairs:
            row, column = self.index.get(a), self.index.get(b)
            if row is not None and column is not None:
                alphas[row, column], rates[row, column] = link.alpha_seconds, link.bytes_per_second
        return alphas, rates

    def _own_pairs(self) -> Iterator[tuple[tuple[str, str], Link]]:
        names = [d.peer for d in self.devices]
        return (((a, b), self.link(a, b)) for a in names for b in names if a != b)
