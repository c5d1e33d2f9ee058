"""Fair scheduling of chunks between users. Pure.

Users are served round-robin, so that a user with a hundred sessions delays its own and not those of others. Turns stay short for
users with few sessions: while one user decodes fewer sessions than another, the other gets at most MORE_ROWS rows in a turn for each
session of the first, and turns without the first are spaced out (`Rests`). Where reading weights or calling operators dominates,
four rows take little longer than one. Of prompts one chunk runs between tokens: that of the user whose last one was longest ago
(`PromptTurns`), so that a hundred prompts of one user delay another's no more than one does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

MORE_ROWS = 3  # of another user in a turn, for each session of the one with the fewest
REST_TIMES = 4.0  # pause after a turn of others alone, as a multiple of its length
# In lengths of such a turn: a user that is away for longer has slow links, and is not waited for.
AWAY_TIMES = 10.0

Item = TypeVar("Item")
UserOf = Callable[[Item], Hashable]


def in_turns(waiting: Sequence[Item], user_of: UserOf[Item]) -> list[Item]:
    """Round-robin over users; each user's items, and users' first items, in order of arrival."""
    before = Counter[Hashable]()
    ranked = []
    for item in waiting:
        user = user_of(item)
        ranked.append((before[user], item))
        before[user] += 1
    return [item for _, item in sorted(ranked, key=lambda entry: entry[0])]


class Rests:
    """Pauses between turns of others alone, while a user with the fewest sessions is at other stages for a moment: else it would find
    such a turn running each time it returns."""

    def __init__(self) -> None:
        self._seen = -math.inf  # last turn with a row of a user with the fewest sessions
        self._until = -math.inf

    def ran(self, alone: bool, seconds: float, now: float) -> None:
        """Record a finished turn. `alone`: it had no row of a user with the fewest sessions, where others have more."""
        if alone:
            self._until = min(now + REST_TIMES * seconds, self._seen + AWAY_TIMES * seconds)
        else:
            self._seen = now

    def left(self, now: float) -> float:
        """Seconds until the next turn of others alone."""
        return max(0.0, self._until - now)


class PromptTurns:
    """Users in the order in which they last ran a chunk of a prompt."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, None] = {}  # longest ago first

    def ranked(self, waiting: Sequence[Item], user_of: UserOf[Item]) -> list[Item]:
        """Round-robin; users whose last chunk was longest ago first."""
        if len(waiting) < 2:
            return list(waiting)
        order = {user: place for place, user in enumerate(self._turns)}
        return in_turns(sorted(waiting, key=lambda item: order.get(user_of(item), -1)), user_of)

    def ran(self, user: Hashable) -> None:
        self._turns.pop(user, None)
        self._turns[user] = None

    def forget(self, user: Hashable) -> None:
        """The user has no session any more. Idempotent."""
        self._turns.pop(user, None)


def with_fewest(decoding: Mapping[Hashable, int]) -> frozenset[Hashable]:
    """The users with the fewest decoding sessions; empty where all have equally many. `decoding`: sessions of each user."""
    if len(decoding) < 2:
        return frozenset()
    fewest = min(decoding.values())
    few = frozenset(user for user, count in decoding.items() if count == fewest)
    return few if len(few) < len(decoding) else frozenset()


def fair_rows(waiting: Sequence[Item], user_of: UserOf[Item], decoding: Mapping[Hashable, int]) -> list[Item]:
    """The items that may run in one turn, round-robin. `decoding`: how many sessions of each user decode."""
    if len(decoding) < 2:
        return list(waiting)
    most = MORE_ROWS * min(decoding.values())
    taken = Counter[Hashable]()
    chosen = []
    for item in in_turns(waiting, user_of):
        user = user_of(item)
        if taken[user] < most:
            taken[user] += 1
            chosen.append(item)
    return chosen
