"""What timings say about a link: a rate from how a payload's bytes arrive, a round trip from pings. Pure.

A sender that has a whole payload to give is limited by the path alone while the payload is under way, so the spacing of
its bytes at the receiver is the rate of the slowest link between (packet-train dispersion: Dovrolis, Ramanathan and
Moore, "What do packet dispersion techniques measure?", INFOCOM 2001). Three things spoil that, and are kept out:

    waits at our end      what piled up comes at once afterwards: the bytes that came are never ahead of the link, so the
                          upper hull of (time, bytes) is where nothing waited, and a rate far above its slope a wait
    TCP's slow start      pauses of a round trip between bursts: the rate is a high quantile over short windows, and a
                          transfer that a cold start explains, and a wait for a core, is never evidence that a link became
                          slower
    others on the way     who shares an uplink or a downlink sees a part of it: then the rate is only a lower bound
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SHORTEST_WINDOW_SECONDS = 0.015  # below that the timing of processes on a busy machine is what one sees
LONGEST_WINDOW_SECONDS = 0.350
WINDOWS = 3  # of the time that a transfer took, where that lies between the two
LEAST_WINDOW_BYTES = 64 * 1024  # p2pd hands on 32 KiB at a time
RATE_QUANTILE = 0.8  # of the bytes: pauses of the sender are long but carry few
ABOVE_HULL = 1.15  # what windows may say more than the hull, which takes pauses for the link
COLD_START_BYTES = 14_600  # ten segments: what TCP sends before the first acknowledgement (RFC 6928)
UNKNOWN_RTT_SECONDS = 0.1  # while nobody has pinged: believe in slow start rather than in a slow link

FALL_SECONDS = 0.7  # of transfer at another rate, until an estimate is 63 % of the way there
RISE_SECONDS = 0.3
FALL = 2.0  # times below an estimate is much: two reports in a row that say so are believed at once
WITNESS_SECONDS = 0.25  # of transfer that such a report has to speak of
BORNE_OUT = 0.8  # of an estimate: a lower bound from there on bears it out
TOGETHER = 1.1  # times what all transfers over a line came to: what any of them could get alone, at most
LEAST_ALONE = 0.5  # of a transfer's time, for it to say more than what a line carried

RTT_KEPT = 16
RTT_SECONDS = 60.0  # for which a sample counts
RTT_WITNESSES = 4  # samples in a row on a quiet link that say that the round trip became longer


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a payload that came at a time (seconds on the receiver's clock). `first`: nothing of a payload was
    under way before, so the sender may have had nothing to send."""

    at: float
    size: int
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one peer's payloads said over some time."""

    size: int  # bytes that the rate was taken from
    busy_seconds: float  # for which payloads were under way
    bytes_per_second: float
    sure: bool  # a cold start would have been faster: the link itself is no better


def sample(reads: Sequence[Read], since: float, rtt_seconds: float | None) -> Sample | None:
    """The rate at which payloads came from `since` on; None where too little did. `reads` in order of time, from one
    peer; those before `since` tell when the payload under way then began."""
    busy, size, slow = 0.0, 0, 0
    long_seconds, long_size = 0.0, 0
    steps: list[tuple[float, int]] = []  # rate of a window, bytes it speaks for
    for run in _runs(reads):
        begin = next((i for i, read in enumerate(run) if read.at >= since), len(run))
        part = run[max(0, begin - 1) :]
        if len(part) < 2:
            continue
        seconds, came = part[-1].at - part[0].at, sum(read.size for read in part[1:])
        busy, size = busy + seconds, size + came
        if seconds >= SHORTEST_WINDOW_SECONDS:
            long_seconds, long_size = long_seconds + seconds, long_size + came
        most = ABOVE_HULL * hull_slope(part)
        steps += [(min(rate, most), weight) for rate, weight in _windows(part)]
        whole = sum(read.size for read in run)
        lasted = run[-1].at - run[0].at
        unhindered = max(0.0, lasted - SHORTEST_WINDOW_SECONDS)  # processes may have held it up for so long
        if not run[0].first or whole < 0.5 * cold_start_bytes(unhindered, rtt_seconds):
            slow += came
    if not steps:
        return None
    rate = max(_quantile(steps, RATE_QUANTILE), long_size / long_seconds)  # what came, came
    return Sample(size=size, busy_seconds=busy, bytes_per_second=rate, sure=2 * slow > size)


def cold_start_bytes(seconds: float, rtt_seconds: float | None) -> float:
    """What TCP sends on an idle connection in `seconds` where no link limits it: its window doubles every round trip."""
    rounds = seconds / max(rtt_seconds or UNKNOWN_RTT_SECONDS, 1e-4)
    return COLD_START_BYTES * (math.pow(2.0, min(rounds + 1.0, 60.0)) - 1.0)


def _runs(reads: Sequence[Read]) -> list[Sequence[Read]]:
    starts = [i for i, read in enumerate(reads) if read.first or i == 0]
    return [reads[a:b] for a, b in pairwise([*starts, len(reads)])]


def _windows(part: Sequence[Read]) -> list[tuple[float, int]]:
    """The rate of the shortest long-enough window from each read on, and the bytes of its first step."""
    wanted = (part[-1].at - part[0].at) / WINDOWS
    shortest = min(max(wanted, SHORTEST_WINDOW_SECONDS), LONGEST_WINDOW_SECONDS)
    found, end, came = [], 0, 0
    for start in range(len(part) - 1):
        if end > start:
            came -= part[start].size
        else:
            end, came = start, 0
        while end + 1 < len(part) and (part[end].at - part[start].at < shortest or came < LEAST_WINDOW_BYTES):
            end += 1
            came += part[end].size
        seconds = part[end].at - part[start].at
        if seconds < shortest or came < LEAST_WINDOW_BYTES:
            break  # what is left is shorter still
        found.append((came / seconds, part[start + 1].size))
    return found


def hull_slope(part: Sequence[Read]) -> float:
    """The slope, in the middle of the time, of the least concave line above the bytes that had come. 0: no time passed.

    A wait at our end lowers what has come for a while and no more: the line passes above it."""
    hull, came = [(part[0].at, 0)], 0
    for read in part[1:]:
        came += read.size
        while len(hull) > 1 and _rise(hull[-2], hull[-1], read.at, came):
            hull.pop()
        hull.append((read.at, came))
    middle = (part[0].at + part[-1].at) / 2
    for (begin, low), (end, high) in pairwise(hull):
        if end >= middle and end > begin:
            return (high - low) / (end - begin)
    return 0.0


def _rise(one: tuple[float, int], two: tuple[float, int], at: float, came: int) -> bool:
    """Whether the way over `two` bends upwards there."""
    return (two[1] - one[1]) * (at - one[0]) <= (came - one[1]) * (two[0] - one[0])


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
    """Between which two rates the pair's own lies, where `rate` was seen while all transfers over the busier of the two
    peers' own lines came to `line` together: alone, this one might have had all of that, and no more. For a share `alone`
    of its time it was: what came in all, it might have had in that."""
    if not sure:
        return rate, math.inf
    if line <= rate:
        return rate, rate
    return rate, min(TOGETHER * line, rate / alone if alone >= LEAST_ALONE else math.inf)


@dataclass(frozen=True, kw_only=True)
class RateEstimate:
    """Bytes per second, and when it was last borne out: a lower bound far below it says nothing. It moves by how long the
    evidence lasted, so one odd frame changes little and a second of transfer nearly all, and falls all the way where two
    reports in a row agree that the link is much slower."""

    bytes_per_second: float
    at: float
    fell_to: float = math.inf  # what the last report left of it, where that was much less

    def updated(
        self, low: float, high: float, seconds: float, now: float, worth: float = 0.0
    ) -> RateEstimate:
        """After `seconds` of transfer that put the rate between `low` and `high`. Where it fell they count as at least
        `worth`: what is late was slow, but what came early may have piled up before it was read."""
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
        borne_out = high < math.inf or low >= BORNE_OUT * self.bytes_per_second
        return RateEstimate(bytes_per_second=rate, at=now if borne_out else self.at, fell_to=fell_to)


@dataclass(frozen=True)
class RttEstimate:
    """The round trip of an idle link: the least of the samples, (time, seconds, quiet) each, until they all say more."""

    samples: tuple[tuple[float, float, bool], ...] = ()

    @property
    def seconds(self) -> float | None:
        return min((seconds for _, seconds, _ in self.samples), default=None)

    @property
    def at(self) -> float:
        return self.samples[-1][0] if self.samples else -math.inf

    def updated(self, now: float, seconds: float, *, quiet: bool) -> RttEstimate:
        """`quiet`: no payload was under way, so what is longer is not a queue of our own making."""
        kept = [entry for entry in self.samples if entry[0] > now - RTT_SECONDS][-(RTT_KEPT - 1) :]
        kept.append((now, seconds, quiet))
        latest = kept[-RTT_WITNESSES:]
        before = [s for _, s, _ in kept[:-RTT_WITNESSES]]
        if before and all(q for _, _, q in latest):
            least = min(s for _, s, _ in latest)
            if least > 1.3 * min(before) + 0.003:
                kept = latest
        return RttEstimate(tuple(kept))
