"""What the swarm's records say of the link between any two peers. Pure: records in, numbers out.

A pair that was measured has its own numbers, and where both ends measured it those of the end that saw less of it: what
one peer says of itself makes no link better than its partner found it. For one that was not the round trip comes from network coordinates, the
rate from the sender's uplink and the receiver's downlink, each of which carries what its owner measured over it; where
not even those are known there is no number.
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
AGREEING = 3.0  # times: how far apart two honest ends may see one round trip, of which one has waited for a busy machine


@dataclass(frozen=True, kw_only=True)
class PairLink:
    """From one peer to another. None: nobody knows."""

    rtt_seconds: float | None
    bytes_per_second: float | None
    rtt_measured: bool
    rate_measured: bool
    age_seconds: float | None = None  # of what was measured, when its record was made

    @property
    def at_least(self) -> bool:
        """Whether the rate is a lower bound: nobody looks closer at a link that is so fast."""
        return self.rate_measured and self.bytes_per_second is not None and self.bytes_per_second >= FAST

    @property
    def measured(self) -> bool:
        """Round trip and rate; otherwise part of it is an estimate."""
        return self.rtt_measured and self.rate_measured


@dataclass(frozen=True)
class LinkView:
    """`up` and `down` in bytes per second, of those peers of whom they are known: all links of a peer share them."""

    up: Mapping[PeerId, float] = field(default_factory=dict)
    down: Mapping[PeerId, float] = field(default_factory=dict)
    coordinates: Mapping[PeerId, Coordinate] = field(default_factory=dict)
    pairs: Mapping[tuple[PeerId, PeerId], Pair] = field(default_factory=dict)

    def link(self, one: PeerId, two: PeerId) -> PairLink:
        """What goes from `one` to `two`."""
        there, back = self.pairs.get((one, two)), self.pairs.get((two, one))
        trips = [pair.rtt_ms for pair in (there, back) if pair is not None and pair.rtt_ms > 0]
        rtt = _trip(trips)
        if rtt is None and one in self.coordinates and two in self.coordinates:
            rtt = distance_ms(self.coordinates[one], self.coordinates[two])
        said = (0.0 if there is None else there.mbps, 0.0 if back is None else back.into_mbps)
        rate = min((mbps * BYTES_PER_MBIT for mbps in said if mbps > 0), default=None)
        measured = rate is not None
        if rate is None:
            out, into = self._fastest
            ends = ((self.up.get(one), out.get(one, 0.0)), (self.down.get(two), into.get(two, 0.0)))
            rate = min((max(said, best) for said, best in ends if said is not None), default=None)
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
        """The fastest link from, and to, each peer that it measured itself, in bytes per second. What only the far end says
        does not count: anybody may say it of anybody."""
        out: dict[PeerId, float] = {}
        into: dict[PeerId, float] = {}
        for (one, two), pair in self.pairs.items():
            far = self.pairs.get((two, one))
            for best, ours, theirs in (
                (out, pair.mbps, 0.0 if far is None else far.into_mbps),
                (into, pair.into_mbps, 0.0 if far is None else far.mbps),
            ):
                rate = min(ours, theirs or ours) * BYTES_PER_MBIT
                best[one] = max(best.get(one, 0.0), rate)
        return out, into


def _trip(trips: Sequence[float]) -> float | None:
    """The shorter one of two that agree, as waiting only adds to a round trip; else the longer one."""
    shortest, longest = min(trips, default=None), max(trips, default=None)
    return shortest if shortest is None or longest is None or longest <= AGREEING * shortest else longest


def link_view(peers: Iterable[PeerRecord], links: Iterable[LinkRecord]) -> LinkView:
    """The view that these records give; of two records of one author the last one counts."""
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
