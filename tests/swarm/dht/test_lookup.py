from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import instant_loop
from support.examples import examples
from support.held_up import Calls

from fusion.swarm.dht import lookup as lookup_module
from fusion.swarm.dht.lookup import KEYS_AT_ONCE, Found, LookupConfig, Node, NodeReply, lookup
from fusion.swarm.transport import PeerId

BITS = 160
CONFIG = LookupConfig(breadth=4, patience_seconds=0.02)


class World:
    """Nodes that know their neighbourhood and, at each distance, some of the rest, as Kademlia's routing tables do."""

    def __init__(self, size: int, seed: int) -> None:
        draw = random.Random(seed)
        self.nodes = [Node(draw.getrandbits(BITS), PeerId(f"p{i}")) for i in range(size)]
        self.knows: dict[Node, list[Node]] = {}
        for node in self.nodes:
            near = sorted(self.nodes, key=lambda other: other.id ^ node.id)[1:21]
            buckets: dict[int, list[Node]] = {}
            for other in self.nodes:
                buckets.setdefault((other.id ^ node.id).bit_length(), []).append(other)
            far = [some for found in buckets.values() for some in draw.sample(found, min(len(found), 3))]
            self.knows[node] = [*near, *far]
        self.values: dict[Node, dict[int, dict[str, bytes]]] = {node: {} for node in self.nodes}
        self.dead: set[Node] = set()
        self.asked: list[Node] = []

    def nearest(self, key: int, count: int) -> list[Node]:
        living = [node for node in self.nodes if node not in self.dead]
        return sorted(living, key=lambda node: node.id ^ key)[:count]

    async def ask(self, node: Node, keys: tuple[int, ...]) -> NodeReply | None:
        self.asked.append(node)
        await asyncio.sleep(0)
        if node in self.dead:
            return None
        nearest = {key: sorted(self.knows[node], key=lambda n: n.id ^ key)[:20] for key in keys}
        return NodeReply({key: self.values[node].get(key, {}) for key in keys}, nearest)

    async def find(self, keys: list[int], start: Node) -> Found:
        return await lookup(keys, lambda key: [start, *self.knows[start]], self.ask, CONFIG)


@given(size=st.integers(1, 120), seed=st.integers(0, 2**32), count=st.integers(1, 5))
@example(size=117, seed=479001599, count=4)
@settings(max_examples=examples(30))
def test_a_lookup_finds_what_lies_at_the_nearest_nodes(size: int, seed: int, count: int) -> None:
    world = World(size, seed)
    draw = random.Random(seed + 1)
    keys = [draw.getrandbits(BITS) for _ in range(count)]
    for key in keys:
        world.values[world.nearest(key, 1)[0]][key] = {"a": b"new"}
        world.values[world.nearest(key, 2)[-1]].setdefault(key, {}).update({"b": b"other"})
    found = asyncio.run(world.find(keys, world.nodes[0]))
    for key in keys:
        assert set(found.values[key]["a"]) == {b"new"}
        assert set(found.values[key]["b"]) == {b"other"}
        assert found.nearest[key][0] == world.nearest(key, 1)[0]
    assert len(world.asked) <= CONFIG.rounds * CONFIG.breadth * count


def test_others_run_while_hundreds_of_keys_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    world, draw = World(4, 1), random.Random(2)
    keys = [draw.getrandbits(BITS) for _ in range(512)]
    calls = Calls()
    for name in ("_paths", "_next", "_add_reply", "_abandon_paths"):
        monkeypatch.setattr(lookup_module, name, calls.counted(getattr(lookup_module, name)))

    async def main() -> Found:
        async with calls.beside_others():
            return await world.find(keys, world.nodes[0])

    found = asyncio.run(main())
    assert set(found.nearest) == set(keys)
    assert 0 < calls.most <= 2 * KEYS_AT_ONCE <= 64


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(20))
@example(seed=1080667574)  # both paths that know the holder are left, each for one of the dead
def test_dead_nodes_are_passed_by(seed: int) -> None:
    world = World(40, seed)
    key = random.Random(seed + 1).getrandbits(BITS)
    world.dead = set(world.nearest(key, 2))
    holder = world.nearest(key, 1)[0]
    world.values[holder][key] = {"a": b"value"}
    start = next(node for node in world.nodes if node not in world.dead)
    found = asyncio.run(world.find([key], start))
    assert found.values[key].keys() == {"a"} and found.values[key]["a"].keys() == {b"value"}
    assert not world.dead & set(found.nearest[key])


def test_one_question_serves_all_keys_of_a_node() -> None:
    world = World(3, 1)
    asyncio.run(world.find([1, 2, 3, 4], world.nodes[0]))
    assert sorted(node.peer for node in world.asked) == ["p0", "p1", "p2"]


def test_nothing_is_found_where_there_is_nobody() -> None:
    world = World(1, 1)
    found = asyncio.run(lookup([7], lambda _: [], world.ask, CONFIG))
    assert found == Found({7: {}}, {7: ()}, {7: ()})


def test_a_silent_node_is_waited_for_only_as_long_as_the_others_make_likely() -> None:
    async def scenario() -> None:
        silent, quick = Node(1, PeerId("silent")), Node(2, PeerId("quick"))
        cancelled = []

        async def ask(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
            if node == quick:
                return NodeReply({0: {"a": b"x"}}, {})
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(node)
                raise
            return None

        async with asyncio.timeout(10):
            found = await lookup([0], lambda _: [silent, quick], ask, CONFIG)
        assert (
            found.values[0].keys() == {"a"}
            and found.values[0]["a"].keys() == {b"x"}
            and found.nearest[0] == (quick,)
        )
        assert cancelled == [silent]

    asyncio.run(scenario())


def test_nodes_that_invent_neighbours_are_bounded() -> None:
    async def scenario() -> None:
        asked = 0

        async def liar(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
            nonlocal asked
            asked += 1
            closer = [Node(max(0, node.id - step), PeerId(f"{asked}/{step}")) for step in range(1, 65)]
            return NodeReply({}, dict.fromkeys(keys, closer))

        await lookup([0], lambda _: [Node(2**100, PeerId("liar"))], liar, CONFIG)
        assert asked <= CONFIG.rounds * CONFIG.breadth

    asyncio.run(scenario())


@given(seed=st.integers(0, 2**32), liars=st.integers(1, 3))
@settings(max_examples=examples(30))
def test_one_that_names_only_invented_nodes_withholds_nothing(seed: int, liars: int) -> None:
    """It is the nearest node to the key and one of those we begin with; what it names is nearer still, and silent."""
    world = World(60, seed)
    draw = random.Random(seed + 1)
    key = draw.getrandbits(BITS)
    liar = Node(key ^ 1, PeerId("liar"))
    invented = [Node(key ^ step, PeerId(f"invented {step}")) for step in range(2, 66)]
    for holder in world.nearest(key, 5):
        world.values[holder][key] = {"a": b"value"}
    config = LookupConfig(breadth=8, patience_seconds=0.02)
    rounds = 0

    async def ask(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
        nonlocal rounds
        if node == liar:
            return NodeReply({}, dict.fromkeys(keys, invented))
        if node in invented:
            rounds += 1
            await asyncio.sleep(0.05)  # a call's time is up
            return None
        return await world.ask(node, keys)

    begin = [liar, *world.nearest(draw.getrandbits(BITS), 7)]
    found = asyncio.run(lookup([key], lambda _: begin, ask, config))
    assert found.values[key].keys() == {"a"} and found.values[key]["a"].keys() == {b"value"}
    assert rounds <= 3  # one round of its path
    honest = [node for node in found.nearest[key] if node != liar]
    assert len(set(honest) & set(world.nearest(key, 5))) >= 4


def test_a_path_on_which_one_answers_and_another_is_silent_each_time_is_left() -> None:
    """And of all the rounds together no more is waited than the patience, and a little."""
    config = LookupConfig(breadth=8)
    world = World(60, 3)
    key = random.Random(4).getrandbits(BITS)
    # Each names the next one, and a silent one between that and itself.
    chain = [Node(key ^ (2 * step), PeerId(f"chain {step}")) for step in range(30, 0, -1)]
    silent = [Node(key ^ (2 * step - 1), PeerId(f"silent {step}")) for step in range(30, 0, -1)]
    for holder in world.nearest(key, 5):
        world.values[holder][key] = {"a": b"value"}
    asked = []

    async def ask(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
        await asyncio.sleep(0.001)
        if node in silent:
            await asyncio.sleep(3.0)
            return None
        if node in chain:
            asked.append(node)
            at = chain.index(node)
            return NodeReply({}, {key: [*chain[at + 1 : at + 2], silent[at]] for key in keys})
        return await world.ask(node, keys)

    async def scenario() -> tuple[Found, float]:
        begin = [chain[0], *world.knows[world.nodes[0]][-7:]]
        found = await lookup([key], lambda _: begin, ask, config)
        return found, asyncio.get_running_loop().time()

    found, seconds = instant_loop.run(scenario())
    assert found.values[key].keys() == {"a"} and found.values[key]["a"].keys() == {b"value"}
    assert len(asked) <= 5
    assert seconds <= 1.5 * config.patience_seconds


def test_the_nearest_of_each_path_are_told_whoever_is_nearer_on_another() -> None:
    world = World(60, 5)
    key = random.Random(6).getrandbits(BITS)
    liars = [Node(key ^ step, PeerId(f"liar {step}")) for step in range(1, 9)]

    async def ask(node: Node, keys: tuple[int, ...]) -> NodeReply | None:
        return NodeReply({}, dict.fromkeys(keys, liars)) if node in liars else await world.ask(node, keys)

    begin = [liars[0], *world.knows[world.nodes[0]]]
    found = asyncio.run(lookup([key], lambda _: begin, ask, LookupConfig()))
    assert set(found.nearest[key][:5]) <= set(liars)
    honest = set(found.best[key]) - set(liars)
    assert len(honest) == 2 and honest <= set(world.nearest(key, 8))


def test_the_number_of_questions_is_what_it_was() -> None:
    """Three paths ask for no more than one did: on average 8 to 12 nodes of two hundred."""
    asked = []
    for paths in (1, 3):
        total = 0
        for seed in range(20):
            world = World(200, seed)
            key = random.Random(seed + 1).getrandbits(BITS)
            start = world.knows[world.nodes[0]]
            config = LookupConfig(breadth=8, paths=paths, patience_seconds=0.02)
            asyncio.run(lookup([key], lambda _, start=start: start, world.ask, config))  # type: ignore[misc]
            total += len(world.asked)
        asked.append(total)
    assert asked[1] <= 1.25 * asked[0], asked


def test_a_bad_setting_is_named() -> None:
    with pytest.raises(ValueError, match="breadth"):
        LookupConfig(breadth=0)
