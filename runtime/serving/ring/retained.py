"""Which sequences a stage keeps the keys and values of once their sessions have ended, and which of them give way. Pure.

They are found by the gateway that ran them and by nobody else. A stage in the middle never sees tokens, so it cannot check that
keys and values are those of the sequence that a chain of hashes says: a stranger could fill what others find with nonsense, and
learn from the time that an answer takes what others have asked.

What gives way is what whoever holds most has not used for longest: a gateway that leaves many sequences here pushes out its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, beginning, blocks_of, shared_blocks
from fusion.swarm.transport import PeerId

MAX_RETAINED = 256
MAX_OF_HOLDER = 64
IDLE_SECONDS = 600.0


@dataclass(frozen=True)
class Retained:
    """Keys and values of the blocks of `chain`."""

    name: int
    holder: PeerId  # the gateway that ran them
    chain: bytes
    size_bytes: int  # 0 until it is known
    used_at: float

    @property
    def blocks(self) -> int:
        return blocks_of(self.chain)


class RetainedPrefixes:
    """`clock` gives seconds that only rise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[int, Retained] = {}  # what was not used for longest first
        self._names = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, holder: PeerId, chain: bytes) -> tuple[Retained, int] | None:
        """What shares most blocks with `chain`, and how many these are; it is used now. None where nothing shares any."""
        best, most = None, 0
        for entry in self._entries.values():
            if entry.holder == holder and (shared := shared_blocks(entry.chain, chain)) >= max(most, 1):
                best, most = entry, shared  # of several the newest
        if best is None:
            return None
        return self._used(best), most

    def add(self, holder: PeerId, chain: bytes) -> tuple[int | None, list[int]]:
        """Keep the blocks of `chain`, one or more: under which name, and which others go for it. No name: they are kept
        already."""
        gone = []
        for entry in [each for each in self._entries.values() if each.holder == holder]:
            shared = shared_blocks(entry.chain, chain)
            if shared == blocks_of(chain):
                self._used(entry)
                return None, []
            if shared == entry.blocks:
                gone.append(entry.name)
        for name in gone:
            del self._entries[name]
        name = next(self._names)
        self._entries[name] = Retained(name, holder, chain, 0, self._clock())
        of_holder = [each.name for each in self._entries.values() if each.holder == holder]
        if len(of_holder) > MAX_OF_HOLDER:
            gone.append(of_holder[0])
            del self._entries[of_holder[0]]
        if len(self._entries) > MAX_RETAINED:
            counts = Counter(entry.holder for entry in self._entries.values())
            gone.append(self._first_of(counts).name)
        return name, gone

    def sized(self, name: int, positions: int, size_bytes: int) -> bool:
        """How much of it there really is. Whether it is still kept."""
        entry = self._entries.get(name)
        if entry is None or positions < BLOCK_POSITIONS:
            self._entries.pop(name, None)
            return False
        chain = beginning(entry.chain, positions)
        self._entries[name] = replace(entry, chain=chain, size_bytes=size_bytes)
        return True

    def remove(self, entry: Retained) -> None:
        """Harmless where it has gone."""
        self._entries.pop(entry.name, None)

    def put_back(self, entry: Retained) -> None:
        """It was removed, and is there all the same."""
        self._entries[entry.name] = entry

    def yields(self) -> Retained | None:
        """What gives way now, which has gone by then. None where nothing is left."""
        sizes = Counter[PeerId]()
        for entry in self._entries.values():
            sizes[entry.holder] += entry.size_bytes
        return self._first_of(sizes) if sizes else None

    def expired(self) -> list[int]:
        """What was not used for IDLE_SECONDS, and has gone by then."""
        until = self._clock() - IDLE_SECONDS
        gone = [entry.name for entry in self._entries.values() if entry.used_at < until]
        for name in gone:
            del self._entries[name]
        return gone

    def _used(self, entry: Retained) -> Retained:
        del self._entries[entry.name]
        used = self._entries[entry.name] = replace(entry, used_at=self._clock())
        return used

    def _first_of(self, held: Counter[PeerId]) -> Retained:
        """What was not used for longest, of whoever has most of what is counted: it goes."""
        holder = max(held, key=held.__getitem__)
        entry = next(entry for entry in self._entries.values() if entry.holder == holder)
        del self._entries[entry.name]
        return entry
