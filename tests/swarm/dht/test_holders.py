from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.swarm.dht.holders import Holders
from fusion.swarm.dht.lookup import Node
from fusion.swarm.transport import PeerId

REPLICAS, SECONDS = 5, 60.0


def node(number: int) -> Node:
    return Node(number, PeerId(f"p{number}"))


def swarm(size: int, draw: random.Random) -> list[Node]:
    return [Node(draw.getrandbits(160), PeerId(f"p{i}")) for i in range(size)]


def found_by_search(nodes: list[Node], keys: list[int]) -> Holders:
    """As after a search for the keys."""
    holders = Holders(REPLICAS, SECONDS)
    holders.found({key: sorted(nodes, key=lambda node: node.id ^ key)[:REPLICAS] for key in keys}, now=0.0)
    return holders


def test_what_a_search_told_lasts_for_a_while() -> None:
    holders, nodes = Holders(REPLICAS, SECONDS), [node(i) for i in range(REPLICAS + 2)]
    assert holders.of(0, (), now=0.0) == ()
    holders.found({0: nodes, 1: []}, now=10.0)
    assert holders.of(0, nodes, now=69.0) == tuple(nodes)
    assert holders.of(1, nodes, now=10.0) == ()  # nobody answered
    assert holders.of(0, nodes, now=70.0) == ()
    holders.found({0: nodes}, now=80.0)
    holders.forget([0])
    assert holders.of(0, nodes, now=80.0) == ()
    holders.found({0: nodes, 2: nodes}, now=80.0)
    holders.forget()
    assert holders.of(0, nodes, now=80.0) == holders.of(2, nodes, now=80.0) == ()


def test_a_node_that_is_nearer_has_to_be_searched_for() -> None:
    holders, nodes = Holders(REPLICAS, SECONDS), [node(10 * i) for i in range(1, 6)]
    holders.found({0: nodes}, now=0.0)
    assert holders.of(0, [*nodes, node(51)], now=1.0) == tuple(nodes)
    assert holders.of(0, [*nodes, node(49)], now=1.0) == ()
    # Where there are fewer nodes than copies, each one that comes keeps one.
    holders.found({0: nodes[:4]}, now=0.0)
    assert holders.of(0, nodes[:4], now=1.0) == tuple(nodes[:4])
    assert holders.of(0, [*nodes[:4], node(9999)], now=1.0) == ()


@given(size=st.integers(1, 200), count=st.integers(1, 32), seed=st.integers(0, 2**32))
@settings(max_examples=examples(40))
def test_each_key_is_asked_of_one_holder_and_of_another_next_time(size: int, count: int, seed: int) -> None:
    draw = random.Random(seed)
    nodes, keys = swarm(size, draw), [draw.getrandbits(160) for _ in range(count)]
    holders = found_by_search(nodes, keys)
    kept = {key: holders.of(key, nodes, now=1.0) for key in keys}
    last: dict[int, Node] = {}
    for _ in range(3):
        queries = holders.queries(kept, draw)
        queried = {key: node for node, keys in queries.items() for key in keys}
        assert sum(map(len, queries.values())) == len(kept) and queried.keys() == kept.keys()
        for key, node in queried.items():
            assert node in kept[key]
            assert len(kept[key]) == 1 or node != last.get(key)
        last = queried


@pytest.mark.parametrize(("size", "most"), [(8, 5), (24, 14), (1000, 32)])
def test_few_nodes_are_asked_however_large_the_swarm_is(size: int, most: int) -> None:
    draw = random.Random(1)
    nodes, keys = swarm(size, draw), [draw.getrandbits(160) for _ in range(32)]
    holders = found_by_search(nodes, keys)
    kept = {key: holders.of(key, nodes, now=1.0) for key in keys}
    for _ in range(5):
        assert len(holders.queries(kept, draw)) <= most


def test_nothing_is_asked_where_nobody_is_known() -> None:
    assert Holders(REPLICAS, SECONDS).queries({}, random.Random(1)) == {}
