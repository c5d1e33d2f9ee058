"""Whose chunks run first where several users have some waiting. Pure.

Users take turns, so that one with a hundred sessions waits with the last of them and not others behind all. And turns stay
short for whoever has few: while one user decodes fewer sessions than another, the other has at most MORE_ROWS in a turn for
each session of the first, and turns without it now and then (`Rests`). Where reading weights is what takes the
time, or calling operators, four rows take little more than one. Of prompts one chunk runs beside tokens, whoever's they are: it is
that of the user who had one longest ago (`PromptTurns`), so that a hundred prompts of one are no longer a wait for another's than one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

MORE_ROWS = 3  # of another user in a turn, for each session of the one with the fewest
REST_TIMES = 4.0  # so long as a turn of others alone, until the next one
# In lengths of such a turn: whoever is away for longer comes over slow links, and is not waited for.
AWAY_TIMES = 10.0

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


class Rests:
    """While a user with the fewest sessions is away at other stages for a moment, turns of others alone take a part of the time only:
    it would find one under way each time, and its frames the interpreter taken."""

    def __init__(self) -> None:
        self._seen = -math.inf  # a user with the fewest, in a turn
        self._until = -math.inf

    def ran(self, alone: bool, seconds: float, now: float) -> None:
        """A turn, which is over. `alone`: without a row of a user with the fewest sessions, where others have more."""
        if alone:
            self._until = min(now + REST_TIMES * seconds, self._seen + AWAY_TIMES * seconds)
        else:
            self._seen = now

    def left(self, now: float) -> float:
        """Seconds until the next turn of others alone."""
        return max(0.0, self._until - now)


class PromptTurns:
    """Which users had a chunk of a prompt run, and in what order."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, None] = {}  # longest ago first

    def ranked(self, waiting: Sequence[Item], user_of: UserOf[Item]) -> list[Item]:
        """In turns; of equal rank those first whose user had none for longest."""
        if len(waiting) < 2:
            return list(waiting)
        order = {user: place for place, user in enumerate(self._turns)}
        return in_turns(sorted(waiting, key=lambda item: order.get(user_of(item), -1)), user_of)

    def ran(self, user: Hashable) -> None:
        self._turns.pop(user, None)
        self._turns[user] = None

    def forget(self, user: Hashable) -> None:
        """It has no session any more. Harmless where it is not known."""
        self._turns.pop(user, None)


def with_fewest(decoding: Mapping[Hashable, int]) -> frozenset[Hashable]:
    """The users with the fewest sessions that decode, of those in `decoding`, where others have more."""
    if len(decoding) < 2:
        return frozenset()
    fewest = min(decoding.values())
    few = frozenset(user for user, count in decoding.items() if count == fewest)
    return few if len(few) < len(decoding) else frozenset()


def fair_rows(waiting: Sequence[Item], user_of: UserOf[Item], decoding: Mapping[Hashable, int]) -> list[Item]:
    """Those that may run in one turn, in turns. `decoding`: how many sessions of each user decode."""
    if len(decoding) < 2:
        return list(waiting)
    most = MORE_ROWS * min(decoding.values())
    taken = Counter[Hashable]()
    found = []
    for item in in_turns(waiting, user_of):
        user = user_of(item)
        if taken[user] < most:
            taken[user] += 1
            found.append(item)
    return found
