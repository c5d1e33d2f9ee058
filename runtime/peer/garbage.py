"""When this process looks for memory that is held by cycles only. It stands still for as long as that takes, a tenth of a second
where it has loaded what it trains with, and strangers' jobs begin and end as often as they like: so all that together is
kept to a share of the time, unless a large stage has ended, whose memory the next one needs.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fusion.runtime.peer.resident_memory import STATM, resident_bytes

SHARE = 0.01  # of the time
LOOK_SECONDS = 2.0
# Collections of the younger generations, after which Python itself would look through the oldest one.
OLD = 10
LARGE_BYTES = 128 << 20  # that the process holds more than after the last collection
NEVER = 1000  # such collections: a backstop, should nobody look here


class Garbage:
    """`collect` looks through everything; `clock` gives seconds that only rise; `resident`: bytes that the process holds."""

    def __init__(
        self,
        collect: Callable[[], object] = gc.collect,
        clock: Callable[[], float] = time.monotonic,
        young: Callable[[], int] = lambda: gc.get_count()[2],
        resident: Callable[[], int] = lambda: 0,
    ) -> None:
        self._collect = collect
        self._clock = clock
        self._young = young
        self._resident = resident
        self._left = resident()
        self._wanted = False
        self._not_before = 0.0

    def soon(self) -> None:
        """There may be some, of something that has ended."""
        self._wanted = True
        if self._resident() - self._left >= LARGE_BYTES:
            self._not_before = 0.0
            self.look()

    def look(self) -> None:
        """Collect now if there may be something, and if that has not been done for as long as the last time makes necessary."""
        began = self._clock()
        if began < self._not_before or not (self._wanted or self._young() >= OLD):
            return
        self._wanted = False
        self._collect()
        ended, self._left = self._clock(), self._resident()
        self._not_before = ended + (ended - began) / SHARE


@asynccontextmanager
async def collected() -> AsyncIterator[Garbage]:
    """Until the block ends garbage is collected here, of the oldest generation by nobody else. What there is now will stay, and is
    not looked at."""
    gc.freeze()
    garbage, before = Garbage(resident=resident_bytes if STATM.exists() else lambda: 0), gc.get_threshold()
    gc.set_threshold(*before[:2], NEVER)
    looking = asyncio.create_task(_look_for_ever(garbage), name="garbage")
    try:
        yield garbage
    finally:
        looking.cancel()
        gc.set_threshold(*before)
        await asyncio.gather(looking, return_exceptions=True)


async def _look_for_ever(garbage: Garbage) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        garbage.look()
