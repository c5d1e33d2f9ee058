"""Which nodes we know: Kademlia's buckets (Maymounkov and Mazieres 2002, sections 2.4 and 4.2, b = 5), with at most two
of a public network in each, so that whoever owns one network does not become all of our neighbourhood. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fusion.swarm.dht.lookup import Node
from fusion.swarm.subnets import may_enter

BUCKET_NODES = 20
_BITS = 160
_DEPTH_STEP = 5

Bucket = tuple[int, int]  # how many bits of an id it is about, and these


def bucket_of(own: int, other: int) -> Bucket:
    """Far from us a bucket is all ids with the same first five bits; the nearer, the more bits, five at a time."""
    shared = _BITS - (own ^ other).bit_length()
    depth = min(_BITS, (shared // _DEPTH_STEP + 1) * _DEPTH_STEP)
    return depth, other >> (_BITS - depth)


class RoutingTable:
    def __init__(self, own: int) -> None:
        self._own = own
        # With their subnets; the one seen last comes last
        self._buckets: dict[Bucket, dict[Node, str | None]] = {}

    def __iter__(self) -> Iterator[Node]:
        for bucket in self._buckets.values():
            yield from bucket

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __contains__(self, node: Node) -> bool:
        return node in self._buckets.get(bucket_of(self._own, node.id), ())

    def seen(self, node: Node, subnet: str | None = None) -> bool:
        """A node was heard of by itself; whether it is in the table now. Whoever has long been there stays: a full bucket
        takes nobody."""
        bucket = self._buckets.setdefault(bucket_of(self._own, node.id), {})
        if node in bucket:
            bucket[node] = bucket.pop(node)
            return True
        if node.id == self._own or len(bucket) >= BUCKET_NODES or not may_enter(bucket.values(), subnet):
            return False
        bucket[node] = subnet
        return True

    def oldest_beside(self, node: Node) -> Node | None:
        """The node that would have to make room for `node`: of a full bucket the one not heard of for the longest."""
        bucket = self._buckets.get(bucket_of(self._own, node.id), {})
        return next(iter(bucket)) if len(bucket) >= BUCKET_NODES else None

    def remove(self, node: Node) -> None:
        self._buckets.get(bucket_of(self._own, node.id), {}).pop(node, None)

    def nearest(self, key: int, count: int) -> list[Node]:
        """The nodes nearest to a key, the nearest first."""
        return heapq.nsmallest(count, self, key=lambda node: node.id ^ key)
