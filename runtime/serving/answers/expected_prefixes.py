"""Which prefixes a gateway expects in its stages' caches, so that the next turn of a chat starts behind them without waiting for the
stages to confirm. Pure."""

from __future__ import annotations

from cachetools import LRUCache

from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, HASH_BYTES, beginning, blocks_of
from fusion.runtime.serving.ring.retained import MAX_PER_GATEWAY
from fusion.runtime.serving.ring.session import Hop

REMEMBERED_BLOCKS = 1 << 16

Route = tuple[Hop, ...]
UNKNOWN: tuple[Route, int] = ((), 0)  # a stage may hold some of it, but it is not known which


class ExpectedPrefixes:
    def __init__(self) -> None:
        # Hash of a block, which stands for all before it -> the route of the last session that ended with it, and how many sessions
        # had ended by then.
        self._blocks: LRUCache[bytes, tuple[Route, int]] = LRUCache(REMEMBERED_BLOCKS)
        self._ended = 0

    def begin(self, chain: bytes, route: Route) -> int | None:
        """A session begins with these blocks. Returns how many positions every stage of its route should hold, 0 where that is unknown,
        None where no stage can hold any."""
        hashes = _hashes(chain)
        longest = next((n for n in range(len(hashes), 0, -1) if hashes[n - 1] in self._blocks), None)
        if hashes:
            self._blocks.setdefault(hashes[0], UNKNOWN)
        if longest is None:
            return None
        where, at = self._blocks[hashes[longest - 1]]
        # A stage retains at most so many for one gateway.
        retained = where == route and self._ended - at < MAX_PER_GATEWAY
        return longest * BLOCK_POSITIONS if retained else 0

    def end(self, chain: bytes, route: Route, reached: int) -> None:
        """The stages may retain these blocks: each of the route has run `reached` positions."""
        if chain:
            self._ended += 1
            self._blocks.setdefault(_hashes(chain)[0], UNKNOWN)
        for block in _hashes(beginning(chain, reached)):
            self._blocks[block] = route, self._ended

    def forget(self, chain: bytes) -> None:
        """A stage held less of it than expected."""
        first, *others = _hashes(chain)
        self._blocks[first] = UNKNOWN
        for block in others:
            self._blocks.pop(block, None)


def _hashes(chain: bytes) -> list[bytes]:
    return [chain[n * HASH_BYTES : (n + 1) * HASH_BYTES] for n in range(blocks_of(chain))]
