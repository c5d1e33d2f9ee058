"""A memory limit for chunks that readers have not taken yet. Where it is reached, the reader that holds most loses its oldest idle
slot."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

from fusion.swarm.transport import PeerId

IDLE_SECONDS = 1.0  # without progress, after which a slot may be taken away


@dataclass(eq=False)
class Slot:
    """Room for `amount` chunks of a reader and its public network, where that is known. `since`: the last progress, in seconds of the
    event loop. `until`: the timeout that ends its sending."""

    reader: PeerId
    network: str | None
    amount: int = 1
    since: float = 0.0
    until: asyncio.Timeout | None = None

    @property
    def holders(self) -> tuple[str, ...]:
        return (self.reader,) if self.network is None else (self.reader, self.network)


class UnreadChunks:
    """Room for `limit` chunks in all, `of_reader` of one reader and `of_network` of one public network."""

    def __init__(self, limit: int, of_reader: int, of_network: int) -> None:
        self._limit, self._of_reader, self._of_network = limit, of_reader, of_network
        self._slots: dict[Slot, None] = {}  # oldest first
        self._held: Counter[str] = Counter()  # of each reader, and of each network
        self._total = 0
        self._changed = asyncio.Event()
        # One stream of each reader waits at a time: otherwise a reader with many streams would have most turns.
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()

    async def acquire(self, slot: Slot) -> None:
        """Wait for room, at most what one reader may have. The caller must `release` it also if this is cancelled, which may happen
        just after it was acquired."""
        slot.amount = min(slot.amount, self._of_reader)
        turn = self._turns.setdefault(slot.reader, asyncio.Lock())
        async with turn:
            while not self._may_hold(slot) or not self._make_room(slot):
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_SECONDS):
                        await self._changed.wait()
        slot.since = asyncio.get_running_loop().time()
        self._slots[slot] = None
        self._total += slot.amount
        for holder in slot.holders:
            self._held[holder] += slot.amount

    def release(self, slot: Slot) -> None:
        """Give the room back. No-op for a slot that was taken away or never acquired."""
        if slot not in self._slots:
            return
        del self._slots[slot]
        self._total -= slot.amount
        for holder in slot.holders:
            self._held[holder] -= slot.amount
            if not self._held[holder]:
                del self._held[holder]
        self._changed.set()

    def _may_hold(self, slot: Slot) -> bool:
        limits = zip(slot.holders, (self._of_reader, self._of_network), strict=False)
        return all(self._held[holder] + slot.amount <= limit for holder, limit in limits)

    def _make_room(self, wanted: Slot) -> bool:
        """Whether there is room, after taking idle slots away from holders of more than the requester would then hold."""
        now = asyncio.get_running_loop().time()
        while self._total + wanted.amount > self._limit:
            idle = [slot for slot in self._slots if now - slot.since >= IDLE_SECONDS]
            most = max(idle, key=lambda slot: self._held[slot.holders[-1]], default=None)
            if most is None or self._held[most.holders[-1]] < self._held[wanted.holders[-1]] + wanted.amount:
                return False
            if most.until is not None:
                most.until.reschedule(now)
            self.release(most)
        return True
