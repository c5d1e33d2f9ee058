"""What was made of bytes that come back every heartbeat, for a while: a peer that has run for months holds no more than what it hears
now. What comes back for longer is made anew now and then, as records are whenever their authors renew them.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeVar, cast

from cachetools import TTLCache, cached

SECONDS = 15.0  # some heartbeats, and longer than most records live

Function = TypeVar("Function", bound=Callable[..., Any])


def recent(most: int) -> Callable[[Function], Function]:
    """A decorator for a pure function of hashable arguments, of any thread: so many of its results are kept, each for SECONDS."""
    return cast(Callable[[Function], Function], cached(TTLCache(most, SECONDS), lock=Lock()))
