"""What a gateway left on the stages: of which sequences they should still have keys and values, so that the next turn of a chat begins
behind these before the stages have said so. Pure."""

from __future__ import annotations

from cachetools import LRUCache

from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, HASH_BYTES, beginning, blocks_of
from fusion.runtime.serving.ring.retained import MAX_OF_HOLDER
from fusion.runtime.serving.ring.session import Hop

REMEMBERED_BLOCKS = 1 << 16

Route = tuple[Hop, ...]


class LeftPrefixes:
    def __init__(self) -> None:
        # By the hash of a block, which stands for all before it: the route of the session that ended with it last, and how many had
        # ended by then; no route, where one is under way.
        self._left: LRUCache[bytes, tuple[Route, int]] = LRUCache(REMEMBERED_BLOCKS)
        self._ended = 0

    def begin(self, chain: bytes, route: Route) -> int | None:
        """A session begins with these blocks: how many positions every stage of its route should hold, 0 where we cannot tell; None
        where no stage can hold anything."""
        found = next((n for n in range(blocks_of(chain), 0, -1) if _block(chain, n) in self._left), None)
        if chain:
            self._left.setdefault(_block(chain, 1), ((), 0))
        if found is None:
            return None
        where, at = self._left[_block(chain, found)]
        # No stage keeps more of ours than that.
        kept = where == route and self._ended - at < MAX_OF_HOLDER
        return found * BLOCK_POSITIONS if kept else 0

    def end(self, chain: bytes, route: Route, reached: int) -> None:
        """The stages may keep what they have of these blocks: every one of the route has run so many positions."""
        if chain:
            self._ended += 1
            self._left.setdefault(_block(chain, 1), ((), 0))
        for n in range(1, blocks_of(beginning(chain, reached)) + 1):
            self._left[_block(chain, n)] = route, self._ended


def _block(chain: bytes, number: int) -> bytes:
    return chain[(number - 1) * HASH_BYTES : number * HASH_BYTES]
