"""The prefix cache of a stage: keys and values that are retained after their sessions have ended, and their eviction. Pure.

Entries are found only by the gateway that ran them. A middle stage never sees tokens, so it cannot verify that keys and values match
a chain of hashes: a stranger could poison the entries of others, and learn from response times what others have requested.

Eviction takes the least recently used entry of the gateway that holds most, so a gateway with many entries evicts its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, beginning, blocks_of, shared_blocks
from fusion.swarm.transport import PeerId

MAX_RETAINED = 256
MAX_PER_GATEWAY = 64
IDLE_SECONDS = 600.0


@dataclass(frozen=True)
class Retained:
    """An entry: keys and values of the blocks of `chain`."""

    name: int
    gateway: PeerId  # the gateway that ran them
    chain: bytes
    size_bytes: int  # 0 until it is known
    used_at: float

    @property
    def blocks(self) -> int:
        return blocks_of(self.chain)


class RetainedPrefixes:
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[int, Retained] = {}  # least recently used first
        self._names = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, gateway: PeerId, chain: bytes) -> tuple[Retained, int] | None:
        """The entry that shares most blocks with `chain`, and their number; counts as used. None where no entry shares any."""
        best, most = None, 0
        for entry in self._entries.values():
            if entry.gateway == gateway and (shared := shared_blocks(entry.chain, chain)) >= max(most, 1):
                best, most = entry, shared  # of equal ones the most recently used
        if best is None:
            return None
        return self._touch(best), most

    def add(self, gateway: PeerId, chain: bytes) -> tuple[int | None, list[int]]:
        """Add an entry for `chain`, of one block or more. Returns its name, None where an entry has these blocks already, and the names
        of the entries that it replaces or evicts."""
        gone = []
        for entry in [each for each in self._entries.values() if each.gateway == gateway]:
            shared = shared_blocks(entry.chain, chain)
            if shared == blocks_of(chain):
                self._touch(entry)
                return None, []
            if shared == entry.blocks:
                gone.append(entry.name)
        for name in gone:
            del self._entries[name]
        name = next(self._names)
        self._entries[name] = Retained(name, gateway, chain, 0, self._clock())
        of_gateway = [each.name for each in self._entries.values() if each.gateway == gateway]
        if len(of_gateway) > MAX_PER_GATEWAY:
            gone.append(of_gateway[0])
            del self._entries[of_gateway[0]]
        if len(self._entries) > MAX_RETAINED:
            counts = Counter(entry.gateway for entry in self._entries.values())
            gone.append(self._evict_from(counts).name)
        return name, gone

    def sized(self, name: int, positions: int, size_bytes: int) -> bool:
        """Set the real size of an entry. Whether it is still retained."""
        entry = self._entries.get(name)
        if entry is None or positions < BLOCK_POSITIONS:
            self._entries.pop(name, None)
            return False
        chain = beginning(entry.chain, positions)
        self._entries[name] = replace(entry, chain=chain, size_bytes=size_bytes)
        return True

    def remove(self, entry: Retained) -> None:
        """Idempotent."""
        self._entries.pop(entry.name, None)

    def put_back(self, entry: Retained) -> None:
        """Undo `remove`."""
        self._entries[entry.name] = entry

    def evict(self) -> Retained | None:
        """Evict an entry and return it; None where there is none."""
        sizes = Counter[PeerId]()
        for entry in self._entries.values():
            sizes[entry.gateway] += entry.size_bytes
        return self._evict_from(sizes) if sizes else None

    def expired(self) -> list[int]:
        """Evict the entries that were not used for IDLE_SECONDS; returns their names."""
        until = self._clock() - IDLE_SECONDS
        gone = [entry.name for entry in self._entries.values() if entry.used_at < until]
        for name in gone:
            del self._entries[name]
        return gone

    def _touch(self, entry: Retained) -> Retained:
        del self._entries[entry.name]
        used = self._entries[entry.name] = replace(entry, used_at=self._clock())
        return used

    def _evict_from(self, held: Counter[PeerId]) -> Retained:
        """Evict the least recently used entry of the gateway with the highest count."""
        gateway = max(held, key=held.__getitem__)
        entry = next(entry for entry in self._entries.values() if entry.gateway == gateway)
        del self._entries[entry.name]
        return entry
