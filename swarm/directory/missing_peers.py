"""Who was in the swarm and is no longer listed, and when to look for each of them again. Pure: seconds in, peers out.

A peer whose record ran out may be dead, or on the other side of a cut link, where it says the same of us. Whoever of
the two dials first when the link is back makes the swarm one again, so both keep trying: every few seconds at first.

Only whoever has answered us is looked for. Anybody may list any number of peers, at addresses that are another's: looked for
they would make every peer of the swarm dial that one for an hour, and crowd out those who were there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.transport import PeerId


@dataclass(frozen=True, kw_only=True)
class MissingPeersConfig:
    first_seconds: float = 2.0  # between two tries, while the peer is not missing for long
    share: float = 0.1  # and later, of the time for which it is missing
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
    """`call` it with every new list of the peers; `due` gives those to look for now."""

    def __init__(self, us: PeerId, config: MissingPeersConfig | None = None) -> None:
        self._us = us
        self._config = config or MissingPeersConfig()
        self._listed: dict[PeerId, tuple[str, ...]] = {}
        self._met: set[PeerId] = set()  # of the listed, who have answered us
        self._missing: dict[PeerId, Missing] = {}

    def update(self, records: Iterable[PeerRecord], neighbours: Iterable[PeerId], now: float) -> None:
        """The directory lists these peers now, and these answer us; `now` is any clock's seconds."""
        listed = {r.peer: r.addresses for r in records if r.role == "peer" and r.peer != self._us}
        for peer in listed:
            self._missing.pop(peer, None)
        for peer in self._met - listed.keys():
            if addresses := self._listed[peer]:
                self._missing[peer] = Missing(addresses, now, float("-inf"))
        self._met = listed.keys() & {*self._met, *neighbours}
        self._listed = listed
        while len(self._missing) > self._config.peers:
            del self._missing[next(iter(self._missing))]  # the one that is missing for longest

    def due(self, now: float) -> dict[PeerId, tuple[str, ...]]:
        """The missing peers to try now, with their last addresses; each counts as tried."""
        found = {}
        for peer, missing in list(self._missing.items()):
            absent = now - missing.since
            if absent > self._config.forget_seconds:
                del self._missing[peer]
            elif now - missing.tried_at >= max(self._config.first_seconds, self._config.share * absent):
                self._missing[peer] = Missing(missing.addresses, missing.since, now)
                found[peer] = missing.addresses
        return found

    def found(self, peer: PeerId) -> None:
        """It answered. If its record does not come back it is missing anew only once it was listed again."""
        self._missing.pop(peer, None)
