"""Which blobs a store may evict: pure rules over what it holds.

Blobs that are needed on this peer (`Needs`) are never evicted, nor are recently used ones, which may be in use. The others make room
for new ones, least recently used first, and are deleted after a day without use.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from fusion.swarm.directory.records import Digest

FRESH_SECONDS = 600.0  # a blob that was used so recently is not deleted
KEPT_SECONDS = 86_400.0  # a blob that is not needed is deleted after so long without use


@dataclass(frozen=True)
class Held:
    """A whole blob in the store. `used_at`: unix seconds."""

    size_bytes: int
    used_at: float


class Needs:
    """The blobs that are needed here, by holder; those of a deleted holder are needed no more. Thread-safe."""

    def __init__(self) -> None:
        self.known = False  # False until the first `hold`: a starting process does not know its needs yet
        self._needs: WeakKeyDictionary[object, frozenset[Digest]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def hold(self, holder: object, digests: Iterable[Digest]) -> None:
        """`holder` needs these blobs until it is deleted or calls this again."""
        needed = frozenset(digests)
        with self._lock:
            self._needs[holder] = needed
            self.known = True

    def all(self) -> frozenset[Digest]:
        with self._lock:
            return frozenset().union(*self._needs.values())


def victims(
    held: Mapping[Digest, Held], needed: Collection[Digest], wanted_bytes: int, now: float
) -> list[Digest]:
    """The blobs to evict, in that order, to free `wanted_bytes` more; empty where that is impossible."""
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
    """The blobs that are not needed and were not used for KEPT_SECONDS."""
    return [
        digest for digest, blob in held.items() if digest not in needed and now - blob.used_at >= KEPT_SECONDS
    ]


def to_announce(
    held: Mapping[Digest, Held], needed: Collection[Digest], limit: int, now: float
) -> list[Digest]:
    """The blobs to announce, at most `limit`: needed ones first, then recently used ones, the latest first. Others on the disk cost
    nothing."""
    worth = [
        (digest not in needed, -blob.used_at, digest)
        for digest, blob in held.items()
        if digest in needed or now - blob.used_at < FRESH_SECONDS
    ]
    return [digest for *_, digest in sorted(worth)[:limit]]
