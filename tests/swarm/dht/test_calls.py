"""What we make of nodes that answer oddly."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo
from hivemind.proto import dht_pb2
from hivemind.utils.multiaddr import Multiaddr

from fusion.swarm.dht import calls
from fusion.swarm.dht.calls import Calls
from fusion.swarm.dht.lookup import Node
from fusion.swarm.dht.values import node_id
from fusion.swarm.dht.wire import MAX_KEYS, FoundAt, Wire
from fusion.swarm.identity import Identity
from fusion.swarm.streams.peer_ids import to_bytes
from fusion.swarm.transport import PeerId

Find = Callable[[Sequence[int]], Awaitable[list[FoundAt]]]


def calls_to(find: Find | None = None, **options: Any) -> Calls:
    async def found(peer: PeerId, keys: Sequence[int], seconds: float) -> list[FoundAt]:
        assert find is not None
        return await find(keys)

    async def admit(node: Node) -> None:
        pass

    wire: Any = SimpleNamespace(find=found, **options)
    return Calls(wire, call_seconds=0.2, suspend_seconds=2.0, admit=admit, gone=lambda node: None)


def node() -> Node:
    peer = Identity.generate().peer_id
    return Node(node_id(peer), peer)


def test_large_answers_of_one_node_make_no_question_to_another_shorter() -> None:
    asked: list[int] = []
    value = bytes(1 << 15)

    async def find(keys: Sequence[int]) -> list[FoundAt]:
        asked.append(len(keys))
        return [FoundAt(value, [])] * len(keys)

    async def scenario() -> None:
        ours = calls_to(find)
        for _ in range(8):
            assert await ours.query(node(), tuple(range(MAX_KEYS))) is not None

    asyncio.run(scenario())
    assert asked == [32] * 16


def test_a_node_that_tells_of_one_key_at_a_time_does_not_hold_up_a_search() -> None:
    async def find(keys: Sequence[int]) -> list[FoundAt]:
        await asyncio.sleep(0.05)
        return [FoundAt(None, [])]

    async def scenario() -> None:
        ours, begun = calls_to(find), asyncio.get_running_loop().time()
        reply = await ours.query(node(), tuple(range(MAX_KEYS)))
        assert asyncio.get_running_loop().time() - begun < 1.0
        assert reply is not None and 0 < len(reply.nearest) < MAX_KEYS  # what it did tell counts

    asyncio.run(scenario())


def test_others_run_while_an_answer_full_of_made_up_nodes_is_read() -> None:
    async def scenario() -> None:
        made_up = [
            dht_pb2.FindResult(nearest_node_ids=[bytes(20)] * 20, nearest_peer_ids=ids(20)) for _ in range(32)
        ]
        turns = 0

        async def answered(*_: object) -> object:
            return dht_pb2.FindResponse(results=made_up)

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        p2p: Any = SimpleNamespace(call_protobuf_handler=answered, authorizer=None)
        beside = asyncio.create_task(others())
        here = Identity.generate().peer_id
        found = await Wire(p2p, here, client=True).find(here, range(32), 5.0)
        assert [each.nearest for each in found] == [[]] * 32
        assert turns >= 16  # 640 ids at 0.1 to 0.2 ms
        beside.cancel()

    def ids(count: int) -> list[bytes]:
        return [b"\x00\x24\x08\x01\x12\x20" + os.urandom(32) for _ in range(count)]

    asyncio.run(scenario())


def test_a_peer_at_an_address_that_cannot_be_read_keeps_nobody_out() -> None:
    async def scenario() -> None:
        plain, odd = (Identity.generate().peer_id for _ in range(2))
        webtransport = Multiaddr("/ip4/8.8.8.8/udp/4001/quic-v1").to_bytes() + b"\xd1\x03"
        connected = [
            PeerInfo(PeerID(to_bytes(odd)), [Multiaddr(webtransport)]),
            PeerInfo(PeerID(to_bytes(plain)), [Multiaddr("/ip4/9.9.9.9/tcp/4001")]),
        ]

        async def list_peers() -> list[PeerInfo]:
            return connected

        p2p: Any = SimpleNamespace(list_peers=list_peers, authorizer=None)
        assert await Wire(p2p, plain, client=True).subnets() == {plain: "9.9.9.0/24"}

    asyncio.run(scenario())


class Clocks:
    """The machine's two."""

    def __init__(self) -> None:
        self.wall, self.steady = 1e9, 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady


def test_what_others_clocks_said_of_ours_ends_when_ours_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()
    monkeypatch.setattr(calls, "time", clocks)
    peers = [Identity.generate().peer_id for _ in range(3)]

    async def ping(peer: PeerId, seconds: float) -> float:
        return true

    async def scenario() -> None:
        ours = calls_to(ping=ping)
        for peer in peers:
            await ours.ping(peer)
        assert ours.now() == true and ours.knows_clock_of(peers[0])
        clocks.wall = true  # as the system does once it has found a time server
        assert ours.now() == true and not ours.knows_clock_of(peers[0])
        for peer in peers:
            await ours.ping(peer)
        assert ours.now() == true and ours.knows_clock_of(peers[0])

    true = clocks.wall + 300.0
    asyncio.run(scenario())


def test_a_clock_that_is_set_after_it_was_told_counts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, ahead = Clocks(), [300.0]
    monkeypatch.setattr(calls, "time", clocks)
    peers = [Identity.generate().peer_id for _ in range(3)]

    async def ping(peer: PeerId, seconds: float) -> float:
        if peer in gone:
            raise TimeoutError
        return clocks.wall + ahead[0]

    async def scenario() -> None:
        ours = calls_to(ping=ping)
        for peer in peers:
            await ours.ping(peer)
        assert ours.now() == clocks.wall + 300.0  # all of them agree
        ahead[0] = 0.0  # as of machines that were woken together, once they have found a time server
        for passed, gone_now, off, known in (
            (30, (), 300.0, 3),
            (40, peers[:1], 0.0, 3),
            (300, peers[:1], 0.0, 2),
        ):
            gone[:] = gone_now
            clocks.wall, clocks.steady = clocks.wall + passed, clocks.steady + passed
            await ours.refresh_clocks()
            assert ours.now() == pytest.approx(clocks.wall + off)
            assert sum(map(ours.knows_clock_of, peers)) == known

    gone: list[PeerId] = []
    asyncio.run(scenario())
