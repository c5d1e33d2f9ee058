"""Which blobs a store may delete: pure rules over what it holds.

What somebody on this peer needs (`Needs`) stays whatever happens, and so does what was used a short while ago, for it
may be in use. The rest makes room for what is fetched, the longest unused first, and goes by itself after a day.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from fusion.swarm.directory.records import Digest

FRESH_SECONDS = 600.0  # a blob that was used so recently is not deleted
KEPT_SECONDS = 86_400.0  # what nobody needs is deleted once it was unused for so long


@dataclass(frozen=True)
class Held:
    """A whole blob in the store. `used_at`: unix seconds."""

    size_bytes: int
    used_at: float


class Needs:
    """What is needed here, by whom. A holder that is gone needs nothing any more. Safe to use from several threads."""

    def __init__(self) -> None:
        self.told = False  # whether anybody has said what it needs: before, in a process that starts, nothing is known
        self._needs: WeakKeyDictionary[object, frozenset[Digest]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def hold(self, holder: object, digests: Iterable[Digest]) -> None:
        """From now on `holder`, for as long as it exists, needs these blobs and none that it named before."""
        needed = frozenset(digests)
        with self._lock:
            self._needs[holder] = needed
            self.told = True

    def all(self) -> frozenset[Digest]:
        with self._lock:
            return frozenset().union(*self._needs.values())


def victims(
    held: Mapping[Digest, Held], needed: Collection[Digest], wanted_bytes: int, now: float
) -> list[Digest]:
    """What to delete so that `wanted_bytes` are free which are not now, in that order; empty where that cannot be."""
    chosen: list[Digest] = []
    freed = 0
    for digest, blob in sorted(held.items(), key=lambda item: item[1].used_at):
        if freed >= wanted_bytes:
            break
        if digest not in needed and now - blob.used_at >= FRESH_SECONDS:
            chosen.append(digest)
            freed += blob.size_bytes
    return chosen if freed >= wanted_bytes else []


def outdated(held: Mapping[Digest, Held], needed: Collection[Digest], now: float) -> list[Digest]:
    """What nobody has needed or used for KEPT_SECONDS."""
    return [
        digest for digest, blob in held.items() if digest not in needed and now - blob.used_at >= KEPT_SECONDS
    ]


def to_announce(
    held: Mapping[Digest, Held], needed: Collection[Digest], limit: int, now: float
) -> list[Digest]:
    """The blobs that the swarm is told of: what is needed here, and what was used lately, at most `limit`, the latest
    first. However much lies on the disk beside it costs nothing."""
    worth = [
        (digest not in needed, -blob.used_at, digest)
        for digest, blob in held.items()
        if digest in needed or now - blob.used_at < FRESH_SECONDS
    ]
    return [digest for *_, digest in sorted(worth)[:limit]]
