"""The state of a peer's links, one entry for each neighbour, and who the neighbours are. No I/O.

A neighbour is a peer that we exchange payloads with, or one of a few candidates: always the same ones for one peer, and other ones for
each, so that the measurements cover the whole swarm. Candidates must have answered us: anybody may list any number of peers
that do not exist.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fusion.swarm.directory.records import MAX_MBPS, MAX_PAIRS, MAX_RTT_MS, LinkRecord, Pair
from fusion.swarm.links.probes import ProbeLine, ProbeReport
from fusion.swarm.links.view import BYTES_PER_MBIT
from fusion.swarm.streams.link_estimate import FALL, RateEstimate, RttEstimate, bounds
from fusion.swarm.transport import PeerId

TOGETHER_SECONDS = 1.5  # reports no further apart count as simultaneous
INTO_SECONDS = 60.0  # for which our measurement of an incoming link is published
SHARE_OF_BUSY = 0.2  # of the longest transfer's time: shorter ones do not count as sharing a link with it
NOTICED = 1.35  # a rate or round trip that changed by this factor is published at once
LISTED_SECONDS = 60.0  # for which a peer counts as listed, or as one with traffic
# A report of a fall over so many bytes counts as so much transfer.
EVIDENCE_BYTES, EVIDENCE_SECONDS = 128 * 1024, 0.5
PEAK_SECONDS = 10.0
SUM_SECONDS = 3.0  # over which the traffic of all links is summed
WITNESSES = 3  # trains in a row that show that a link to us became slower
PRESS_SECONDS = 3.0  # after a measurement, during which `press` is ignored
DOUBT_SECONDS = 8.0  # after a measurement, during which the fall of another link casts no doubt on it


@dataclass(eq=False)
class Answers:
    """Whether a peer answers our pings, and how fast."""

    rtt: RttEstimate = field(default_factory=RttEstimate)
    count: int = 0
    pinged_at: float = -math.inf
    failures: int = 0  # since the last answer
    muted_until: float = -math.inf

    def succeeded(self, took_seconds: float, now: float, *, quiet: bool) -> None:
        self.count, self.failures = self.count + 1, 0
        self.rtt = self.rtt.updated(now, took_seconds, quiet=quiet)

    def failed(self, now: float, first_seconds: float, longest_seconds: float) -> None:
        """Send it no probes for a while, each time twice as long."""
        self.muted_until = now + min(first_seconds * 2.0**self.failures, longest_seconds)
        self.failures += 1


@dataclass(eq=False)
class Direction:
    """The rate of a link in one direction."""

    estimate: RateEstimate | None = None
    firm_at: float = -math.inf  # when it was last measured, and not only bounded
    stood: float = 0.0  # the rate before it began to fall

    @property
    def bytes_per_second(self) -> float:
        return 0.0 if self.estimate is None else self.estimate.bytes_per_second

    def firm(self, now: float) -> None:
        self.firm_at = now

    def learned(self, estimate: RateEstimate) -> bool:
        """Set the estimate; whether it fell by much."""
        self.estimate = estimate
        before, self.stood = self.stood, held(self.stood, estimate.bytes_per_second)
        return self.stood < before


@dataclass(eq=False)
class Measuring:
    """The progress of measuring the outgoing direction by trains."""

    settled_at: float | None = None  # when it was last measured (not only bounded); None: to be measured
    trains: tuple[float, ...] = ()  # their rates since then
    believed: float = 0.0  # the rate before; 0: unknown
    train_bytes: int = 0  # the length of the next one; 0: unknown
    trained_at: float = -math.inf
    checked_at: float = -math.inf
    pressed: bool = False  # measure it even though there is traffic

    def settle(self, now: float) -> None:
        self.settled_at = self.checked_at = now
        self.trains, self.believed, self.pressed = (), 0.0, False

    def doubt(self, rate: float) -> None:
        if self.settled_at is not None:
            self.settled_at, self.trains, self.train_bytes, self.believed = None, (), 0, rate


@dataclass(eq=False)
class Crossing:
    """Our traffic over the link, and the peer's reports on it."""

    active_at: float = -math.inf  # when more than QUIET_BYTES last crossed, either way
    sent_at: float = -math.inf  # when we last sent them
    sent: tuple[float, float] = (0.0, 0.0)  # bytes per second sent in each of the last two ticks
    train_rates: tuple[float, ...] = ()  # of its last trains to us
    report: tuple[float, ProbeReport] | None = None  # its last, and when
    reporting: bool = False  # a report to it is being sent

    @property
    def sent_bytes_per_second(self) -> float:
        return sum(self.sent) / len(self.sent)

    def add_sent(self, bytes_per_second: float) -> None:
        """Add the rate sent in the last tick."""
        self.sent = (self.sent[1], bytes_per_second)


@dataclass(eq=False)
class Neighbour:
    """Times are of this peer's clock, rates in bytes per second. Each part has one writer: `answers` and `traffic` the monitor, `out` and
    `into` the table, `measuring` the prober; others use the methods."""

    line: ProbeLine
    answers: Answers = field(default_factory=Answers)
    out: Direction = field(default_factory=Direction)  # from us to it, as it reports
    into: Direction = field(default_factory=Direction)  # from it to us
    measuring: Measuring = field(default_factory=Measuring)  # of `out`
    traffic: Crossing = field(default_factory=Crossing)
    published: tuple[float, float] = (0.0, 0.0)  # rate and round trip in our last record

    @property
    def peer(self) -> PeerId:
        return self.line.peer

    @property
    def newest(self) -> tuple[float, float]:
        return self.out.bytes_per_second, self.answers.rtt.seconds or 0.0

    @property
    def news(self) -> bool:
        """Whether our last record is clearly out of date."""
        return any(differ(a, b) for a, b in zip(self.published, self.newest, strict=True))

    def settle(self, now: float) -> None:
        """`out` was measured."""
        self.out.firm(now)
        self.measuring.settle(now)

    def doubt(self) -> None:
        """`out` may be out of date: it has to be measured again."""
        self.measuring.doubt(self.out.bytes_per_second)

    def press(self, now: float) -> None:
        """`out` may be out of date, and there is too little traffic to measure it: use trains."""
        settled_at = self.measuring.settled_at
        if settled_at is None or now - settled_at >= PRESS_SECONDS:
            self.doubt()
            self.measuring.pressed = True

    def measured_by_traffic(self, now: float) -> bool:
        """Whether traffic measures `out` now."""
        report = self.traffic.report
        return report is not None and now - report[0] < TOGETHER_SECONDS

    def pair(self, now: float) -> Pair | None:
        """The link's entry in our record; None while nothing was measured."""
        rate, rtt = self.newest
        if not rate and not rtt:
            return None
        at = self.answers.rtt.at if self.out.estimate is None else self.out.estimate.at
        # A bound, or an old rate, must not make a better link look worse.
        into = self.into.bytes_per_second if now - self.into.firm_at <= INTO_SECONDS else 0.0
        return Pair(
            self.peer,
            rtt_ms=min(1e3 * rtt, MAX_RTT_MS),
            mbps=min(rate / BYTES_PER_MBIT, MAX_MBPS),
            age_seconds=max(0.0, now - at),
            into_mbps=min(into / BYTES_PER_MBIT, MAX_MBPS),
        )


class LinkTable:
    """`candidates`: how many neighbours to keep without traffic."""

    def __init__(self, us: PeerId, candidates: int) -> None:
        self.up, self.down = OwnLine(), OwnLine()
        self._us = us
        self._candidates = candidates
        self._listed: dict[PeerId, float] = {}
        self._answering: set[PeerId] = set()  # of the listed
        self._neighbours: dict[PeerId, Neighbour] = {}
        # Received reports: when, and on how many bytes.
        self._carried: deque[tuple[float, int]] = deque(maxlen=512)

    def meet(self, peer: PeerId, now: float, *, answers: bool = True) -> None:
        """Note that the directory lists the peer now, and whether it `answers` us."""
        if peer != self._us:
            self._listed[peer] = now
            if answers:
                self._answering.add(peer)

    def listed(self, peer: PeerId) -> bool:
        return peer in self._listed

    def find(self, peer: PeerId) -> Neighbour | None:
        return self._neighbours.get(peer)

    def add(self, line: ProbeLine) -> Neighbour:
        neighbour = self._neighbours[line.peer] = Neighbour(line)
        return neighbour

    def every(self) -> tuple[Neighbour, ...]:
        return tuple(self._neighbours.values())

    def wanted(self, now: float) -> list[PeerId]:
        """Who our neighbours should be: peers with traffic, then candidates."""
        active = [n.peer for n in self._neighbours.values() if now - n.traffic.active_at <= LISTED_SECONDS]
        active = [peer for peer in active if peer in self._listed]
        fill = heapq.nsmallest(self._candidates, self._answering, key=lambda peer: tie_break(self._us, peer))
        return list(dict.fromkeys([*active, *fill]))[: max(len(active), self._candidates)][:MAX_PAIRS]

    def forget(self, now: float) -> list[Neighbour]:
        """Drop peers that are no longer listed; returns those that were neighbours."""
        self._listed = {peer: at for peer, at in self._listed.items() if now - at <= LISTED_SECONDS}
        self._answering &= self._listed.keys()
        gone = [
            n
            for n in self._neighbours.values()
            if n.peer not in self._listed and now - n.traffic.active_at > LISTED_SECONDS
        ]
        for neighbour in gone:
            del self._neighbours[neighbour.peer]
        return gone

    def record(self, now: float) -> LinkRecord:
        """Our measurements of links to listed peers: first links that we send over, then those that we receive over, where anybody may
        send to us."""
        listed = (n for n in self._neighbours.values() if n.peer in self._listed)
        ordered = sorted(listed, key=lambda n: (-n.traffic.sent_at, -n.traffic.active_at))
        pairs = [pair for pair in (n.pair(now) for n in ordered) if pair is not None]
        return LinkRecord(peer=self._us, pairs=tuple(pairs[:MAX_PAIRS]))

    def sharers(self, now: float) -> list[ProbeReport]:
        """The current reports on our payloads."""
        return [
            n.traffic.report[1]
            for n in self._neighbours.values()
            if n.traffic.report is not None and now - n.traffic.report[0] < TOGETHER_SECONDS
        ]

    def learned(self, neighbour: Neighbour, estimate: RateEstimate, now: float) -> None:
        """Set the estimate of the link to the neighbour. A large fall casts doubt on the others: it may be due to our uplink."""
        if neighbour.out.learned(estimate):
            self.up.fell(now)
            if now - neighbour.out.firm_at < TOGETHER_SECONDS:
                neighbour.out.firm(now)
            self._doubt_others(neighbour, now)

    def learned_incoming(
        self, neighbour: Neighbour, estimate: RateEstimate, now: float, *, firm: bool
    ) -> None:
        """Set the estimate of the link from the neighbour; `firm`: measured, not only bounded. A large fall casts doubt on the others:
        it may be due to our own line, and lines often fall both ways."""
        if firm:
            neighbour.into.firm(now)
        if neighbour.into.learned(estimate):
            self.down.fell(now)
            self._doubt_others(neighbour, now)

    def _doubt_others(self, fallen: Neighbour, now: float) -> None:
        for other in self._neighbours.values():
            if other is not fallen and now - (other.measuring.settled_at or now) >= DOUBT_SECONDS:
                other.doubt()

    def carried(self, size: int, now: float, span_seconds: float) -> None:
        """Add a report on `size` bytes in the last `span_seconds`. Reports on the same time arrive a little apart, so the total is
        computed for the time before the last report of each."""
        self._carried.append((now, size))
        begin, end = now - SUM_SECONDS * span_seconds, now - span_seconds
        total = 0.0
        for at, reported in self._carried:
            shared = min(at, end) - max(at - span_seconds, begin)
            total += reported * max(0.0, shared) / span_seconds
        self.up.add(now, total / (end - begin))

    def up_mbps(self, now: float) -> float:
        """The highest rate seen over all links together; 0: not known."""
        return self.up.mbps([(n.out.firm_at, n.out.estimate) for n in self._neighbours.values()], now)

    def down_mbps(self, now: float) -> float:
        return self.down.mbps([(n.into.firm_at, n.into.estimate) for n in self._neighbours.values()], now)


class OwnLine:
    """A peer's own line, up or down, which all its links share: at least as fast as the fastest of them, and as their sum in the last
    PEAK_SECONDS. After a link became slower only newer rates count."""

    def __init__(self) -> None:
        self._sums: deque[tuple[float, float]] = deque(maxlen=64)
        self._fell_at = -math.inf

    def add(self, now: float, rate: float) -> None:
        """Add the rate, in bytes per second, that all links together carried a moment ago."""
        self._sums.append((now, rate))

    def fell(self, now: float) -> None:
        """A link became slower, perhaps because of this line."""
        self._fell_at = now

    def mbps(self, estimates: Iterable[tuple[float, RateEstimate | None]], now: float) -> float:
        """The line's rate; `estimates`: of its links, each with `firm_at`."""
        since = max(now - PEAK_SECONDS, self._fell_at + SUM_SECONDS)
        rates = [rate for at, rate in self._sums if at >= since]
        rates += [e.bytes_per_second for at, e in estimates if e is not None and at >= self._fell_at]
        return min(max(rates, default=0.0) / BYTES_PER_MBIT, MAX_MBPS)


def counted(seconds: Iterable[float]) -> int:
    """How many of the transfers with these durations count as sharing a link."""
    times = list(seconds)
    longest = max(times, default=0.0)
    return max(1, sum(each >= SHARE_OF_BUSY * longest for each in times))


def after(
    known: RateEstimate | None, report: ProbeReport, line: float, now: float, others_seconds: float = math.inf
) -> RateEstimate:
    """The estimate updated by a report. `line`: bytes per second of all transfers at that time; `others_seconds`: the total duration of
    the others."""
    alone = 1.0 - others_seconds / report.seconds if report.seconds > 0 else 0.0
    low, high = bounds(report.bytes_per_second, line=line, sure=report.sure, alone=alone)
    if known is None:
        return RateEstimate(bytes_per_second=low, at=now)
    worth = EVIDENCE_SECONDS * min(1.0, report.size / EVIDENCE_BYTES)
    return known.updated(low, high, report.seconds, now, worth)


def corrected(report: ProbeReport, known: float, sent: float) -> ProbeReport:
    """The report, limited by our own count: a link of rate `known` that carried `sent` a moment ago did not fall far below that, whatever
    the other end reports. Bytes still in buffers count as sent, so this never raises a rate above `known`."""
    return replace(report, bytes_per_second=max(report.bytes_per_second, min(known, sent / FALL)))


def held(stood: float, rate: float) -> float:
    """The rate with hysteresis: follows rises at once, and falls only by a factor FALL."""
    return rate if rate >= stood or rate * FALL <= stood else stood


def differ(one: float, two: float) -> bool:
    """Whether two figures differ so much that the new one is to be published."""
    small, large = sorted((one, two))
    return large > NOTICED * small


@lru_cache(maxsize=1 << 16)
def tie_break(one: PeerId, two: PeerId) -> float:
    """A pseudo-random number in [0, 1), the same for both peers."""
    drawn = hashlib.sha256("/".join(sorted((one, two))).encode()).digest()
    return int.from_bytes(drawn[:6], "big") / 2**48
