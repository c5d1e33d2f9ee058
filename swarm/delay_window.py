"""How much of what can wait may be on its way over a link that also carries what cannot: as much as adds little to the delay of whatever
comes behind it (LEDBAT, RFC 6817). Pure.

A daemon and a kernel take megabytes at once and send them in order, so that who puts them in does not see that they wait. The far
end says how much has come, and when tells how long the rest waits.
"""

from __future__ import annotations

import math
from collections import deque

LEAST_BYTES = 64 << 10  # so that there is always something to measure
MOST_BYTES = 16 << 20
TARGET_SECONDS = 0.025  # that our bytes may add to the delay
# By how much of itself the window grows or shrinks at most in one round trip: until it has once been too large, and from then on, where
# what it does shows a round trip later (more than TARGET_SECONDS of one would swing).
FIRST_GAIN, GAIN = 0.5, 0.3
MOST_WAITING = 4096  # chunks that are under way
BASE_SECONDS = 600.0  # for which the shortest delay seen counts: ways change


class DelayWindow:
    """Of one link. `send` what goes out, `ack` what has come; `open`: whether more may go out now."""

    def __init__(self) -> None:
        self.window_bytes = float(LEAST_BYTES)
        self._sent = 0
        self._acked = 0
        # What was sent up to and with each, and when; who says nothing of them loses the first.
        self._waiting: deque[tuple[int, float]] = deque(maxlen=MOST_WAITING)
        self._base, self._base_at = math.inf, 0.0
        self._swelled = False  # it has been too large once

    @property
    def open(self) -> bool:
        return self._sent == self._acked or self._sent - self._acked < self.window_bytes

    @property
    def round_trip_seconds(self) -> float:
        """The shortest that was seen lately; infinite before the first."""
        return self._base

    def send(self, size_bytes: int, now: float) -> None:
        self._sent += size_bytes
        self._waiting.append((self._sent, now))

    def ack(self, total_bytes: int, now: float) -> None:
        """So many of all bytes have come. ValueError where these are more than were sent, or fewer than before."""
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
            return  # so little tells nothing of more (RFC 7661)
        self._swelled |= off_target < 0
        gain = min(GAIN, TARGET_SECONDS / max(TARGET_SECONDS, self._base)) if self._swelled else FIRST_GAIN
        grown = self.window_bytes + gain * off_target * newly
        self.window_bytes = min(max(grown, float(LEAST_BYTES)), float(MOST_BYTES))
