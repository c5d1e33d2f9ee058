"""The link between any two peers, from the swarm's records. Pure: records in, numbers out.

A measured pair has its own numbers; where both ends measured it, the lower rate, so that no peer's claim makes a link better than
the other end found it. For a pair that was not measured, the round trip comes from network coordinates, and the rate is the
lower of the sender's uplink and the receiver's downlink, as their owners measured them; where these are unknown, so is the
rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fusion.swarm.coordinates import Coordinate, distance_ms
from fusion.swarm.directory.records import LinkRecord, Pair, PeerRecord
from fusion.swarm.links.packet_trains import FAST
from fusion.swarm.transport import PeerId

BYTES_PER_MBIT = 1e6 / 8
AGREEING = 3.0  # factor by which two honest ends' round trips may differ, where one waited for a busy machine


@dataclass(frozen=True, kw_only=True)
class PairLink:
    """The link from one peer to another. None: not known."""

    rtt_seconds: float | None
    bytes_per_second: float | None
    rtt_measured: bool
    rate_measured: bool
    age_seconds: float | None = None  # of the measurement, when its record was made

    @property
    def at_least(self) -> bool:
        """Whether the rate is only a lower bound: links from FAST on are not measured more exactly."""
        return self.rate_measured and self.bytes_per_second is not None and self.bytes_per_second >= FAST

    @property
    def measured(self) -> bool:
        """Whether both round trip and rate were measured, not estimated."""
        return self.rtt_measured and self.rate_measured


@dataclass(frozen=True)
class LinkView:
    """`up` and `down`: the lines of peers, where known, in bytes per second; all links of a peer share them."""

    up: Mapping[PeerId, float] = field(default_factory=dict)
    down: Mapping[PeerId, float] = field(default_factory=dict)
    coordinates: Mapping[PeerId, Coordinate] = field(default_factory=dict)
    pairs: Mapping[tuple[PeerId, PeerId], Pair] = field(default_factory=dict)

    def link(self, one: PeerId, two: PeerId) -> PairLink:
        """The link from `one` to `two`."""
        there, back = self.pairs.get((one, two)), self.pairs.get((two, one))
        trips = [pair.rtt_ms for pair in (there, back) if pair is not None and pair.rtt_ms > 0]
        rtt = _trip(trips)
        if rtt is None and one in self.coordinates and two in self.coordinates:
            rtt = distance_ms(self.coordinates[one], self.coordinates[two])
        rates = (0.0 if there is None else there.mbps, 0.0 if back is None else back.into_mbps)
        rate = min((mbps * BYTES_PER_MBIT for mbps in rates if mbps > 0), default=None)
        measured = rate is not None
        if rate is None:
            out, into = self._fastest
            ends = ((self.up.get(one), out.get(one, 0.0)), (self.down.get(two), into.get(two, 0.0)))
            rate = min((max(line, best) for line, best in ends if line is not None), default=None)
        known = there or back
        return PairLink(
            rtt_seconds=None if rtt is None else rtt / 1e3,
            bytes_per_second=rate,
            rtt_measured=bool(trips),
            rate_measured=measured,
            age_seconds=None if known is None else known.age_seconds,
        )

    @cached_property
    def _fastest(self) -> tuple[Mapping[PeerId, float], Mapping[PeerId, float]]:
        """The fastest link from, and to, each peer that it measured itself, in bytes per second. Rates that only the other end reports do
        not count: anybody may report any."""
        out: dict[PeerId, float] = {}
        into: dict[PeerId, float] = {}
        for (one, two), pair in self.pairs.items():
            far = self.pairs.get((two, one))
            for best, own, other in (
                (out, pair.mbps, 0.0 if far is None else far.into_mbps),
                (into, pair.into_mbps, 0.0 if far is None else far.mbps),
            ):
                rate = min(own, other or own) * BYTES_PER_MBIT
                best[one] = max(best.get(one, 0.0), rate)
        return out, into


def _trip(trips: Sequence[float]) -> float | None:
    """The shorter of two round trips that agree, since delays only add; else the longer one."""
    shortest, longest = min(trips, default=None), max(trips, default=None)
    return shortest if shortest is None or longest is None or longest <= AGREEING * shortest else longest


def link_view(peers: Iterable[PeerRecord], links: Iterable[LinkRecord]) -> LinkView:
    """The view of these records; of two records of one author the last one counts."""
    known = tuple(peers)
    return LinkView(
        up={peer.peer: peer.up_mbps * BYTES_PER_MBIT for peer in known if peer.up_mbps > 0},
        down={peer.peer: peer.down_mbps * BYTES_PER_MBIT for peer in known if peer.down_mbps > 0},
        coordinates={
            peer.peer: Coordinate.from_parts(peer.coordinate, peer.coordinate_error)
            for peer in known
            if peer.coordinate
        },
        pairs={(record.peer, pair.peer): pair for record in links for pair in record.pairs},
    )
