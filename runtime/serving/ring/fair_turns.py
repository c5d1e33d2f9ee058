"""Whose chunks run first where several users have some waiting. Pure.

Users take turns, so that one with a hundred sessions waits with the last of them and not others behind all. And turns stay
short for whoever has few: while one user decodes fewer sessions than another, the other has at most MORE_ROWS in a turn for
each session of the first. Where weights are what takes the time, four rows take that of one (`fusion.runtime.planes.packed`): a
single answer beside any number of somebody else's then waits for about half a turn at each stage. Prompts are no part of this:
one chunk of somebody's runs beside tokens, whoever's they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

MORE_ROWS = 3

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
