"""The routing table: Kademlia's buckets (Maymounkov and Mazieres 2002, sections 2.4 and 4.2, b = 5), with at most two nodes of
a public network in each, so that the owner of one network cannot fill our neighbourhood. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fusion.swarm.dht.lookup import Node
from fusion.swarm.subnets import may_enter

BUCKET_NODES = 20
_BITS = 160
_DEPTH_STEP = 5

Bucket = tuple[int, int]  # the length of an id's prefix in bits, and the prefix


def bucket_of(own: int, other: int) -> Bucket:
    """The bucket of an id: its prefix up to the next multiple of five bits above those that it shares with ours."""
    shared = _BITS - (own ^ other).bit_length()
    depth = min(_BITS, (shared // _DEPTH_STEP + 1) * _DEPTH_STEP)
    return depth, other >> (_BITS - depth)


class RoutingTable:
    def __init__(self, own: int) -> None:
        self._own = own
        # With their subnets, least recently seen first
        self._buckets: dict[Bucket, dict[Node, str | None]] = {}

    def __iter__(self) -> Iterator[Node]:
        for bucket in self._buckets.values():
            yield from bucket

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __contains__(self, node: Node) -> bool:
        return node in self._buckets.get(bucket_of(self._own, node.id), ())

    def seen(self, node: Node, subnet: str | None = None) -> bool:
        """Note a message from the node itself; whether it is in the table now. A full bucket admits no new node, so long-lived
        ones stay."""
        bucket = self._buckets.setdefault(bucket_of(self._own, node.id), {})
        if node in bucket:
            bucket[node] = bucket.pop(node)
            return True
        if node.id == self._own or len(bucket) >= BUCKET_NODES or not may_enter(bucket.values(), subnet):
            return False
        bucket[node] = subnet
        return True

    def oldest_beside(self, node: Node) -> Node | None:
        """The node to evict for `node`: the least recently seen of its bucket, where that is full."""
        bucket = self._buckets.get(bucket_of(self._own, node.id), {})
        return next(iter(bucket)) if len(bucket) >= BUCKET_NODES else None

    def remove(self, node: Node) -> None:
        self._buckets.get(bucket_of(self._own, node.id), {}).pop(node, None)

    def nearest(self, key: int, count: int) -> list[Node]:
        """The nodes nearest to a key, the nearest first."""
        return heapq.nsmallest(count, self, key=lambda node: node.id ^ key)
