"""Memory for what readers have not taken yet, and who gives way once there is none: whoever holds most, of what lies there longest."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

from fusion.swarm.transport import PeerId

IDLE_SECONDS = 1.0  # after which what was not taken may give way


@dataclass(eq=False)
class Slot:
    """Room for `amount` chunks of a reader, of a public network or of none that is known. `since`: when it was taken, or something
    was sent out of it. `until` ends what is sent."""

    reader: PeerId
    network: str | None
    amount: int = 1
    since: float = 0.0
    until: asyncio.Timeout | None = None

    @property
    def holders(self) -> tuple[str, ...]:
        return (self.reader,) if self.network is None else (self.reader, self.network)


class UnreadChunks:
    """Room for `limit` chunks of all, `of_reader` of one reader and `of_network` of one public network."""

    def __init__(self, limit: int, of_reader: int, of_network: int) -> None:
        self._limit, self._of_reader, self._of_network = limit, of_reader, of_network
        self._slots: dict[Slot, None] = {}  # oldest first
        self._held: Counter[str] = Counter()  # of each reader, and of each network
        self._total = 0
        self._changed = asyncio.Event()
        # One stream of each reader waits at a time: else who opens many would have most turns.
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()

    async def acquire(self, slot: Slot) -> None:
        """Wait for room, of at most what one reader may have. `release` it also where the wait is cancelled: that may come when it
        is over."""
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
        """Harmless where it was taken away, or never given."""
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
        """Whether there is room; others give way where they hold more than who asks would."""
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
