"""Which prefixes a gateway expects its stages to retain, so that the next turn of a chat begins behind them before the stages have said
so. Pure."""

from __future__ import annotations

from cachetools import LRUCache

from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, HASH_BYTES, beginning, blocks_of
from fusion.runtime.serving.ring.retained import MAX_OF_HOLDER
from fusion.runtime.serving.ring.session import Hop

REMEMBERED_BLOCKS = 1 << 16

Route = tuple[Hop, ...]
UNKNOWN: tuple[Route, int] = ((), 0)  # a stage may hold something, and we cannot tell what


class ExpectedPrefixes:
    def __init__(self) -> None:
        # By the hash of a block, which stands for all before it: the route of the session that ended with it last, and how many had
        # ended by then.
        self._blocks: LRUCache[bytes, tuple[Route, int]] = LRUCache(REMEMBERED_BLOCKS)
        self._ended = 0

    def begin(self, chain: bytes, route: Route) -> int | None:
        """A session begins with these blocks: how many positions every stage of its route should hold, 0 where we cannot tell; None
        where no stage can hold anything."""
        hashes = _hashes(chain)
        found = next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in self._blocks), None)
        if hashes:
            self._blocks.setdefault(hashes[0], UNKNOWN)
        if found is None:
            return None
        where, at = self._blocks[hashes[found - 1]]
        # No stage retains more of ours than that.
        retained = where == route and self._ended - at < MAX_OF_HOLDER
        return found * BLOCK_POSITIONS if retained else 0

    def end(self, chain: bytes, route: Route, reached: int) -> None:
        """The stages may retain what they have of these blocks: every one of the route has run so many positions."""
        if chain:
            self._ended += 1
            self._blocks.setdefault(_hashes(chain)[0], UNKNOWN)
        for block in _hashes(beginning(chain, reached)):
            self._blocks[block] = route, self._ended

    def forget(self, chain: bytes) -> None:
        """A stage holds less of it than was expected."""
        first, *others = _hashes(chain)
        self._blocks[first] = UNKNOWN
        for block in others:
            self._blocks.pop(block, None)


def _hashes(chain: bytes) -> list[bytes]:
    return [chain[n * HASH_BYTES : (n + 1) * HASH_BYTES] for n in range(blocks_of(chain))]
