"""Whether the tokens of one answer come clearly slower than they did: then something on their way has changed. Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

RECENT = 6  # gaps between tokens; fewer are chance
SETTLED = 12  # gaps after which it is known what is usual
SLOWER = 1.4
DRIFT = 0.05  # of a difference is what the usual pace follows with each token
AGAIN_SECONDS = 2.0  # after it was said; twice as long each time
LEAST_SECONDS = 0.003  # that a gap has grown by: less may be anything


class Slowdown:
    """Times are seconds on one clock."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=RECENT)
        self._told_at, self._pause, self._calm_for = -math.inf, AGAIN_SECONDS, 0
        self.begin()

    def begin(self) -> None:
        """Nothing is known of the pace of the tokens that come now."""
        self._gaps.clear()
        self._last: float | None = None
        self._seen = 0
        self._usual = 0.0
        self._calm()

    def token(self, now: float, guessed: bool = False) -> bool:
        """A token came. Whether they come slower: said when it begins, and ever more seldom for as long as it lasts. `guessed`:
        it took no trip of its own, so that the time before it says nothing."""
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
                self._calm()  # what was slow is over: the next time it is news
            return False
        self._calm_for = 0
        if now - self._told_at < self._pause:
            return False
        if self._told_at > -math.inf:
            self._pause *= 2
        self._told_at = now
        return True

    def _calm(self) -> None:
        self._told_at, self._pause, self._calm_for = -math.inf, AGAIN_SECONDS, 0
