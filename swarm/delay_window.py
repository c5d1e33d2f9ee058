"""Congestion control for background transfers (LEDBAT, RFC 6817): how many of their bytes may be in flight on a link that also carries
urgent ones, so that they add little to the delay of the latter. Pure.

p2pd and the kernel buffer megabytes and send them in order, so a sender does not notice a queue. The receiver acknowledges the bytes
received, and the time of the acknowledgements shows the delay.
"""

from __future__ import annotations

import math
from collections import deque

LEAST_BYTES = 64 << 10  # enough to measure the delay
MOST_BYTES = 16 << 20
TARGET_SECONDS = 0.025  # that our bytes may add to the delay
# The most by which the window grows or shrinks in one round trip, relative to itself: until it has been too large once, and from then
# on. Its effect shows a round trip later, so a larger gain would oscillate.
FIRST_GAIN, GAIN = 0.5, 0.3
MOST_WAITING = 4096  # chunks that are under way
BASE_SECONDS = 600.0  # for which the shortest delay counts: routes change


class DelayWindow:
    """The window of one link. Call `send` for sent bytes and `ack` for acknowledged ones; `open`: whether more may be sent now."""

    def __init__(self) -> None:
        self.window_bytes = float(LEAST_BYTES)
        self._sent = 0
        self._acked = 0
        # Of each chunk, the total bytes sent with it, and when; without acknowledgements the oldest are dropped.
        self._waiting: deque[tuple[int, float]] = deque(maxlen=MOST_WAITING)
        self._base, self._base_at = math.inf, 0.0
        self._was_too_large = False  # at least once

    @property
    def open(self) -> bool:
        return self._sent == self._acked or self._sent - self._acked < self.window_bytes

    @property
    def round_trip_seconds(self) -> float:
        """The shortest recent one; infinite before the first."""
        return self._base

    def send(self, size_bytes: int, now: float) -> None:
        self._sent += size_bytes
        self._waiting.append((self._sent, now))

    def ack(self, total_bytes: int, now: float) -> None:
        """Note that `total_bytes` of all were received. Raises ValueError if these are more than were sent, or fewer than before."""
        if not self._acked <= total_bytes <= self._sent:
            raise ValueError(f"ack of {total_bytes} bytes, of {self._sent} that were sent")
        under_way = self._sent - self._acked
        newly, self._acked, sent_at = total_bytes - self._acked, total_bytes, None
        while self._waiting and self._waiting[0][0] <= total_bytes:
            sent_at = self._waiting.popleft()[1]
        if sent_at is None:
            return
        delay = now - sent_at
        if delay < self._base or now - self._base_at > BASE_SECONDS:
            self._base, self._base_at = delay, now
        off_target = max(-1.0, 1.0 - (delay - self._base) / TARGET_SECONDS)
        if off_target > 0 and under_way < self.window_bytes / 2:
            return  # too little in flight to justify growth (RFC 7661)
        self._was_too_large |= off_target < 0
        gain = (
            min(GAIN, TARGET_SECONDS / max(TARGET_SECONDS, self._base)) if self._was_too_large else FIRST_GAIN
        )
        grown = self.window_bytes + gain * off_target * newly
        self.window_bytes = min(max(grown, float(LEAST_BYTES)), float(MOST_BYTES))
