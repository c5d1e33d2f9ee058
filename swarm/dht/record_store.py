"""What a node keeps for others: bounded in all, by key and by record, and shared out fairly. Knows no signatures.

Everything is charged to whoever sent it: its author as a rule, who is connected to us under the key it signs with, so
that a thousand authors made up by one peer share what is one peer's, under each key as well. Where there is no room, whoever
takes most loses what it renewed longest ago; a sender that takes most itself loses its own. So a node that is full of one
stranger's records has room for everybody else's, however late they end.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fusion.swarm.dht.values import MAX_SUBKEYS

OWN = ""  # the account of what we publish ourselves: never made room of
MAX_OF_AN_AUTHOR = 64  # records under one key
_RECORD_BYTES = 600  # what Python takes for a record beside its bytes

Slot = tuple[int, str]  # a key and a subkey


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    total_bytes: int = 64 << 20
    key_bytes: int = 768 << 10  # an answer carries at least one key
    # Of these what one peer has sent, or one network: whoever works under a key reads all of it at every heartbeat.
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
    account: str  # whose share it takes: the sender's, or that of its network


def size_of(subkey: str, kept: Kept) -> int:
    return len(kept.data) + len(subkey) + _RECORD_BYTES


def author_in(subkey: str) -> str:
    return subkey.partition("/")[0]


def loser(shares: Mapping[str, int], newcomer: str, added: int) -> str | None:
    """Whose records make room for `added` bytes of `newcomer`, which holds `shares[newcomer]` now: whoever holds more than
    it would then, and of them who holds most; else the newcomer itself. None: it has nothing to give, and is refused."""
    others = {account: held for account, held in shares.items() if account not in (OWN, newcomer) and held}
    most = max(others, key=lambda account: (others[account], account), default=None)
    if most is not None and others[most] > shares.get(newcomer, 0) + added:
        return most
    return newcomer if newcomer != OWN and shares.get(newcomer, 0) else None


def displaces(subkey: str, new: Kept, old: Kept) -> bool:
    """Whether a record takes the place of an older version of it. It has to end later; and while its author itself keeps
    it with us, nobody else does that for it (and has it charged to another account). What we say ourselves always does:
    it ends sooner than before once our clock was set back."""
    if new.account == OWN:
        return True
    author = author_in(subkey)
    if new.until == old.until:
        return new.sender == author != old.sender
    return new.until > old.until and (new.sender == author or old.sender != author)


@dataclass(slots=True)
class _AtKey:
    """What is kept under one key, and what of it is whose: counted as it comes, since strangers write to full keys."""

    records: dict[str, Kept] = field(default_factory=dict)  # by subkey
    shares: Counter[str] = field(default_factory=Counter)  # bytes by account
    subkeys: dict[str, dict[str, None]] = field(default_factory=dict)  # by account, renewed longest ago first
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
        self._slots: dict[str, dict[Slot, None]] = {}  # of each account, renewed longest ago first
        self._shares: Counter[str] = Counter()
        self._largest: list[tuple[int, str]] = []  # a heap, -bytes first; what is no longer so is passed over
        self._ends: list[tuple[float, Slot]] = []  # a heap as well
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
        """What is kept under a key, by subkey."""
        self._expire(now)
        return self._keys.get(key, _NOTHING).records

    def put(self, key: int, subkey: str, kept: Kept, now: float) -> bool:
        """Keep a record until it ends; whether it is kept now."""
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
        if kept.account == OWN:  # what we say about ourselves can always be had from us
            return True
        size, limits = size_of(subkey, kept), self.limits
        beside = self._keys.get(key, _NOTHING)
        author, several, _ = subkey.partition("/")
        if several and beside.of_author[author] >= MAX_OF_AN_AUTHOR:
            return False
        most = limits.peer_key_bytes if kept.account == kept.sender else limits.network_key_bytes
        if size > most:
            return False
        while beside.shares[kept.account] + size > most:
            self._drop((key, next(iter(beside.subkeys[kept.account]))))
        while beside.records and (
            len(beside.records) >= limits.subkeys or beside.bytes + size > limits.key_bytes
        ):
            if (account := loser(beside.shares, kept.account, size)) is None:
                return False
            self._drop((key, next(iter(beside.subkeys[account]))))
        return self._fits_in_all(kept.account, size)

    def _fits_in_all(self, account: str, size: int) -> bool:
        while self._total + size > self.limits.total_bytes:
            most = self._most()
            pair = {account: self._shares[account]} | ({most: self._shares[most]} if most is not None else {})
            found = loser(pair, account, size)
            if found is None:
                return False
            self._drop(next(iter(self._slots[found])))
        return True

    def _most(self) -> str | None:
        """The account that takes most."""
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
        """`entry`, and where most of a heap is no longer so, only what is."""
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
