"""Whose chunks run first where several users have some waiting. Pure.

Users take turns, so that one with a hundred sessions waits with the last of them and not others behind all. And turns stay
short for whoever has few: while one user decodes fewer sessions than another, the other has at most a few rows in a turn for
each session of the first, as many as its turn can bear (`TurnTimes`): a single answer beside any number of
somebody else's then waits for about half a turn at each stage. Of prompts one chunk runs beside tokens, whoever's they are: it is
that of the user who had one longest ago (`PromptTurns`), so that a hundred prompts of one are no longer a wait for another's than one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

MORE_ROWS = 3  # at most, of another user in a turn, for each session of the one with the fewest
BORNE = 0.5  # of what a turn takes with a user's own rows, that others' may add
RECENT = 0.05  # the share of the newest turn in what is believed
LEAST_SPREAD = 0.1  # of rows (their variance), to tell what one takes
OUTLIER = 2.0  # times what was expected: a turn that took longer was interrupted, and counts as that

Item = TypeVar("Item")
UserOf = Callable[[Item], Hashable]


def in_turns(waiting: Sequence[Item], user_of: UserOf[Item]) -> list[Item]:
    """A user's first before anybody's second; otherwise in the order in which they came."""
    before = Counter[Hashable]()
    ranked = []
    for item in waiting:
        user = user_of(item)
        ranked.append((before[user], item))
        before[user] += 1
    return [item for _, item in sorted(ranked, key=lambda entry: entry[0])]


class TurnTimes:
    """What a turn of tokens takes, by how many rows it has: the line of least squares through those of late. Where weights are what
    takes the time, four rows take that of one (`fusion.runtime.planes.products.packed`); where the model is small, what is done for each
    session is most of it. Until turns of different sizes were seen a row is taken to cost nothing."""

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0  # means
        self._spread = self._together = 0.0  # variance of rows, their covariance with seconds
        self._row_seconds = 0.0

    def took(self, rows: int, seconds: float) -> None:
        if not self._rows:
            self._rows, self._seconds = float(rows), seconds
            return
        expected = self._seconds + self._row_seconds * (rows - self._rows)
        if expected > 0.0:
            seconds = min(seconds, OUTLIER * expected)
        by_rows, by_seconds = rows - self._rows, seconds - self._seconds
        self._rows += RECENT * by_rows
        self._seconds += RECENT * by_seconds
        self._spread = (1 - RECENT) * (self._spread + RECENT * by_rows * by_rows)
        self._together = (1 - RECENT) * (self._together + RECENT * by_rows * by_seconds)
        if self._spread >= LEAST_SPREAD:
            self._row_seconds = max(0.0, self._together / self._spread)

    def more_rows(self, own: int) -> int:
        """How many rows of another user may be in a turn for each of a user's `own`: 1 to MORE_ROWS."""
        alone = self._seconds + self._row_seconds * (own - self._rows)
        if self._row_seconds * own * MORE_ROWS <= BORNE * alone:
            return MORE_ROWS
        return max(1, int(BORNE * alone / (self._row_seconds * own)))


class PromptTurns:
    """Which users had a chunk of a prompt run, and in what order."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, None] = {}  # longest ago first

    def ranked(self, waiting: Sequence[Item], user_of: UserOf[Item]) -> list[Item]:
        """In turns; of equal rank those first whose user had none for longest."""
        order = {user: place for place, user in enumerate(self._turns)}
        return in_turns(sorted(waiting, key=lambda item: order.get(user_of(item), -1)), user_of)

    def ran(self, user: Hashable) -> None:
        self._turns.pop(user, None)
        self._turns[user] = None

    def forget(self, user: Hashable) -> None:
        """It has no session any more. Harmless where it is not known."""
        self._turns.pop(user, None)


def fair_rows(
    waiting: Sequence[Item], user_of: UserOf[Item], decoding: Mapping[Hashable, int], more_rows: int
) -> list[Item]:
    """Those that may run in one turn, in turns. `decoding`: how many sessions of each user decode; `more_rows`: of another for
    each session of the user with the fewest."""
    if len(decoding) < 2:
        return list(waiting)
    most = more_rows * min(decoding.values())
    taken = Counter[Hashable]()
    found = []
    for item in in_turns(waiting, user_of):
        user = user_of(item)
        if taken[user] < most:
            taken[user] += 1
            found.append(item)
    return found
