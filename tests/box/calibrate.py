"""Compares configured and measured round trips and TCP goodput of a box, at rates and delays that a swarm has."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from box.measure import goodput_mbps, rtt_ms
from box.network import Box
from box.network_file import read_network
from box.spec import Host, NetworkSpec

RATES_MBPS = (8.0, 20.0, 80.0, 300.0, 1000.0)
ROUND_TRIPS_MS = (1.0, 20.0, 60.0)
RTT_SLACK_MS, RTT_SLACK_SHARE = 1.0, 0.05
LEAST_SHARE = 0.8
# A faster link is as fast as the router can, which the table shows and nobody holds it to.
LIMIT_MBPS = 1000.0


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    rtt_ms: float
    mbps: float
    measured_rtt_ms: float
    measured_mbps: float

    @property
    def passed(self) -> bool:
        rtt = abs(self.measured_rtt_ms - self.rtt_ms) <= RTT_SLACK_MS + RTT_SLACK_SHARE * self.rtt_ms
        share = self.measured_mbps / self.mbps
        return rtt and (LEAST_SHARE <= share <= 1.0 or self.mbps > LIMIT_MBPS)

    def text(self) -> str:
        return (
            f"{self.what:24} {self.rtt_ms:8.1f} {self.measured_rtt_ms:8.2f} {self.mbps:9.0f} "
            f"{self.measured_mbps:9.1f} {self.measured_mbps / self.mbps:7.0%}  {'' if self.passed else 'OUT'}"
        )


HEADER = f"{'':24} {'RTT ms':>8} {'found':>8} {'Mbps':>9} {'goodput':>9} {'share':>7}"


def grid(seconds: float, rates: Sequence[float], round_trips: Sequence[float]) -> Iterator[Row]:
    """Measure two hosts at each rate with each round trip, the same both ways."""
    with Box(NetworkSpec(hosts=(Host(name="a"), Host(name="b")))) as box:
        for rate in rates:
            for asked in round_trips:
                box.set_pair("a", "b", rate_mbps=rate, delay_ms=asked / 2)
                yield _row(box, "a", "b", seconds)


def network(path: Path, seconds: float) -> Iterator[Row]:
    """Measure each ordered pair of a swarm file's network, one at a time."""
    with Box(read_network(path)) as box:
        for a in box.hosts:
            for b in box.hosts:
                if a != b:
                    yield _row(box, a, b, seconds)


def _row(box: Box, a: str, b: str, seconds: float) -> Row:
    there, back = box.link(a, b), box.link(b, a)
    return Row(
        what=f"{a} > {b}",
        rtt_ms=there.delay_ms + back.delay_ms,
        mbps=min(there.rate_mbps, box.host(a).up_mbps, box.host(b).down_mbps),
        measured_rtt_ms=rtt_ms(box, a, b),
        measured_mbps=goodput_mbps(box, [(a, b)], seconds),
    )


def show(rows: Iterator[Row]) -> bool:
    """Print rows as they arrive. Returns whether all passed."""
    print(HEADER)
    passed = True
    for row in rows:
        print(row.text(), flush=True)
        passed = passed and row.passed
    print("all as asked" if passed else "OUT: not as asked", file=sys.stderr)
    return passed
