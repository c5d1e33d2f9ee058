"""A rate limit for uploads of blobs, shared fairly between readers.

A token bucket that may go into debt by one chunk, since chunks are sent whole. Readers take turns (round robin), one chunk each,
however many streams one of them has. Small blobs (a manifest) and indexes need not wait for their turn, but at most half
of the rate may go out so: a reader that requests them without end waits as others do.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from fusion.swarm.transport import PeerId

BURST_SECONDS = 0.5  # of the rate, which may be sent at once after a pause
SMALL_BYTES = 64 << 10
SMALL_SHARE = 0.5  # of the rate, which may be sent out of turn


class UploadBudget:
    """`bytes_per_second` None: unlimited. `clock`: monotonic seconds; `sleep` waits."""

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._left = BURST_SECONDS * (bytes_per_second or 0.0)  # bytes that may be sent now; below 0: debt
        self._out_of_turn = SMALL_SHARE * self._left  # the same, out of turn
        self._filled_at = clock()
        # In order of turns.
        self._waiting: dict[PeerId, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._granting: asyncio.Task[None] | None = None

    @property
    def limited(self) -> bool:
        return self._rate is not None

    async def spend(self, reader: PeerId, count: int, *, first: bool = False) -> None:
        """Wait until `count` bytes may be sent to `reader`. `first`: an index, which need not wait for its turn."""
        if self._rate is None:
            return
        self._fill(self._rate)
        if self._left > 0 and not self._waiting:
            self._left -= count
            return
        if (first or count <= SMALL_BYTES) and self._out_of_turn > 0:
            self._left -= count
            self._out_of_turn -= count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(reader, deque()).append((count, turn))
        if self._granting is None or self._granting.done():
            self._granting = asyncio.create_task(self._grant(self._rate), name="upload budget")
        await turn

    async def aclose(self) -> None:
        """Stop granting. Callers of `spend` stay blocked: they are to be cancelled, too. Idempotent."""
        if self._granting is not None:
            self._granting.cancel()
            await asyncio.wait([self._granting])
            self._granting = None

    async def _grant(self, rate: float) -> None:
        while self._waiting:
            self._fill(rate)
            if self._left <= 0:
                await self._sleep(-self._left / rate + 1e-3)
                continue
            reader = next(iter(self._waiting))
            queue = self._waiting.pop(reader)
            count, turn = queue.popleft()
            if queue:
                self._waiting[reader] = queue  # behind all others
            if not turn.done():  # otherwise the caller is gone
                self._left -= count
                turn.set_result(None)

    def _fill(self, rate: float) -> None:
        now = self._clock()
        most, more = BURST_SECONDS * rate, (now - self._filled_at) * rate
        self._left = min(self._left + more, most)
        self._out_of_turn = min(self._out_of_turn + SMALL_SHARE * more, SMALL_SHARE * most)
        self._filled_at = now
