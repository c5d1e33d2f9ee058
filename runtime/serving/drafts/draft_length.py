"""How far it is worth drafting. Pure, and without torch.

A guess that is right saves its token the trip around the ring; the step that drafts it may hold up a token that comes meanwhile,
by as long as the step takes. So the k-th guess is worth it where (how often k guesses in a row are right) x (a trip) exceeds a step
by far enough.
"""

from __future__ import annotations

from math import log

FIRST_ACCEPTANCE = 0.5  # before anything is known
FIRST_COUNTS = 3  # guesses' worth of that: three wrong ones at the beginning are enough to hope no more
LEAST_ACCEPTANCE = 0.05  # what is always wrong is tried now and then: a text changes
RECENT = 0.1  # the share of the newest observation in what is believed
STEPS_A_TRIP = 2.0  # that a guess has to save
FIRST_DRAFTED = 4  # before the times are known
MOST_DRAFTED = 64
HOPEFUL = 0.3  # the share of right guesses from which on a wrong one changes nothing
MOST_HOPED = 8  # guesses that are under way then, whatever became of the last ones, at most
MOST_TIMED = 256  # chunks on their way whose time is taken


class Recent:
    """What was observed lately, on average; `value` is None before."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, observed: float) -> None:
        before = observed if self.value is None else self.value
        self.value = before + RECENT * (observed - before)


class Trips:
    """How long the tokens of one session take around the ring, from chunk to token."""

    def __init__(self) -> None:
        self._fed: dict[int, float] = {}  # the end of a chunk -> when it went
        self.seconds = Recent()

    def fed(self, end: int, now: float) -> None:
        """A chunk up to that position went."""
        self._fed[end] = now
        if len(self._fed) > MOST_TIMED:
            del self._fed[next(iter(self._fed))]

    def returned(self, position: int, now: float) -> None:
        """The token for that position is here, and those before it are."""
        if (then := self._fed.get(position)) is not None:
            self.seconds.add(now - then)
        self._fed = {end: at for end, at in self._fed.items() if end > position}


class Acceptance:
    """How often the draft's guesses are right: on average at first, lately on average later."""

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
    """How many tokens behind those that are known. `acceptance`: above 0, up to 1. Where a time is not known yet, a few: it will be."""
    if trip_seconds is None or step_seconds is None:
        return FIRST_DRAFTED
    if step_seconds <= 0:
        return MOST_DRAFTED
    # That the guesses in a row have to be right
    least = STEPS_A_TRIP * step_seconds / max(trip_seconds, 1e-9)
    if acceptance < least:
        return 0
    if acceptance >= 1:
        return MOST_DRAFTED
    return min(MOST_DRAFTED, int(log(least) / log(acceptance) + 1e-9))
