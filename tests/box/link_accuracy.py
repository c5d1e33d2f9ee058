"""Compares the links that peers in a box have measured, so many seconds after the last one joined, with the real links."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from box.network import Box
from box.network_file import read_network

from fusion.cli.local.fleet import Fleet, LocalPeer, open_fleet

WATCHED = (sys.executable, str(Path(__file__).with_name("watched_peer.py")))
RATE_SHARE, RTT_MS = 0.2, 2.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    source: str
    target: str
    mbps: float
    rtt_ms: float
    measured_mbps: float | None
    measured_rtt_ms: float | None
    rate: str  # as in `fusion-peer status --links`: measured, at least, estimated, unknown

    @property
    def rate_right(self) -> bool:
        found = self.measured_mbps
        return found is not None and abs(found - self.mbps) <= RATE_SHARE * self.mbps

    @property
    def fast(self) -> bool:
        """Whether the link is so fast that peers report only a lower bound of its rate, which is right."""
        return self.rate == "at least" and (self.measured_mbps or 0.0) <= self.mbps

    @property
    def rtt_right(self) -> bool:
        return self.measured_rtt_ms is not None and abs(self.measured_rtt_ms - self.rtt_ms) <= RTT_MS

    def text(self) -> str:
        found, trip = self.measured_mbps or 0.0, self.measured_rtt_ms or 0.0
        said = "" if self.rate_right else "fast" if self.fast else "OUT"
        late = "" if self.rtt_right else "LATE"
        return (
            f"{self.source + ' > ' + self.target:24} {self.mbps:9.0f} {found:9.1f} {found / self.mbps:7.0%} "
            f"{self.rate:9} {self.rtt_ms:7.1f} {trip:7.2f}  {said} {late}"
        )


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    pairs: tuple[Pair, ...]
    probe_bytes: tuple[float, ...]  # that each peer sent until then
    load: float  # of the machine, over the last minute

    @property
    def passed(self) -> bool:
        return all((pair.rate_right or pair.fast) and pair.rtt_right for pair in self.pairs)

    def text(self) -> str:
        count = len(self.pairs)
        right, fast = (
            sum(p.rate_right for p in self.pairs),
            sum(p.fast and not p.rate_right for p in self.pairs),
        )
        trips = sum(pair.rtt_right for pair in self.pairs)
        cost = [f"{each / 1e6:.1f}" for each in self.probe_bytes]
        return (
            f"{right} of {count} rates within {RATE_SHARE:.0%}, {fast} more known to be fast; "
            f"{trips} round trips within {RTT_MS:g} ms; MB of probes {' '.join(cost)}; load {self.load:.1f}"
        )


class Watch:
    """The last line that each peer printed about its links."""

    def __init__(self) -> None:
        self.last: dict[str, dict[str, Any]] = {}

    def of(self, host: str) -> Any:
        def hear(record: dict[str, Any]) -> None:
            if record.get("event") == "links":
                self.last[host] = record

        return hear


async def start_all(box: Box, fleet: Fleet, watch: Watch) -> dict[str, LocalPeer]:
    """A peer on every host; the first one is the others' bootstrap peer."""

    async def start(host: str, bootstrap: Sequence[str]) -> LocalPeer:
        return await fleet.start_peer(
            host, bootstrap=bootstrap, listen=box.listen(host), prefix=box.prefix(host), command=WATCHED,
            on_record=watch.of(host),
        )  # fmt: skip

    first, *others = box.hosts
    way_in = await start(first, ())
    joined = await asyncio.gather(*(start(host, [way_in.address]) for host in others))
    return dict(zip(box.hosts, (way_in, *joined), strict=True))


async def accuracy(box: Box, fleet: Fleet, peers: dict[str, LocalPeer], watch: Watch) -> Accuracy:
    """Every ordered pair, as its record in the directory describes it now."""
    host = box.hosts[0]
    said = await fleet.run(
        "status", "status", "--links", "--home", str(fleet.root / "asker"), "--peer", peers[host].address,
        prefix=box.prefix(host),
    )  # fmt: skip
    names = {peer.peer_id: host for host, peer in peers.items()}
    known = {
        (names[pair["from"]], names[pair["to"]]): pair
        for pair in said[-1]["links"]
        if {pair["from"], pair["to"]} <= names.keys()
    }
    return Accuracy(
        pairs=tuple(_pair(box, a, b, known.get((a, b), {})) for a, b in permutations(box.hosts, 2)),
        probe_bytes=tuple(watch.last.get(host, {}).get("probe_bytes", 0.0) for host in box.hosts),
        load=os.getloadavg()[0],
    )


def true_mbps(box: Box, a: str, b: str) -> float:
    return min(box.link(a, b).rate_mbps, box.host(a).up_mbps, box.host(b).down_mbps)


def _pair(box: Box, a: str, b: str, known: dict[str, Any]) -> Pair:
    return Pair(
        source=a,
        target=b,
        mbps=true_mbps(box, a, b),
        rtt_ms=box.link(a, b).delay_ms + box.link(b, a).delay_ms,
        measured_mbps=known.get("mbps"),
        measured_rtt_ms=known.get("rtt_ms"),
        rate=known.get("rate", "unknown"),
    )


async def show(path: Path, seconds: float) -> Accuracy:
    """Print a table for a swarm file's network."""
    with Box(read_network(path)) as box:
        async with open_fleet("fleet-") as fleet:
            watch = Watch()
            peers = await start_all(box, fleet, watch)
            await asyncio.sleep(seconds)
            found = await accuracy(box, fleet, peers, watch)
    print(f"{'':24} {'Mbps':>9} {'found':>9} {'share':>7} {'':9} {'RTT ms':>7} {'found':>7}")
    for pair in found.pairs:
        print(pair.text())
    print(found.text(), flush=True)
    return found
