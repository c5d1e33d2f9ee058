"""Estimates of a link: its rate from the times at which a payload's bytes arrive, its round trip from pings. Pure.

A sender with a whole payload is limited only by the path while the payload is under way, so the spacing of its bytes at the receiver
is the rate of the path's slowest link (packet-train dispersion: Dovrolis, Ramanathan and Moore, "What do packet dispersion
techniques measure?", INFOCOM 2001). Three effects distort that, and are filtered out:

    stalls at our end     queued bytes then arrive at once. The bytes received are never ahead of the link, so the upper hull of
                          (time, bytes) is where nothing was queued, and a rate far above its slope follows a stall
    TCP's slow start      pauses of a round trip between bursts: the rate is a high quantile over short windows, and a
                          transfer whose duration a cold start or a wait for a core explains is no evidence of a slower link
    cross traffic         a transfer that shares an uplink or a downlink gets a part of it: the rate is only a lower bound
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SHORTEST_WINDOW_SECONDS = 0.015  # shorter ones show the scheduling of a busy machine
LONGEST_WINDOW_SECONDS = 0.350
WINDOWS = 3  # per transfer, within the two bounds
LEAST_WINDOW_BYTES = 64 * 1024  # p2pd writes 32 KiB at a time
RATE_QUANTILE = 0.8  # of the bytes: pauses of the sender are long but carry few
ABOVE_HULL = 1.15  # by which a window's rate may exceed the hull's, which includes pauses
COLD_START_BYTES = 14_600  # ten segments: what TCP sends before the first acknowledgement (RFC 6928)
UNKNOWN_RTT_SECONDS = 0.1  # before the first ping: rather assume slow start than a slow link

FALL_SECONDS = 0.7  # of transfer at another rate, until an estimate is 63 % of the way there
RISE_SECONDS = 0.3
FALL = 2.0  # times below the estimate: two reports in a row of that replace it at once
WITNESS_SECONDS = 0.25  # the least transfer time of such a report
CONFIRMING = 0.8  # of the estimate: a lower bound from there on confirms it
TOGETHER = 1.1  # times the sum of all transfers over a line: the most that one alone could get
LEAST_ALONE = 0.5  # of a transfer's time, for its own rate to bound the pair's

RTT_KEPT = 16
RTT_SECONDS = 60.0  # for which a sample counts
RTT_WITNESSES = 4  # longer samples in a row on a quiet link that raise the estimate


@dataclass(frozen=True, slots=True)
class Read:
    """`size` payload bytes received at a time (seconds of the receiver's clock). `first`: no payload was under way before, so the
    sender may have been idle."""

    at: float
    size: int
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The rate of one peer's payloads over some time."""

    size: int  # bytes that the rate is measured on
    busy_seconds: float  # for which payloads were under way
    bytes_per_second: float
    sure: bool  # a cold start would have been faster: the link limits the rate, not TCP's slow start


def sample(reads: Sequence[Read], since: float, rtt_seconds: float | None) -> Sample | None:
    """The rate at which payloads were received since `since`; None where there were too few bytes. `reads`: of one peer, in order of
    time; those before `since` show when the payload under way then began."""
    busy, size, slow = 0.0, 0, 0
    long_seconds, long_size = 0.0, 0
    steps: list[tuple[float, int]] = []  # rate of a window, and its weight in bytes
    for run in _runs(reads):
        begin = next((i for i, read in enumerate(run) if read.at >= since), len(run))
        part = run[max(0, begin - 1) :]
        if len(part) < 2:
            continue
        seconds, received = part[-1].at - part[0].at, sum(read.size for read in part[1:])
        busy, size = busy + seconds, size + received
        if seconds >= SHORTEST_WINDOW_SECONDS:
            long_seconds, long_size = long_seconds + seconds, long_size + received
        most = ABOVE_HULL * hull_slope(part)
        steps += [(min(rate, most), weight) for rate, weight in _windows(part)]
        whole = sum(read.size for read in run)
        lasted = run[-1].at - run[0].at
        unhindered = max(0.0, lasted - SHORTEST_WINDOW_SECONDS)  # the rest may be scheduling
        if not run[0].first or whole < 0.5 * cold_start_bytes(unhindered, rtt_seconds):
            slow += received
    if not steps:
        return None
    rate = max(_quantile(steps, RATE_QUANTILE), long_size / long_seconds)  # the average is a lower bound
    return Sample(size=size, busy_seconds=busy, bytes_per_second=rate, sure=2 * slow > size)


def cold_start_bytes(seconds: float, rtt_seconds: float | None) -> float:
    """The bytes that TCP sends on an idle connection in `seconds` without a limiting link: its window doubles every round trip."""
    rounds = seconds / max(rtt_seconds or UNKNOWN_RTT_SECONDS, 1e-4)
    return COLD_START_BYTES * (math.pow(2.0, min(rounds + 1.0, 60.0)) - 1.0)


def _runs(reads: Sequence[Read]) -> list[Sequence[Read]]:
    starts = [i for i, read in enumerate(reads) if read.first or i == 0]
    return [reads[a:b] for a, b in pairwise([*starts, len(reads)])]


def _windows(part: Sequence[Read]) -> list[tuple[float, int]]:
    """The rate of the shortest long-enough window from each read on, and the bytes of its first step."""
    wanted = (part[-1].at - part[0].at) / WINDOWS
    shortest = min(max(wanted, SHORTEST_WINDOW_SECONDS), LONGEST_WINDOW_SECONDS)
    found, end, received = [], 0, 0
    for start in range(len(part) - 1):
        if end > start:
            received -= part[start].size
        else:
            end, received = start, 0
        while end + 1 < len(part) and (
            part[end].at - part[start].at < shortest or received < LEAST_WINDOW_BYTES
        ):
            end += 1
            received += part[end].size
        seconds = part[end].at - part[start].at
        if seconds < shortest or received < LEAST_WINDOW_BYTES:
            break  # the remaining ones are shorter still
        found.append((received / seconds, part[start + 1].size))
    return found


def hull_slope(part: Sequence[Read]) -> float:
    """The slope, at the middle of the time, of the upper concave hull of the bytes received over time. 0: no time passed.

    A stall at our end lowers the bytes received only for a while: the hull passes above it."""
    hull, received = [(part[0].at, 0)], 0
    for read in part[1:]:
        received += read.size
        while len(hull) > 1 and _rise(hull[-2], hull[-1], read.at, received):
            hull.pop()
        hull.append((read.at, received))
    middle = (part[0].at + part[-1].at) / 2
    for (begin, low), (end, high) in pairwise(hull):
        if end >= middle and end > begin:
            return (high - low) / (end - begin)
    return 0.0


def _rise(one: tuple[float, int], two: tuple[float, int], at: float, received: int) -> bool:
    """Whether the hull would bend upwards at `two`."""
    return (two[1] - one[1]) * (at - one[0]) <= (received - one[1]) * (two[0] - one[0])


def _quantile(steps: Sequence[tuple[float, int]], share: float) -> float:
    """The value below which `share` of the weight lies."""
    ordered = sorted(steps)
    left = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]


def bounds(rate: float, *, line: float, sure: bool, alone: float = 0.0) -> tuple[float, float]:
    """Lower and upper bound of a pair's own rate, where a transfer had `rate` while all transfers over the busier of the two peers'
    lines summed to `line`: alone, it could have had at most all of that. For a share `alone` of its time it was alone: then it
    could have had at most all of its bytes in that time."""
    if not sure:
        return rate, math.inf
    if line <= rate:
        return rate, rate
    return rate, min(TOGETHER * line, rate / alone if alone >= LEAST_ALONE else math.inf)


@dataclass(frozen=True, kw_only=True)
class RateEstimate:
    """Bytes per second, and when that was last confirmed, which a lower bound far below it does not. It moves in proportion to the
    transfer time, so that one odd frame changes little and a second of transfer nearly all, and falls at once where two
    reports in a row agree that the link is much slower."""

    bytes_per_second: float
    at: float
    fell_to: float = math.inf  # the last report's upper bound, where that was much lower

    def updated(
        self, low: float, high: float, seconds: float, now: float, worth: float = 0.0
    ) -> RateEstimate:
        """The estimate after `seconds` of transfer with a rate between `low` and `high`. A fall counts as at least `worth` seconds: late
        bytes were slow, but early ones may have been queued before they were read."""
        rate = self.bytes_per_second
        if low > rate:
            rate += (low - rate) * -math.expm1(-seconds / RISE_SECONDS)
        seconds = max(seconds, worth)
        if high < rate:
            rate += (high - rate) * -math.expm1(-seconds / FALL_SECONDS)
        fell_to = math.inf
        if seconds >= WITNESS_SECONDS:
            rate = min(rate, max(high, self.fell_to))
            fell_to = high if FALL * high <= self.bytes_per_second else math.inf
        confirmed = high < math.inf or low >= CONFIRMING * self.bytes_per_second
        return RateEstimate(bytes_per_second=rate, at=now if confirmed else self.at, fell_to=fell_to)


@dataclass(frozen=True)
class RttEstimate:
    """The round trip of an idle link: the least of the samples (time, seconds, quiet), until several in a row are longer."""

    samples: tuple[tuple[float, float, bool], ...] = ()

    @property
    def seconds(self) -> float | None:
        return min((seconds for _, seconds, _ in self.samples), default=None)

    @property
    def at(self) -> float:
        return self.samples[-1][0] if self.samples else -math.inf

    def updated(self, now: float, seconds: float, *, quiet: bool) -> RttEstimate:
        """`quiet`: no payload was under way, so a longer sample is not due to our own queue."""
        kept = [entry for entry in self.samples if entry[0] > now - RTT_SECONDS][-(RTT_KEPT - 1) :]
        kept.append((now, seconds, quiet))
        latest = kept[-RTT_WITNESSES:]
        before = [s for _, s, _ in kept[:-RTT_WITNESSES]]
        if before and all(q for _, _, q in latest):
            least = min(s for _, s, _ in latest)
            if least > 1.3 * min(before) + 0.003:
                kept = latest
        return RttEstimate(tuple(kept))
