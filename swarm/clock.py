"""Where a peer reads the time from: handed to whoever asks for it, so that a simulation can hand them its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic  # seconds that only rise
    unix: Callable[[], float] = time.time  # seconds since 1970, as others read them too
