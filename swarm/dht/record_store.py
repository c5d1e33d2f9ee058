"""The records that a node stores for others: bounded in all, by key and by record, in fair shares. Knows no signatures.

Records are charged to the account of their sender: as a rule the author, connected to us under the key it signs with, so that a
thousand authors made up by one peer have one peer's share, under each key as well. Where there is no room, the account with
most bytes loses the record that it renewed longest ago, possibly the sender's own. So a node that is full of one stranger's
records has room for everybody else's, however late they expire.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fusion.swarm.dht.values import MAX_SUBKEYS

OWN = ""  # the account of our own records: never evicted
MAX_OF_AN_AUTHOR = 64  # records under one key
_RECORD_BYTES = 600  # Python's overhead of a record

Slot = tuple[int, str]  # a key and a subkey


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    total_bytes: int = 64 << 20
    key_bytes: int = 768 << 10  # below an answer, which carries at least one whole key
    # Of these from one peer, or one network: readers of a key read all of it at every heartbeat.
    peer_key_bytes: int = 96 << 10
    network_key_bytes: int = 384 << 10
    subkeys: int = MAX_SUBKEYS

    def __post_init__(self) -> None:
        for name in ("total_bytes", "key_bytes", "peer_key_bytes", "network_key_bytes", "subkeys"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Kept:
    data: bytes
    until: float  # unix seconds
    sender: str  # the peer that sent it
    account: str  # charged for it: the sender, or its public network


def size_of(subkey: str, kept: Kept) -> int:
    return len(kept.data) + len(subkey) + _RECORD_BYTES


def author_in(subkey: str) -> str:
    return subkey.partition("/")[0]


def loser(shares: Mapping[str, int], newcomer: str, added: int) -> str | None:
    """The account whose records are evicted for `added` bytes of `newcomer`, which holds `shares[newcomer]` now: the largest one if
    it holds more than the newcomer then would; else the newcomer itself. None: the newcomer has nothing to evict, and is refused."""
    others = {account: held for account, held in shares.items() if account not in (OWN, newcomer) and held}
    most = max(others, key=lambda account: (others[account], account), default=None)
    if most is not None and others[most] > shares.get(newcomer, 0) + added:
        return most
    return newcomer if newcomer != OWN and shares.get(newcomer, 0) else None


def displaces(subkey: str, new: Kept, old: Kept) -> bool:
    """Whether a record replaces an older version of it. It has to expire later; and while its author itself stores it with us, no
    other sender may replace it (and have it charged to another account). Our own always does: it expires sooner than before once
    our clock was set back."""
    if new.account == OWN:
        return True
    author = author_in(subkey)
    if new.until == old.until:
        return new.sender == author != old.sender
    return new.until > old.until and (new.sender == author or old.sender != author)


@dataclass(slots=True)
class _AtKey:
    """The records under one key, with totals by account, kept up to date since strangers write to full keys."""

    records: dict[str, Kept] = field(default_factory=dict)  # by subkey
    shares: Counter[str] = field(default_factory=Counter)  # bytes by account
    # By account, least recently renewed first.
    subkeys: dict[str, dict[str, None]] = field(default_factory=dict)
    of_author: Counter[str] = field(default_factory=Counter)  # records
    bytes: int = 0

    def insert(self, subkey: str, kept: Kept) -> None:
        self.records[subkey] = kept
        self.subkeys.setdefault(kept.account, {})[subkey] = None
        self._count(subkey, kept, 1)

    def drop(self, subkey: str) -> Kept:
        kept = self.records.pop(subkey)
        del self.subkeys[kept.account][subkey]
        if not self.subkeys[kept.account]:
            del self.subkeys[kept.account]
        self._count(subkey, kept, -1)
        return kept

    def _count(self, subkey: str, kept: Kept, records: int) -> None:
        size, author = records * size_of(subkey, kept), author_in(subkey)
        self.bytes += size
        for counter, name, added in ((self.shares, kept.account, size), (self.of_author, author, records)):
            counter[name] += added
            if not counter[name]:
                del counter[name]


_NOTHING = _AtKey()


class RecordStore:
    def __init__(self, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self._keys: dict[int, _AtKey] = {}
        self._slots: dict[str, dict[Slot, None]] = {}  # of each account, least recently renewed first
        self._shares: Counter[str] = Counter()
        self._largest: list[tuple[int, str]] = []  # a heap of (-bytes, account); stale entries are skipped
        self._ends: list[tuple[float, Slot]] = []  # a heap, too
        self._records = 0
        self._total = 0

    def __len__(self) -> int:
        return self._records

    @property
    def shares(self) -> Mapping[str, int]:
        """Bytes by account."""
        return self._shares

    def keys(self) -> Iterator[int]:
        return iter(self._keys)

    def at(self, key: int, now: float) -> Mapping[str, Kept]:
        """The records under a key, by subkey."""
        self._expire(now)
        return self._keys.get(key, _NOTHING).records

    def put(self, key: int, subkey: str, kept: Kept, now: float) -> bool:
        """Store a record until it expires; whether it is stored now."""
        self._expire(now)
        old = self._keys.get(key, _NOTHING).records.get(subkey)
        if kept.until <= now or (old is not None and not displaces(subkey, kept, old)):
            return False
        if old is not None:
            self._drop((key, subkey))
        if not self._make_room(key, subkey, kept):
            if old is not None:
                self._insert((key, subkey), old)
            return False
        self._insert((key, subkey), kept)
        return True

    def _make_room(self, key: int, subkey: str, kept: Kept) -> bool:
        if kept.account == OWN:  # our own records can always be read from us
            return True
        size, limits = size_of(subkey, kept), self.limits
        at_key = self._keys.get(key, _NOTHING)
        author, several, _ = subkey.partition("/")
        if several and at_key.of_author[author] >= MAX_OF_AN_AUTHOR:
            return False
        most = limits.peer_key_bytes if kept.account == kept.sender else limits.network_key_bytes
        if size > most:
            return False
        while at_key.shares[kept.account] + size > most:
            self._drop((key, next(iter(at_key.subkeys[kept.account]))))
        while at_key.records and (
            len(at_key.records) >= limits.subkeys or at_key.bytes + size > limits.key_bytes
        ):
            if (account := loser(at_key.shares, kept.account, size)) is None:
                return False
            self._drop((key, next(iter(at_key.subkeys[account]))))
        return self._make_room_in_all(kept.account, size)

    def _make_room_in_all(self, account: str, size: int) -> bool:
        while self._total + size > self.limits.total_bytes:
            most = self._largest_account()
            pair = {account: self._shares[account]} | ({most: self._shares[most]} if most is not None else {})
            found = loser(pair, account, size)
            if found is None:
                return False
            self._drop(next(iter(self._slots[found])))
        return True

    def _largest_account(self) -> str | None:
        """The account with most bytes."""
        while self._largest and self._shares[self._largest[0][1]] != -self._largest[0][0]:
            heapq.heappop(self._largest)
        return self._largest[0][1] if self._largest else None

    def _insert(self, slot: Slot, kept: Kept) -> None:
        key, subkey = slot
        self._keys.setdefault(key, _AtKey()).insert(subkey, kept)
        self._slots.setdefault(kept.account, {})[slot] = None
        self._records += 1
        self._charge(kept.account, size_of(subkey, kept))
        self._push(self._ends, (kept.until, slot), lambda: [(k.until, s) for s, k in self._each()])

    def _drop(self, slot: Slot) -> None:
        key, subkey = slot
        kept = self._keys[key].drop(subkey)
        if not self._keys[key].records:
            del self._keys[key]
        del self._slots[kept.account][slot]
        if not self._slots[kept.account]:
            del self._slots[kept.account]
        self._records -= 1
        self._charge(kept.account, -size_of(subkey, kept))

    def _charge(self, account: str, size: int) -> None:
        self._total += size
        self._shares[account] += size
        if not self._shares[account]:
            del self._shares[account]
        elif account != OWN:
            entry = (-self._shares[account], account)
            self._push(
                self._largest, entry, lambda: [(-held, of) for of, held in self._shares.items() if of != OWN]
            )

    def _push(self, heap: list, entry: tuple, living: Callable[[], list]) -> None:  # type: ignore[type-arg]
        """Push `entry`; rebuild the heap from `living` once most of its entries are stale."""
        heapq.heappush(heap, entry)
        if len(heap) > 4 * self._records + 1024:
            heap[:] = living()
            heapq.heapify(heap)

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] < now:
            until, (key, subkey) = heapq.heappop(self._ends)
            kept = self._keys.get(key, _NOTHING).records.get(subkey)
            if kept is not None and kept.until == until:
                self._drop((key, subkey))

    def _each(self) -> Iterator[tuple[Slot, Kept]]:
        for key, at in self._keys.items():
            for subkey, kept in at.records.items():
                yield (key, subkey), kept
