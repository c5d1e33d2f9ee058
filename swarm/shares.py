"""Who holds how much of what there is not enough of, and who gives way once it has run out. Pure.

While there is room nobody is refused. When there is none, whoever asks gets in where another gives way; in this order:

    what lies idle     the item that was not used for longest, whoever holds it
    newcomers          where a peer asks that has completed something here: peers that never did hold at most half together.
                       Ids are free, so no share of each could bound them
    the largest share  the peer that holds most gives its newest item, if it is left with no less than the asker has

Otherwise the asker is told that we are busy. The last rule takes from nobody for the sake of one who holds as much,
so what runs is not traded to and fro.
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
    """`limit` of all amounts together; without one, `room` is for others to know. `clock` gives seconds that only rise."""

    def __init__(
        self, clock: Callable[[], float], limit: float = math.inf, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._clock = clock
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._held: dict[Item, _Held] = {}  # that which was not used for longest first
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
        """Items of it."""
        return len(self._items.get(holder, ()))

    def alone(self, holder: PeerId) -> bool:
        """Whether nobody else holds anything."""
        return not self._items.keys() - {holder}

    def fits(self, amount: int) -> bool:
        """Whether there could be room for it, if nobody held anything."""
        return amount <= self._limit

    def room(self, amount: int = 1) -> bool:
        return self._of.total() + amount <= self._limit

    def take(self, item: Item, holder: PeerId, amount: int = 1) -> None:
        """Count it, whether or not there is room."""
        self._held[item] = _Held(holder, amount, self._clock())
        self._items.setdefault(holder, {})[item] = None
        self._of[holder] += amount

    def use(self, item: Item) -> None:
        """It did something. Harmless where it is not held."""
        held = self._held.pop(item, None)
        if held is not None:
            self._held[item] = _Held(held.holder, held.amount, self._clock())

    def used(self, used_at: Mapping[Item, float]) -> None:
        """When items did something last, where that is known afterwards only. Harmless for those that are not held."""
        for item, at in used_at.items():
            held = self._held.get(item)
            if held is not None and at > held.used_at:
                self._held[item] = _Held(held.holder, held.amount, at)
        self._held = dict(sorted(self._held.items(), key=lambda each: each[1].used_at))

    def release(self, item: Item, *, completed: bool = False) -> None:
        """Harmless where it is not held. `completed`: it served its purpose, which speaks for its holder."""
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
        """What gives way to `amount` more for `asker`; None where nothing does. The caller releases it. `evenly` False: the largest
        share gives nothing, as what is ended would only begin anew."""
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
