"""Detects that the tokens of one completion arrive clearly slower than before: something on their route has changed. Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

RECENT = 6  # gaps between tokens in the median; fewer are noise
SETTLED = 12  # gaps after which the usual gap is known
SLOWER = 1.4
DRIFT = 0.05  # weight of a new gap in the moving average
AGAIN_SECONDS = 2.0  # between two reports; doubles each time
LEAST_SECONDS = 0.003  # by which a gap must grow: less is noise


class Slowdown:
    """Times are seconds of one clock."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=RECENT)
        self._reported_at, self._pause, self._calm_for = -math.inf, AGAIN_SECONDS, 0
        self.begin()

    def begin(self) -> None:
        """Forget the usual gap: a new session begins."""
        self._gaps.clear()
        self._last: float | None = None
        self._seen = 0
        self._usual = 0.0
        self._calm()

    def token(self, now: float, guessed: bool = False) -> bool:
        """A token has arrived. Whether to report a slowdown: when it begins, and with exponential back-off while it lasts. `guessed`: an
        accepted speculative token, which took no trip of its own, so that its gap is ignored."""
        last, self._last = self._last, now
        if last is None or guessed:
            return False
        self._gaps.append(now - last)
        self._seen += 1
        if self._seen < SETTLED:
            return False
        recent = median(self._gaps)
        if self._seen == SETTLED:
            self._usual = recent
        if recent <= max(SLOWER * self._usual, self._usual + LEAST_SECONDS):
            self._usual += (recent - self._usual) * DRIFT
            self._calm_for += 1
            if self._calm_for >= SETTLED:
                self._calm()  # the slowdown is over: the next one is reported at once
            return False
        self._calm_for = 0
        if now - self._reported_at < self._pause:
            return False
        if self._reported_at > -math.inf:
            self._pause *= 2
        self._reported_at = now
        return True

    def _calm(self) -> None:
        self._reported_at, self._pause, self._calm_for = -math.inf, AGAIN_SECONDS, 0
