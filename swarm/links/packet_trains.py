"""Packet trains: how long each has to be, how many are needed, and the rate that they show. Pure.

Delays (a stalled machine, packets lost in slow start, cross traffic) make a train late, and nothing makes it early: so every train
gives a lower bound, and the best of a few is the rate of the link. A link counts as measured when the best two agree. All
sizes in bytes, rates in bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.swarm.protocol import MAX_TRAIN_BYTES
from fusion.swarm.streams.link_estimate import COLD_START_BYTES

FIRST_BYTES = 64 * 1024
LEAST_BYTES = 256 * 1024  # shorter trains are dominated by slow start and the queue of a slow link
MOST_BYTES = MAX_TRAIN_BYTES
TRAIN_SECONDS = 0.12  # that a train should take: longer than most scheduling delays
FAST = MOST_BYTES / TRAIN_SECONDS  # 140 Mbps: no train is long enough to measure faster links exactly
LONGEST_SECONDS = 0.5  # for which a train may hold up a slow line, unless it is of FIRST_BYTES
GROWTH = 1.6  # over the length that a train's rate, a lower bound, asks for
ENOUGH = 0.8  # of the wanted length

AGREE = 1.1  # the best two trains within this factor are the link
MOST_TRAINS = 5
FARTHEST = 2.0  # factor by which the spacing's rate may exceed bytes / seconds

CUT = 10.0  # a check is long enough to detect a link that became so much slower
LATE, LATE_SECONDS = 1.5, 0.05  # how late a check may be
SWOLLEN, SWOLLEN_SECONDS = 2.0, 0.02  # factor and excess of the round trip of a link with a queue, either way
PLAINLY, PLAINLY_SECONDS = 3.0, 0.2  # beyond any delay of a busy machine


def wanted_bytes(rate: float) -> int:
    """The length of a train that can measure about that rate."""
    least = min(LEAST_BYTES, max(FIRST_BYTES, rate * LONGEST_SECONDS))
    return int(min(max(rate * TRAIN_SECONDS, least), MOST_BYTES))


def long_enough(size: int, rate: float) -> bool:
    """Whether a train of `size` is long enough to measure the `rate` that it found."""
    return size >= ENOUGH * wanted_bytes(rate)


def next_bytes(size: int, rate: float) -> int:
    """The length of the next train after one of `size` that found `rate` and was too short."""
    return min(max(wanted_bytes(GROWTH * rate), 2 * size), MOST_BYTES)


@dataclass(frozen=True)
class Train:
    """`seconds`: from its start to the answer, minus the round trip. `rtt_seconds`: the round trip right before. `crossed`: bytes
    sent beside it, over any link."""

    size: int
    seconds: float
    rate: float
    rtt_seconds: float
    crossed: int = 0

    @property
    def most(self) -> float:
        """The rate if all crossing bytes had used the same link."""
        return self.rate * (1.0 + self.crossed / self.size)


def train(size: int, seconds: float, idle_rtt_seconds: float, rtt_seconds: float, spacing: float) -> Train:
    """The evaluated train: `seconds` from its start to the answer; `spacing`: the rate at which its bytes arrived (0: too short to
    tell), which excludes slow start but depends on one machine's timing and one peer's honesty."""
    took = max(seconds - min(idle_rtt_seconds, rtt_seconds), 0.1 * seconds, 1e-6)
    bound = size / took
    return Train(size, took, max(bound, min(spacing, FARTHEST * bound)), rtt_seconds)


def settled(rates: Sequence[float], believed: float) -> bool:
    """Whether no further train is needed; `believed`: the link's rate known before the first of them, or 0."""
    best = sorted(rates)[-2:]
    agree = len(best) == 2 and (best[1] <= AGREE * best[0] or best[0] >= FAST)
    return agree or len(rates) >= MOST_TRAINS or confirms(best[-1], believed)


def confirms(rate: float, believed: float) -> bool:
    """Whether a train that found `rate` confirms the `believed` one."""
    return 0.0 < believed <= AGREE * rate <= AGREE * AGREE * believed


def plainly_cut(train: Train, believed: float) -> bool:
    """Whether one train alone shows that a link of the `believed` rate became much slower, whatever cross traffic there was."""
    late = train.seconds - (train.size + train.crossed) / believed if believed else 0.0
    return PLAINLY * train.most < believed and late > PLAINLY_SECONDS


def healthy_seconds(size: int, rate: float, rtt_seconds: float) -> float:
    """The seconds that an idle connection takes for `size` bytes over a link of `rate`, minus the round trip."""
    return size / rate + rtt_seconds * math.log2(1.0 + size / COLD_START_BYTES)


def too_late(size: int, seconds: float, rate: float, rtt_seconds: float) -> bool:
    """Whether `seconds` (minus the round trip) are too many for a check of `size` over a link of `rate`."""
    return seconds > LATE * healthy_seconds(size, rate, rtt_seconds) + LATE_SECONDS


def held_back(train: Train, believed: float, idle_rtt_seconds: float) -> bool:
    """Whether a slow train is explained by delayed acknowledgements, as where the reverse link is full: with its round trip, it would
    have been as slow over a link of the `believed` rate."""
    swollen = train.rtt_seconds > SWOLLEN * idle_rtt_seconds + SWOLLEN_SECONDS
    slow = AGREE * train.rate < believed
    return swollen and slow and not too_late(train.size, train.seconds, believed, train.rtt_seconds)


def check_bytes(rate: float, rtt_seconds: float) -> int:
    """The shortest check that detects a link of `rate` cut to a tenth; 4 * LEAST_BYTES where none does."""
    size = FIRST_BYTES
    while size < 4 * LEAST_BYTES and not too_late(size, CUT * size / rate, rate, rtt_seconds):
        size *= 2
    return size
