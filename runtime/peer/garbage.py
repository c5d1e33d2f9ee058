"""When this process collects reference cycles. A collection stops it for a tenth of a second with the training libraries loaded, and
strangers' jobs may begin and end as often as they like: so collections are limited to a share of the time, unless a large stage has
ended, whose memory the next one needs.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fusion.runtime.peer.resident_memory import STATM, resident_bytes

SHARE = 0.01  # of the time
CHECK_SECONDS = 2.0
# Collections of the younger generations, after which Python itself would collect the oldest one.
MAX_YOUNG_COLLECTIONS = 10
LARGE_BYTES = 128 << 20  # by which the process has grown since the last collection
BACKSTOP_COLLECTIONS = 1000  # such collections: a backstop, should `collect_if_due` not be called


class Garbage:
    """`collect` collects all generations; `clock`: monotonic seconds; `young`: collections of the younger generations since the last
    full one; `resident`: bytes that the process holds."""

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
        self._resident_after = resident()
        self._requested = False
        self._not_before = 0.0

    def request(self) -> None:
        """A stage has ended: collect at the next `collect_if_due`, or now if it was large."""
        self._requested = True
        if self._resident() - self._resident_after >= LARGE_BYTES:
            self._not_before = 0.0
            self.collect_if_due()

    def collect_if_due(self) -> None:
        """Collect now if there may be cycles, and if enough time has passed since the last collection, in proportion to its duration."""
        began = self._clock()
        if began < self._not_before or not (self._requested or self._young() >= MAX_YOUNG_COLLECTIONS):
            return
        self._requested = False
        self._collect()
        ended, self._resident_after = self._clock(), self._resident()
        self._not_before = ended + (ended - began) / SHARE


@asynccontextmanager
async def collected() -> AsyncIterator[Garbage]:
    """Collect cycles until the block ends, in place of Python's full collections. Objects that exist now are assumed to stay, and are not
    examined."""
    gc.freeze()
    garbage, before = Garbage(resident=resident_bytes if STATM.exists() else lambda: 0), gc.get_threshold()
    gc.set_threshold(*before[:2], BACKSTOP_COLLECTIONS)
    task = asyncio.create_task(_collect_forever(garbage), name="garbage")
    try:
        yield garbage
    finally:
        task.cancel()
        gc.set_threshold(*before)
        await asyncio.gather(task, return_exceptions=True)


async def _collect_forever(garbage: Garbage) -> None:
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        garbage.collect_if_due()
