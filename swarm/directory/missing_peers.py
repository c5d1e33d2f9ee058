"""Peers that are no longer listed, and when to dial each of them again. Pure: seconds in, peers out.

A peer whose record expired may be dead, or on the other side of a partition, where we are missing. The first of the two that
dials after the partition heals makes the swarm one again, so both keep trying: every few seconds at first.

Only peers that have answered us are dialled. Anybody may list any number of peers with another's addresses: every peer of the
swarm would dial that one for an hour, and they would crowd out real ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.transport import PeerId


@dataclass(frozen=True, kw_only=True)
class MissingPeersConfig:
    first_seconds: float = 2.0  # between two tries at first
    share: float = 0.1  # of the time it has been missing, between two tries later
    forget_seconds: float = 3600.0
    peers: int = 256

    def __post_init__(self) -> None:
        for name in ("first_seconds", "share", "forget_seconds", "peers"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True)
class Missing:
    addresses: tuple[str, ...]
    since: float
    tried_at: float


class MissingPeers:
    """Call `update` with every new list of the peers; `due` gives those to dial now."""

    def __init__(self, us: PeerId, config: MissingPeersConfig | None = None) -> None:
        self._us = us
        self._config = config or MissingPeersConfig()
        self._listed: dict[PeerId, tuple[str, ...]] = {}
        self._met: set[PeerId] = set()  # the listed that have answered us
        self._missing: dict[PeerId, Missing] = {}

    def update(self, records: Iterable[PeerRecord], neighbours: Iterable[PeerId], now: float) -> None:
        """`records`: the peers listed now; `neighbours`: those that answer us; `now`: seconds of any clock."""
        listed = {r.peer: r.addresses for r in records if r.role == "peer" and r.peer != self._us}
        for peer in listed:
            self._missing.pop(peer, None)
        for peer in self._met - listed.keys():
            if addresses := self._listed[peer]:
                self._missing[peer] = Missing(addresses, now, float("-inf"))
        self._met = listed.keys() & {*self._met, *neighbours}
        self._listed = listed
        while len(self._missing) > self._config.peers:
            del self._missing[next(iter(self._missing))]  # the one missing longest

    def due(self, now: float) -> dict[PeerId, tuple[str, ...]]:
        """The missing peers to dial now, with their last addresses; each counts as tried."""
        found = {}
        for peer, missing in list(self._missing.items()):
            absent = now - missing.since
            if absent > self._config.forget_seconds:
                del self._missing[peer]
            elif now - missing.tried_at >= max(self._config.first_seconds, self._config.share * absent):
                self._missing[peer] = Missing(missing.addresses, missing.since, now)
                found[peer] = missing.addresses
        return found

    def answered(self, peer: PeerId) -> None:
        """The peer answered: it is missing no longer, until it has been listed again and expired."""
        self._missing.pop(peer, None)
