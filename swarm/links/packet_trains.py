"""Trains of bytes: how long each has to be, how many it takes, and what they say together. Pure.

Whatever holds a train up (a machine that stalls, packets lost in slow start, traffic of others) makes it late, and
nothing makes it early: every train gives a lower bound, and the best of a few is the rate of the link. A link counts as
measured when the best two agree. All sizes in bytes, rates in bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.swarm.protocol import MAX_TRAIN_BYTES
from fusion.swarm.streams.link_estimate import COLD_START_BYTES

FIRST_BYTES = 64 * 1024
LEAST_BYTES = 256 * 1024  # less than that is lost in slow start and in the queue of a slow link
MOST_BYTES = MAX_TRAIN_BYTES
TRAIN_SECONDS = 0.12  # that a train should take: longer than most of what delays processes
FAST = MOST_BYTES / TRAIN_SECONDS  # 140 Mbps: no train is long enough for an exact figure from there on
LONGEST_SECONDS = 0.5  # for which a train may hold up a slow line, unless it is of FIRST_BYTES
GROWTH = 1.6  # what one train finds is a lower bound: the next one may be longer than that asks for
ENOUGH = 0.8  # of the wanted length

AGREE = 1.1  # the best two trains within this factor are the link
MOST_TRAINS = 5
FARTHEST = 2.0  # how much more than bytes by seconds the spacing of the bytes may say

CUT = 10.0  # a check is long enough to see a link that became so much slower
LATE, LATE_SECONDS = 1.5, 0.05  # how late a check may be
SWOLLEN, SWOLLEN_SECONDS = 2.0, 0.02  # the round trip of a link with a queue on it, one way or the other
PLAINLY, PLAINLY_SECONDS = 3.0, 0.2  # so late is no train that only waited for a machine


def wanted_bytes(rate: float) -> int:
    """How long a train has to be to measure about that rate."""
    least = min(LEAST_BYTES, max(FIRST_BYTES, rate * LONGEST_SECONDS))
    return int(min(max(rate * TRAIN_SECONDS, least), MOST_BYTES))


def long_enough(size: int, rate: float) -> bool:
    """Whether a train of `size` that found `rate` counts, or a longer one has to be sent."""
    return size >= ENOUGH * wanted_bytes(rate)


def next_bytes(size: int, rate: float) -> int:
    """How long the train is to be after one of `size` that found `rate` and was too short."""
    return min(max(wanted_bytes(GROWTH * rate), 2 * size), MOST_BYTES)


@dataclass(frozen=True)
class Train:
    """`seconds`: from its begin to the answer, the round trip left out. `rtt_seconds`: as it was right before. `crossed`:
    bytes that went out beside it, over any link."""

    size: int
    seconds: float
    rate: float
    rtt_seconds: float
    crossed: int = 0

    @property
    def most(self) -> float:
        """The rate if all that crossed had gone the same way."""
        return self.rate * (1.0 + self.crossed / self.size)


def train(size: int, seconds: float, idle_rtt_seconds: float, rtt_seconds: float, spacing: float) -> Train:
    """What one says: `seconds` from its begin to the answer, `spacing` the rate at which its bytes came in there
    (0: too short to tell), which leaves slow start out but hangs on one machine's timing and one peer's honesty."""
    took = max(seconds - min(idle_rtt_seconds, rtt_seconds), 0.1 * seconds, 1e-6)
    bound = size / took
    return Train(size, took, max(bound, min(spacing, FARTHEST * bound)), rtt_seconds)


def settled(rates: Sequence[float], believed: float) -> bool:
    """Whether these trains need no other; `believed`: what was known of the link before the first of them, or 0."""
    best = sorted(rates)[-2:]
    agree = len(best) == 2 and (best[1] <= AGREE * best[0] or best[0] >= FAST)
    return agree or len(rates) >= MOST_TRAINS or borne_out(best[-1], believed)


def borne_out(rate: float, believed: float) -> bool:
    """Whether a train that found `rate` says that the link is what it was."""
    return 0.0 < believed <= AGREE * rate <= AGREE * AGREE * believed


def plainly_cut(train: Train, believed: float) -> bool:
    """Whether one train alone says that a link of which `believed` was known became much slower, whoever else was
    under way."""
    late = train.seconds - (train.size + train.crossed) / believed if believed else 0.0
    return PLAINLY * train.most < believed and late > PLAINLY_SECONDS


def healthy_seconds(size: int, rate: float, rtt_seconds: float) -> float:
    """What an idle connection takes for `size` bytes over a link of `rate`, its round trip left out."""
    return size / rate + rtt_seconds * math.log2(1.0 + size / COLD_START_BYTES)


def too_late(size: int, seconds: float, rate: float, rtt_seconds: float) -> bool:
    """Whether a check of `size` that took `seconds`, its round trip left out, is none that a link of `rate` lets pass."""
    return seconds > LATE * healthy_seconds(size, rate, rtt_seconds) + LATE_SECONDS


def held_back(train: Train, believed: float, idle_rtt_seconds: float) -> bool:
    """Whether a train says no more than that its acknowledgements were long under way, as where the link back is full:
    it was slow, and over a link of which `believed` is known it would have been with such a round trip."""
    swollen = train.rtt_seconds > SWOLLEN * idle_rtt_seconds + SWOLLEN_SECONDS
    slow = AGREE * train.rate < believed
    return swollen and slow and not too_late(train.size, train.seconds, believed, train.rtt_seconds)


def check_bytes(rate: float, rtt_seconds: float) -> int:
    """The shortest check that sees a link of `rate` cut to a tenth; LEAST_BYTES four times over where none does."""
    size = FIRST_BYTES
    while size < 4 * LEAST_BYTES and not too_late(size, CUT * size / rate, rate, rtt_seconds):
        size *= 2
    return size
