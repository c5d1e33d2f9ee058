"""Which nodes keep the keys of a DHT, as found by searches, and which few of them to query for many keys. Pure.

A search (`fusion.swarm.dht.lookup`) queries several nodes near each key; for many keys that is the whole swarm. All nodes that
keep a key have the same records, so between two searches it suffices to query one of them, another one each time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from fusion.swarm.dht.lookup import Key, Node


class Holders:
    """The `replicas` nearest nodes keep each key, and others that a search named; a result is used for `seconds`, unless a nearer
    node appears or it is dropped (`forget`)."""

    def __init__(self, replicas: int, seconds: float) -> None:
        self._replicas = replicas
        self._seconds = seconds
        # With the time until which it is used; ascending.
        self._found: dict[Key, tuple[float, tuple[Node, ...]]] = {}
        self._queried: dict[Key, Node] = {}  # last

    def found(self, nearest: Mapping[Key, Sequence[Node]], now: float) -> None:
        """Take in the nodes that a search found, the nearest to each key first; `now` in seconds of any clock."""
        for key, nodes in nearest.items():
            self._found.pop(key, None)
            self._found[key] = (now + self._seconds, tuple(nodes))
        while self._found and self._found[(oldest := next(iter(self._found)))][0] <= now:
            self.forget([oldest])

    def of(self, key: Key, known: Iterable[Node], now: float) -> tuple[Node, ...]:
        """The nodes that keep the key; empty where a search is needed. One is if a node among `known`, those that answer now, lies
        nearer to the key than the farthest replica and was not found."""
        until, nodes = self._found.get(key, (0.0, ()))
        if now >= until or not nodes:
            return ()
        nearest = nodes[: self._replicas]
        within = max(node.id ^ key for node in nearest) if len(nodes) >= self._replicas else 1 << 160
        newcomers = any(node.id ^ key < within and node not in nodes for node in known)
        return () if newcomers else nodes

    def forget(self, keys: Collection[Key] | None = None) -> None:
        """Drop the results for these keys, or for all."""
        for key in list(self._found) if keys is None else keys:
            self._found.pop(key, None)
            self._queried.pop(key, None)

    def queries(self, holders: Mapping[Key, Sequence[Node]], draw: random.Random) -> dict[Node, list[Key]]:
        """Few nodes, each with the keys to query it for: every key once, from one of its `holders`, and from another one than last
        time where there are two."""
        left = {
            key: [node for node in nodes if node != self._queried.get(key)] or list(nodes)
            for key, nodes in holders.items()
        }
        chosen: dict[Node, list[Key]] = {}
        while left:  # greedy set cover
            counts = Counter(node for nodes in left.values() for node in nodes)
            best = max(counts, key=lambda node: (counts[node], draw.random()))
            chosen[best] = [key for key, nodes in left.items() if best in nodes]
            for key in chosen[best]:
                del left[key]
                self._queried[key] = best
        return chosen
