"""Which connections are given up, of those that nobody uses. Pure.

p2pd keeps whoever connects and says nothing, at 40 KiB of memory and an open file each. Peer ids are free, so what is limited
is how many such peers there are of a public network, and in all. A peer with a stream of ours is busy and counts for nothing here:
streams have limits of their own. Whoever has been of use lately, by a stream or a call, is given up after those who never were, and
of these the newest stay: an honest newcomer says something at once. One that is wanted again is dialled again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    per_peer: int = 8  # even of a busy one; two are made where both ends dial at once
    per_subnet: int = 128  # idle, of a public /24 or /48
    in_all: int = 512  # idle; of private networks and of this machine nothing else limits them
    recent_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")


class Connections:
    """When each peer was of use, by its id in bytes, as p2pd has it. `clock` gives seconds that only rise."""

    def __init__(
        self, limits: ConnectionLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or ConnectionLimits()
        self._clock = clock
        self._used: dict[bytes, float] = {}
        self._since: dict[bytes, float] = {}  # when those that are connected were first seen to be

    def use(self, peer: bytes) -> None:
        """The peer opened or ended a stream or a call, or we one to it."""
        self._used[peer] = self._clock()

    def surplus(self, connections: Iterable[tuple[bytes, str | None]], busy: Container[bytes]) -> list[bytes]:
        """The peers to hang up on. `connections`: peer and public network (`fusion.swarm.subnets`) of each that there is; `busy`: the
        peers with a stream."""
        limits, now = self._limits, self._clock()
        count: Counter[bytes] = Counter()
        subnets: dict[bytes, str] = {}
        for peer, subnet in connections:
            count[peer] += 1
            if subnet is not None:
                subnets[peer] = subnet
        self._used = {peer: at for peer, at in self._used.items() if now - at < limits.recent_seconds}
        self._since = {peer: self._since.get(peer, now) for peer in count}
        given_up = [peer for peer, number in count.items() if number > limits.per_peer]
        idle = [peer for peer, number in count.items() if number <= limits.per_peer and peer not in busy]
        idle.sort(
            key=lambda peer: (peer in self._used, self._used.get(peer, self._since[peer])), reverse=True
        )
        kept, kept_of = 0, Counter[str]()
        for peer in idle:
            subnet, number = subnets.get(peer), count[peer]
            crowded = subnet is not None and kept_of[subnet] + number > limits.per_subnet
            if crowded or kept + number > limits.in_all:
                given_up.append(peer)
                continue
            kept += number
            if subnet is not None:
                kept_of[subnet] += number
        return given_up
