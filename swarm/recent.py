"""A short-lived cache for pure functions of bytes that arrive again every heartbeat: a peer that has run for months caches only what it
receives now. Entries expire even while in use, and are then computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar, cast

from cachetools import TTLCache, cached

SECONDS = 15.0  # some heartbeats, and longer than most records live

Function = TypeVar("Function", bound=Callable[..., Any])


def recent(most: int) -> Callable[[Function], Function]:
    """Decorator: caches `most` results of a pure function of hashable arguments, each for SECONDS. Thread-safe."""
    return cast(Callable[[Function], Function], cached(TTLCache(most, SECONDS), lock=Lock()))
