"""Sends trains over links without newer measurements, one at a time and within an allowance.

A link that was never measured, or that is in doubt, gets trains until they agree; an idle one gets a short check now and then,
which detects whether it became much slower.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion.swarm.errors import SwarmError
from fusion.swarm.links import packet_trains
from fusion.swarm.links.packet_trains import Train
from fusion.swarm.links.probes import Allowance
from fusion.swarm.links.table import NOTICED, LinkTable, Neighbour
from fusion.swarm.streams.link_estimate import RateEstimate
from fusion.swarm.transport import Transport

logger = logging.getLogger(__name__)

QUIET_BYTES = 16 * 1024  # sent meanwhile, or in a second, that do not count as traffic
QUIET_SHARE = 0.2  # of a train, too
IDLE_SECONDS = 10.0  # without traffic: a job may pause for seconds after one of its links was cut
LEAST_PINGS = 2  # before a train, which is evaluated with the round trip


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    answer_seconds: float = 12.0
    again_seconds: float = 1.0  # between two trains to one neighbour, so that they share no delay
    check_seconds: float = 60.0  # between two checks of an idle link
    # After which a link is measured again in spite of checks: they do not detect that it became faster.
    stale_seconds: float = 1800.0
    first_bytes: float = 16e6  # burst of trains for first measurements
    first_bytes_per_second: float = 8e3
    doubt_burst_bytes: float = 768e3  # of trains for repeated measurements, while there is traffic
    doubt_bytes_per_second: float = 1e3
    check_burst_bytes: float = 1e6
    check_bytes_per_second: float = 16e3  # while there is no traffic
    traffic_share: float = 0.005  # of our traffic, while there is any

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")


class Prober:
    """`learned(neighbour, estimate)` is called with the estimate from trains, `failed(neighbour, error)` for one without an answer."""

    def __init__(
        self,
        table: LinkTable,
        transport: Transport,
        config: ProbeConfig,
        clock: Callable[[], float],
        learned: Callable[[Neighbour, RateEstimate], None],
        failed: Callable[[Neighbour, BaseException], None],
    ) -> None:
        self._table = table
        self._transport = transport
        self._config = config
        self._clock = clock
        self._learned = learned
        self._failed = failed
        self._first = Allowance(config.first_bytes, config.first_bytes_per_second, clock)
        self._doubts = Allowance(config.doubt_burst_bytes, config.doubt_bytes_per_second, clock)
        self._idle = True
        self._busy_at = -math.inf
        self._checks = Allowance(config.check_burst_bytes, config.check_bytes_per_second, clock)

    def carried(self, bytes_per_second: float) -> None:
        """Report the rate of our outgoing traffic."""
        share = self._config.traffic_share * bytes_per_second
        idle = bytes_per_second <= QUIET_BYTES
        if not idle:
            self._busy_at = self._clock()
        if self._idle and not idle:
            self._checks.clear()  # the allowance earned is for idle times
        self._idle = idle
        self._checks.earn(self._config.check_bytes_per_second if self._idle else share)

    async def step(self, neighbours: list[Neighbour]) -> None:
        """Probe the neighbour that needs it most, if any is due and allowed."""
        now = self._clock()
        due = [n for n in neighbours if n.answers.count >= LEAST_PINGS and self._due(n, now)]
        due.sort(key=_order)
        for neighbour in due:
            if await (self._measure if neighbour.measuring.settled_at is None else self._check)(neighbour):
                return

    def _due(self, neighbour: Neighbour, now: float) -> bool:
        measuring = neighbour.measuring
        if now - measuring.trained_at < self._config.again_seconds:
            return False
        if neighbour.measured_by_traffic(now) and not measuring.pressed:
            return False
        if measuring.settled_at is not None and now - measuring.settled_at >= self._config.stale_seconds:
            neighbour.doubt()
        if measuring.settled_at is None or neighbour.out.estimate is None:
            return True
        return now - max(measuring.checked_at, neighbour.out.estimate.at) >= self._config.check_seconds

    async def _measure(self, neighbour: Neighbour) -> bool:
        """Send growing trains until one is long enough for the link. False: not allowed now."""
        measuring = neighbour.measuring
        believed, rtt = measuring.believed, neighbour.answers.rtt.seconds or 0.0
        begin = packet_trains.check_bytes(believed, rtt) if believed else packet_trains.FIRST_BYTES
        size = measuring.train_bytes or begin
        while True:
            if not self._may(size, believed):
                measuring.train_bytes = size  # for when that much is allowed
                return False
            train, alone = await self._send_train(neighbour, size)
            if train is None:
                return True
            rate, now = train.rate, self._clock()
            known = neighbour.out.bytes_per_second
            if rate > known:
                self._learned(neighbour, RateEstimate(bytes_per_second=rate, at=now))
            if await self._held_back(neighbour, train, known, rtt):
                return True  # only a lower bound
            if packet_trains.plainly_cut(train, known):
                measuring.trains = ()  # the ones before are out of date
                self._learned(neighbour, RateEstimate(bytes_per_second=train.most, at=now))
            if not alone:
                return True
            if packet_trains.long_enough(size, rate) or packet_trains.confirms(rate, believed):
                break
            size = packet_trains.next_bytes(size, rate)
        measuring.trains = (*measuring.trains, rate)
        measuring.train_bytes = packet_trains.wanted_bytes(max(measuring.trains))
        if packet_trains.settled(measuring.trains, believed):
            best = max(measuring.trains)
            neighbour.settle(now)
            self._learned(neighbour, RateEstimate(bytes_per_second=best, at=now))
        return True

    async def _held_back(self, neighbour: Neighbour, train: Train, known: float, rtt: float) -> bool:
        """As in `packet_trains`, but pings again after a train that would show a cut: the reverse link may have filled after the train
        had started."""
        if packet_trains.held_back(train, known, rtt):
            return True
        if not packet_trains.plainly_cut(train, known):
            return False
        try:
            after, _ = await neighbour.line.ping(self._config.answer_seconds)
        except (SwarmError, TimeoutError) as error:
            self._failed(neighbour, error)
            return True
        return packet_trains.held_back(replace(train, rtt_seconds=after), known, rtt)

    def _may(self, size: int, believed: float) -> bool:
        if not believed:
            return self._first.take(size)
        silent = self._clock() - self._busy_at >= IDLE_SECONDS
        return self._doubts.take(size) or (silent and self._first.take(size))

    async def _check(self, neighbour: Neighbour) -> bool:
        assert neighbour.out.estimate is not None
        rate, rtt = neighbour.out.estimate.bytes_per_second, neighbour.answers.rtt.seconds or 0.0
        size = packet_trains.check_bytes(rate, rtt)
        if not self._checks.take(size):
            return False
        train, alone = await self._send_train(neighbour, size)
        if train is None:
            return True
        now = neighbour.measuring.checked_at = self._clock()
        if packet_trains.held_back(train, rate, rtt):
            return True
        late = packet_trains.too_late(size, train.seconds, rate, rtt)
        if not late:
            neighbour.out.firm(now)
            self._learned(neighbour, replace(neighbour.out.estimate, at=now))
        if (late and alone) or train.rate > NOTICED * rate:
            neighbour.doubt()
        return True

    async def _send_train(self, neighbour: Neighbour, size: int) -> tuple[Train | None, bool]:
        """Send a train; returns its evaluation, None without one, and whether our line had no other traffic."""
        before = self._traffic_bytes()
        train = None
        try:
            rtt = neighbour.answers.rtt.seconds or 0.0
            train = await neighbour.line.train(
                size, rtt, self._config.answer_seconds, pressed=neighbour.measuring.pressed
            )
        except (SwarmError, TimeoutError) as error:
            self._failed(neighbour, error)
        neighbour.measuring.trained_at = self._clock()
        if train is None:  # the peer receives another train first
            neighbour.measuring.trained_at -= random.uniform(0.2, 0.8) * self._config.again_seconds
        crossed = self._traffic_bytes() - before
        if train is not None:
            train = replace(train, crossed=crossed)
            if neighbour.measuring.pressed:
                # The traffic is little, and goes on: count its part of the link.
                train, crossed = replace(train, rate=train.most, crossed=0), 0
        return train, self._alone(neighbour) and crossed <= max(QUIET_BYTES, QUIET_SHARE * size)

    def _alone(self, neighbour: Neighbour) -> bool:
        now = self._clock()
        return not any(
            other.measured_by_traffic(now) for other in self._table.every() if other is not neighbour
        )

    def _traffic_bytes(self) -> int:
        """Bytes sent so far, without probes."""
        traffic = self._transport.traffic()
        probes = sum(neighbour.line.sent_bytes for neighbour in self._table.every())
        return sum(count.sent_bytes for count in traffic.values()) - probes


def _order(neighbour: Neighbour) -> tuple[float, ...]:
    """Sort key: links in doubt, then new ones, then checks; slow ones first, which cost least and matter most."""
    measuring = neighbour.measuring
    kind = 2 if measuring.settled_at is not None else 0 if measuring.believed else 1
    return (kind, len(measuring.trains), measuring.train_bytes, random.random())
