"""Fair shares of a limited resource, with preemption. Pure.

While there is room nobody is refused. When there is none, a requester gets room if an item can be preempted, in this order:

    idle items         the least recently used one, whoever holds it
    newcomers          for a requester that has completed something here: peers that never did hold at most half together.
                       Peer ids are free, so a limit per peer could not bound them
    the largest share  the peer that holds most loses its newest item, if it is left with no less than the requester then has

Otherwise the requester is busy. The last rule never preempts for a requester that holds as much, so running work is not
swapped to and fro.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

from fusion.swarm.transport import PeerId

KNOWN_PEERS = 4096  # that completed something; those that did so last
IDLE_SECONDS = 5.0

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Held:
    holder: PeerId
    amount: int
    used_at: float


class Shares(Generic[Item]):
    """`limit`: of all amounts together; without one the caller decides when there is no room. `clock`: monotonic seconds."""

    def __init__(
        self, clock: Callable[[], float], limit: float = math.inf, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._clock = clock
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._held: dict[Item, _Held] = {}  # least recently used first
        self._of: Counter[PeerId] = Counter()
        self._items: dict[PeerId, dict[Item, None]] = {}  # of each holder, oldest first
        self._known: LRUCache[PeerId, None] = LRUCache(KNOWN_PEERS)

    def __contains__(self, item: Item) -> bool:
        return item in self._held

    def __len__(self) -> int:
        return len(self._held)

    def of(self, holder: PeerId) -> int:
        return self._of[holder]

    def count(self, holder: PeerId) -> int:
        """How many items it holds."""
        return len(self._items.get(holder, ()))

    def alone(self, holder: PeerId) -> bool:
        """Whether no other peer holds anything."""
        return not self._items.keys() - {holder}

    def fits(self, amount: int) -> bool:
        """Whether it is within the limit at all."""
        return amount <= self._limit

    def room(self, amount: int = 1) -> bool:
        return self._of.total() + amount <= self._limit

    def take(self, item: Item, holder: PeerId, amount: int = 1) -> None:
        """Add the item, whether or not there is room."""
        self._held[item] = _Held(holder, amount, self._clock())
        self._items.setdefault(holder, {})[item] = None
        self._of[holder] += amount

    def use(self, item: Item) -> None:
        """Mark the item as used now. No-op where it is not held."""
        held = self._held.pop(item, None)
        if held is not None:
            self._held[item] = _Held(held.holder, held.amount, self._clock())

    def used(self, used_at: Mapping[Item, float]) -> None:
        """Set when items were last used, where that is known only afterwards. No-op for those that are not held."""
        for item, at in used_at.items():
            held = self._held.get(item)
            if held is not None and at > held.used_at:
                self._held[item] = _Held(held.holder, held.amount, at)
        self._held = dict(sorted(self._held.items(), key=lambda each: each[1].used_at))

    def release(self, item: Item, *, completed: bool = False) -> None:
        """Remove the item. No-op where it is not held. `completed`: it served its purpose, which ends its holder being a newcomer."""
        held = self._held.pop(item, None)
        if held is None:
            return
        self._of[held.holder] -= held.amount
        del self._items[held.holder][item]
        if not self._items[held.holder]:
            del self._of[held.holder], self._items[held.holder]
        if completed:
            self._known[held.holder] = None

    def yields(self, asker: PeerId, amount: int = 0, *, evenly: bool = True) -> Item | None:
        """The item to preempt for `amount` more of `asker`; None where there is none. The caller releases it. `evenly` False: without the
        rule of the largest share, for items whose holders would only start them again."""
        now = self._clock()
        idle = next(iter(self._held), None)
        if idle is not None and now - self._held[idle].used_at >= self._idle_seconds:
            return idle
        newcomers = Counter({peer: held for peer, held in self._of.items() if peer not in self._known})
        if asker in self._known and 2 * newcomers.total() > self._of.total():
            return self._newest(newcomers.most_common(1)[0][0])
        largest = max((peer for peer in self._of if peer != asker), key=self._of.__getitem__, default=None)
        if largest is None or not evenly:
            return None
        newest = self._newest(largest)
        left = self._of[largest] - self._held[newest].amount
        return newest if left >= self._of[asker] + amount else None

    def _newest(self, holder: PeerId) -> Item:
        return next(reversed(self._items[holder]))
