"""Which nodes keep the keys of a DHT, as far as searches told, and which few of them to ask for many keys. Pure.

A search (`fusion.swarm.dht.lookup`) asks several nodes near each key: where the keys are many, the whole swarm.
Whoever keeps a key has what the others have that do, so between two searches one of them is enough, another one each
time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from fusion.swarm.dht.lookup import Key, Node


class Holders:
    """The `replicas` nearest nodes keep each key, and whoever else a search named to keep it; that is good for `seconds`, unless
    something speaks against it."""

    def __init__(self, replicas: int, seconds: float) -> None:
        self._replicas = replicas
        self._seconds = seconds
        # Until when; those that end first in front.
        self._found: dict[Key, tuple[float, tuple[Node, ...]]] = {}
        self._asked: dict[Key, Node] = {}  # last

    def found(self, nearest: Mapping[Key, Sequence[Node]], now: float) -> None:
        """A search met these nodes, the nearest to each key first; `now` in seconds of any clock."""
        for key, nodes in nearest.items():
            self._found.pop(key, None)
            self._found[key] = (now + self._seconds, tuple(nodes))
        while self._found and self._found[(oldest := next(iter(self._found)))][0] <= now:
            self.forget([oldest])

    def of(self, key: Key, known: Iterable[Node], now: float) -> tuple[Node, ...]:
        """The nodes that keep the key; none where a search has to tell: one of the nodes that are `known`, those that
        answer, may keep it too by now."""
        until, nodes = self._found.get(key, (0.0, ()))
        if now >= until or not nodes:
            return ()
        nearest = nodes[: self._replicas]
        within = max(node.id ^ key for node in nearest) if len(nodes) >= self._replicas else 1 << 160
        newcomers = any(node.id ^ key < within and node not in nodes for node in known)
        return () if newcomers else nodes

    def forget(self, keys: Collection[Key] | None = None) -> None:
        """Search anew for these keys, or for all."""
        for key in list(self._found) if keys is None else keys:
            self._found.pop(key, None)
            self._asked.pop(key, None)

    def questions(self, holders: Mapping[Key, Sequence[Node]], draw: random.Random) -> dict[Node, list[Key]]:
        """Few nodes, and for which keys to ask each: each key of one of its `holders`, and of another one than last time
        where there are two."""
        left = {
            key: [node for node in nodes if node != self._asked.get(key)] or list(nodes)
            for key, nodes in holders.items()
        }
        chosen: dict[Node, list[Key]] = {}
        while left:  # the greedy cover
            counts = Counter(node for nodes in left.values() for node in nodes)
            best = max(counts, key=lambda node: (counts[node], draw.random()))
            chosen[best] = [key for key, nodes in left.items() if best in nodes]
            for key in chosen[best]:
                del left[key]
                self._asked[key] = best
        return chosen
