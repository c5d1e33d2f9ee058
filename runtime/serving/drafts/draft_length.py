"""How many tokens to draft. Pure, and without torch.

An accepted guess saves its token the trip around the ring; the step that drafts it may delay a token that arrives meanwhile by the time
of the step. So the k-th guess is worth it where (acceptance rate)^k x (time of a trip) exceeds the time of a step by a factor.
"""

from __future__ import annotations

from math import log

FIRST_ACCEPTANCE = 0.5  # prior of the acceptance rate
FIRST_COUNTS = 3  # guesses that the prior counts for: three rejections at the beginning outweigh it
LEAST_ACCEPTANCE = 0.05  # lower bound, so that drafting is retried now and then: a text changes
RECENT = 0.1  # weight of the newest observation in the moving average
STEPS_A_TRIP = 2.0  # the factor above
FIRST_DRAFTED = 4  # before the times are known
MOST_DRAFTED = 64
HOPEFUL = 0.3  # acceptance rate from which on rejections do not stop speculation
MOST_HOPED = 8  # guesses in flight then, at most, whatever the last results
MOST_TIMED = 256  # chunks in flight that are timed


class Recent:
    """An exponential moving average; `value` is None before the first observation."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, observed: float) -> None:
        before = observed if self.value is None else self.value
        self.value = before + RECENT * (observed - before)


class Trips:
    """Times of one session's trips around the ring, from chunk to token."""

    def __init__(self) -> None:
        self._fed: dict[int, float] = {}  # the end of a chunk -> when it was fed
        self.seconds = Recent()

    def fed(self, end: int, now: float) -> None:
        """A chunk up to that position was fed."""
        self._fed[end] = now
        if len(self._fed) > MOST_TIMED:
            del self._fed[next(iter(self._fed))]

    def returned(self, position: int, now: float) -> None:
        """The tokens up to that position have returned."""
        if (then := self._fed.get(position)) is not None:
            self.seconds.add(now - then)
        self._fed = {end: at for end, at in self._fed.items() if end > position}


class Acceptance:
    """Acceptance rate of the draft's guesses: the mean at first, later a moving average."""

    def __init__(self) -> None:
        self._share = FIRST_ACCEPTANCE
        self._counts = FIRST_COUNTS

    def add(self, right: bool) -> None:
        self._counts += 1
        self._share += max(RECENT, 1 / self._counts) * (right - self._share)

    @property
    def share(self) -> float:
        return max(LEAST_ACCEPTANCE, self._share)


def worth_drafting(acceptance: float, trip_seconds: float | None, step_seconds: float | None) -> int:
    """How many tokens to draft behind the known ones. `acceptance`: above 0, up to 1. FIRST_DRAFTED while a time is not known."""
    if trip_seconds is None or step_seconds is None:
        return FIRST_DRAFTED
    if step_seconds <= 0:
        return MOST_DRAFTED
    # Least probability that all guesses up to this one are accepted
    least = STEPS_A_TRIP * step_seconds / max(trip_seconds, 1e-9)
    if acceptance < least:
        return 0
    if acceptance >= 1:
        return MOST_DRAFTED
    return min(MOST_DRAFTED, int(log(least) / log(acceptance) + 1e-9))
