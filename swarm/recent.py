"""Results of pure functions of what comes back every heartbeat, kept while it does: what nobody asks for any more goes, so that a
peer holds no more after months than it needs now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar, cast

SECONDS = 60.0

P = ParamSpec("P")
R = TypeVar("R")
_NONE = object()


def recent(
    most: int, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator. A result is kept for `seconds` after it was asked for last, and for twice that at most; in each of these spans
    of time so many. What is raised is not kept. For functions of positional, hashable arguments; of any thread."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return cast(Callable[P, R], update_wrapper(_Recent(function, most, seconds, clock), function))

    return decorate


class _Recent(Generic[R]):
    """Two generations: what is asked for again moves to the young one, and the old one goes as a whole."""

    def __init__(
        self, function: Callable[..., R], most: int, seconds: float, clock: Callable[[], float]
    ) -> None:
        self._function, self._most, self._seconds, self._clock = function, most, seconds, clock
        self._young: dict[Hashable, Any] = {}
        self._old: dict[Hashable, Any] = {}
        self._until = clock() + seconds

    def __call__(self, *args: Hashable) -> R:
        now = self._clock()
        if now >= self._until:
            # Nobody has asked for what is young for a whole span either, if it ended that long ago.
            self._turn({} if now >= self._until + self._seconds else self._young, now)
        found = self._young.get(args, _NONE)
        if found is _NONE:
            found = self._old.pop(args, _NONE)
            if found is _NONE:
                found = self._function(*args)
            if len(self._young) >= self._most:
                self._turn(self._young, now)
            self._young[args] = found
        return cast(R, found)

    def _turn(self, old: dict[Hashable, Any], now: float) -> None:
        self._old, self._young, self._until = old, {}, now + self._seconds
