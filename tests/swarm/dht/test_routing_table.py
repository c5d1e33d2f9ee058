"""Buckets, and who may come into them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.swarm.dht.lookup import Node
from fusion.swarm.dht.routing_table import BUCKET_NODES, RoutingTable, bucket_of
from fusion.swarm.subnets import MOST_IN_A_BUCKET, may_enter, subnet_of
from fusion.swarm.transport import PeerId

ids = st.integers(0, 2**160 - 1)


@pytest.mark.parametrize(
    ("address", "subnet"),
    [
        ("/ip4/203.0.114.7/tcp/1", "203.0.114.0/24"),
        ("/ip4/8.8.8.8/tcp/1/p2p/x", "8.8.8.0/24"),
        ("/ip6/2a00:1450:4001:82a::200e/tcp/1", "2a00:1450:4001::/48"),
        ("/ip4/127.0.0.1/tcp/1", None),
        ("/ip4/10.1.2.3/tcp/1", None),
        ("/ip4/192.168.0.3/udp/1/quic-v1", None),
        ("/ip6/::1/tcp/1", None),
        ("/ip6/fe80::1/tcp/1", None),
        ("/dns4/example.org/tcp/1", None),
        ("/ip4/nonsense", None),
        ("", None),
    ],
)
def test_public_addresses_have_a_subnet(address: str, subnet: str | None) -> None:
    assert subnet_of(address) == subnet


@given(st.lists(st.sampled_from(["1.2.3.0/24", "4.5.6.0/24", None])))
def test_two_of_a_subnet_are_let_in(others: list[str | None]) -> None:
    inside: list[str | None] = []
    for subnet in others:
        if may_enter(inside, subnet):
            inside.append(subnet)
    assert all(inside.count(s) == min(others.count(s), MOST_IN_A_BUCKET) for s in set(others) - {None})
    assert inside.count(None) == others.count(None)


@given(ids, ids, ids)
def test_who_shares_a_bucket_is_equally_far_by_five_bits(own: int, one: int, two: int) -> None:
    bucket = bucket_of(own, one)
    assert bucket[0] % 5 == 0
    if bucket == bucket_of(own, two):
        assert one >> (160 - bucket[0]) == two >> (160 - bucket[0])
    assert bucket_of(own, own)[0] == 160


@given(ids, st.integers(0, 2**32), st.integers(1, 400), st.integers(0, 3))
@settings(max_examples=examples(40))
def test_a_table_is_bounded_and_answers_with_the_nearest(
    own: int, seed: int, count: int, networks: int
) -> None:
    draw = random.Random(seed)
    table = RoutingTable(own)
    inside: dict[Node, str | None] = {}
    for n in range(count):
        shift = draw.choice([0, 0, 0, 20, 80])  # some of them near to us
        node = Node(own ^ (draw.getrandbits(160) >> shift), PeerId(str(n)))
        subnet = f"net {draw.randrange(networks)}" if networks and draw.random() < 0.5 else None
        if table.seen(node, subnet):
            inside[node] = subnet
        elif table.oldest_beside(node) is not None:
            assert table.oldest_beside(node) in inside
    assert set(table) == set(inside) and len(table) == len(inside)
    buckets: dict[object, list[str | None]] = {}
    for node, subnet in inside.items():
        assert node in table
        buckets.setdefault(bucket_of(own, node.id), []).append(subnet)
    for subnets in buckets.values():
        assert len(subnets) <= BUCKET_NODES
        assert all(subnets.count(s) <= MOST_IN_A_BUCKET for s in subnets if s is not None)
    key = draw.getrandbits(160)
    assert table.nearest(key, 7) == sorted(inside, key=lambda node: node.id ^ key)[:7]
    for node in inside:
        table.remove(node)
    assert not len(table)


def test_the_oldest_is_whoever_was_not_heard_of_longest() -> None:
    table = RoutingTable(0)
    far = [Node((1 << 159) + n, PeerId(str(n))) for n in range(BUCKET_NODES + 1)]
    assert [table.seen(node) for node in far] == [True] * BUCKET_NODES + [False]
    assert table.oldest_beside(far[-1]) == far[0]
    table.seen(far[0])
    assert table.oldest_beside(far[-1]) == far[1]
    table.remove(far[1])
    assert table.seen(far[-1])
    assert not table.seen(Node(0, PeerId("we")))
