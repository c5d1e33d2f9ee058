"""The network of a box: hosts with an uplink and a downlink that all their pairs share, and a link for each ordered pair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

QUEUE_MS = 50.0  # where a file does not say


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host. `queue_ms` is the longest time that a packet waits at each of the host's two shared lines."""

    name: str
    up_mbps: float = math.inf
    down_mbps: float = math.inf
    queue_ms: float = QUEUE_MS

    def __post_init__(self) -> None:
        _check_line(self.name, self.queue_ms, up_mbps=self.up_mbps, down_mbps=self.down_mbps)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a pair. `rate_mbps` counts IP packets, headers included. `loss` is the chance that a packet of MTU size
    or less is lost; 1 cuts the link. A packet that would wait longer than `queue_ms` is dropped."""

    rate_mbps: float = math.inf
    delay_ms: float = 0.0
    queue_ms: float = QUEUE_MS
    loss: float = 0.0

    def __post_init__(self) -> None:
        _check_line("a link", self.queue_ms, rate_mbps=self.rate_mbps)
        if not 0.0 <= self.delay_ms < math.inf:
            raise ValueError(f"delay_ms is {self.delay_ms}; it is 0 or more milliseconds")
        if not 0.0 <= self.loss <= 1.0:
            raise ValueError(f"loss is {self.loss}; it is a share from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """A network. Pairs without a link of their own have `default` both ways. `seed` decides which packets are lost."""

    hosts: tuple[Host, ...]
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    default: Link = field(default_factory=Link)
    seed: int = 0

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if len(set(names)) != len(names):
            raise ValueError(f"hosts are {names}; each name stands for one")
        for pair in self.links:
            if not set(pair) <= set(names) or pair[0] == pair[1]:
                raise ValueError(f"a link is given for {pair}; both are hosts, two of them")

    def link(self, source: str, target: str) -> Link:
        return self.links.get((source, target), self.default)


def _check_line(what: str, queue_ms: float, **rates: float) -> None:
    for name, rate in rates.items():
        if not rate > 0.0:
            raise ValueError(f"{name} of {what} is {rate}; it is above 0 (inf: no limit)")
    if not 0.0 < queue_ms < math.inf:
        raise ValueError(f"queue_ms of {what} is {queue_ms}; it is above 0")
