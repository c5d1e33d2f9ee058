"""A peer's clocks, injected so that a simulation can provide its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic  # monotonic seconds
    unix: Callable[[], float] = time.time  # unix seconds
