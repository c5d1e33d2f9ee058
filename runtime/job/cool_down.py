"""Exponential back-off: what failed is not tried again for a while, longer each time it fails again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from cachetools import FIFOCache

K = TypeVar("K")

REMEMBERED = 65_536  # failures, the oldest forgotten first


class CoolDown(Generic[K]):
    """`first_seconds` after the first failure, doubling up to `longest_seconds`. `clock`: monotonic seconds."""

    def __init__(self, first_seconds: float, longest_seconds: float, clock: Callable[[], float]) -> None:
        if not 0 < first_seconds <= longest_seconds:
            raise ValueError(
                f"0 < first_seconds <= longest_seconds, not {first_seconds} and {longest_seconds}"
            )
        self._first_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._clock = clock
        # Until when, and how long that was
        self._failed: FIFOCache[K, tuple[float, float]] = FIFOCache(REMEMBERED)

    def start(self, key: K) -> None:
        """It failed just now."""
        _, before = self._failed.pop(key, (0.0, 0.0))
        seconds = min(self._longest_seconds, 2 * before) if before else self._first_seconds
        self._failed[key] = (self._clock() + seconds, seconds)

    def refuse(self, key: K) -> None:
        """It would always fail: it lasts for ever."""
        self._failed[key] = (math.inf, self._longest_seconds)

    def lasts(self, key: K) -> bool:
        """Whether it must not be tried yet."""
        found = self._failed.get(key)
        return found is not None and self._clock() < found[0]

    def forget(self, key: K) -> None:
        """It worked: the next failure is a first one."""
        self._failed.pop(key, None)
