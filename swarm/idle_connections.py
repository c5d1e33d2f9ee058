"""Which idle connections to close. Pure.

p2pd keeps silent connections, at 40 KiB of memory and an open file each. Peer ids are free, so the limits are on such peers of a public
network, and in all. A peer with a stream is busy and does not count: streams have limits of their own. Peers without recent use, by a
stream or a call, are closed first, the oldest of them first: an honest newcomer sends something at once. A peer that is needed again
is dialled again.
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
    """When each peer was last used, by its id in bytes, as in p2pd. `clock`: monotonic seconds."""

    def __init__(
        self, limits: ConnectionLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or ConnectionLimits()
        self._clock = clock
        self._used: dict[bytes, float] = {}
        self._since: dict[bytes, float] = {}  # when connected peers were first seen

    def use(self, peer: bytes) -> None:
        """Note that a stream or call with the peer was opened or ended."""
        self._used[peer] = self._clock()

    def surplus(self, connections: Iterable[tuple[bytes, str | None]], busy: Container[bytes]) -> list[bytes]:
        """The peers to disconnect. `connections`: peer and public network (`fusion.swarm.subnets`) of each connection; `busy`: the peers
        with a stream."""
        limits, now = self._limits, self._clock()
        count: Counter[bytes] = Counter()
        subnets: dict[bytes, str] = {}
        for peer, subnet in connections:
            count[peer] += 1
            if subnet is not None:
                subnets[peer] = subnet
        self._used = {peer: at for peer, at in self._used.items() if now - at < limits.recent_seconds}
        self._since = {peer: self._since.get(peer, now) for peer in count}
        closing = [peer for peer, number in count.items() if number > limits.per_peer]
        idle = [peer for peer, number in count.items() if number <= limits.per_peer and peer not in busy]
        idle.sort(
            key=lambda peer: (peer in self._used, self._used.get(peer, self._since[peer])), reverse=True
        )
        kept, kept_of = 0, Counter[str]()
        for peer in idle:
            subnet, number = subnets.get(peer), count[peer]
            crowded = subnet is not None and kept_of[subnet] + number > limits.per_subnet
            if crowded or kept + number > limits.in_all:
                closing.append(peer)
                continue
            kept += number
            if subnet is not None:
                kept_of[subnet] += number
        return closing
