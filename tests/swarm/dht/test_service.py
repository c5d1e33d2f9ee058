"""What our node does for others, and how much of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.directory_records import claim_record, digest, provider_record

from fusion.swarm.dht import service
from fusion.swarm.dht.guard import Offer
from fusion.swarm.dht.lookup import Node
from fusion.swarm.dht.record_store import Kept
from fusion.swarm.dht.request_budget import BudgetConfig
from fusion.swarm.dht.service import ANSWER_BYTES, Busy, DhtService, falls_to
from fusion.swarm.dht.values import key_id, node_id, parse_values
from fusion.swarm.dht.wire import Sender
from fusion.swarm.directory.keys import key_of, subkey_of
from fusion.swarm.directory.records import Record
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS, seal
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId

NOW = 1e6
SUBNET = "203.0.114.0/24"
ids = st.integers(0, 2**160 - 1)


class Desk:
    """A service and what it sent."""

    def __init__(
        self, budget: BudgetConfig | None = None, subnets: Mapping[PeerId, str] | None = None
    ) -> None:
        self.identity = Identity.generate()
        self.sent: list[tuple[Node, list[Offer]]] = []
        self.living = True
        self.service = DhtService(
            self.identity.peer_id,
            lambda: NOW,
            self._subnets,
            self._send,
            self._is_alive,
            replicas=5,
            budget=budget,
        )
        self.subnets = subnets or {}

    async def _subnets(self) -> Mapping[PeerId, str]:
        return self.subnets

    async def _send(self, node: Node, offers: Sequence[Offer]) -> Sequence[bool]:
        self.sent.append((node, list(offers)))
        return [True] * len(offers) if self.living else []

    async def _is_alive(self, node: Node) -> bool:
        return self.living


def offer(record: Record, author: Identity, seconds: float = 6.0) -> Offer:
    until = NOW + seconds
    place = key_id(key_of(record)).to_bytes(20, "big")
    return Offer(
        place, msgpack.packb(subkey_of(record)), seal(record, author, until), until + CLOCK_TOLERANCE_SECONDS
    )


def claimed(peer: PeerId) -> bytes:
    return node_id(peer).to_bytes(20, "big")


def as_node(peer: PeerId) -> Sender:
    return Sender(peer, claimed(peer))


def test_what_is_stored_is_found() -> None:
    desk, author = Desk(), Identity.generate()
    record = claim_record(author)
    assert desk.service.store(Sender(author.peer_id), [offer(record, author)]) == [True]
    (found,) = desk.service.find(Sender(author.peer_id), [key_id(key_of(record))])
    assert found.value is not None and parse_values(found.value) == {
        author.peer_id: offer(record, author).data
    }
    (nothing,) = desk.service.find(Sender(author.peer_id), [1])
    assert nothing.value is None and nothing.nearest == []


def test_an_answer_has_room_for_what_it_carries() -> None:
    desk = Desk()
    for key in range(40):
        for n in range(20):
            kept = Kept(b"x" * 4000, NOW + 9, f"p{n}", f"p{n}")
            assert desk.service.records.put(key, f"p{n}", kept, NOW)
    found = desk.service.find(Sender(PeerId("anybody")), list(range(40)))
    assert 1 < len(found) < 40
    assert ANSWER_BYTES / 2 < sum(len(each.value or b"") for each in found) < ANSWER_BYTES * 1.1


def meet(desk: Desk, met: Callable[[], None]) -> list[PeerId]:
    async def scenario() -> list[PeerId]:
        met()
        while desk.service._admitting:
            await asyncio.sleep(0)
        await desk.service.aclose()
        return [node.peer for node in desk.service.table]

    return asyncio.run(scenario())


def test_only_a_node_with_its_own_id_is_noted() -> None:
    desk, one, two, three = Desk(), *(Identity.generate().peer_id for _ in range(3))

    def met() -> None:
        desk.service.ping(as_node(one))
        desk.service.ping(Sender(two, claimed(one)))
        desk.service.store(Sender(two, b"short"), [])
        desk.service.find(Sender(three), [])  # a client

    assert meet(desk, met) == [one]


def test_a_network_gets_two_places_in_a_bucket() -> None:
    strangers = [Identity.generate().peer_id for _ in range(100)]
    desk = Desk(subnets=dict.fromkeys(strangers, SUBNET))

    def met() -> None:
        for peer in strangers:
            desk.service.ping(as_node(peer))

    noted = meet(desk, met)
    assert len(noted) < 80
    crowded = [len([p for p in noted if node_id(p) >> 155 == bucket]) for bucket in range(32)]
    own = node_id(desk.identity.peer_id) >> 155
    assert all(count <= 2 for bucket, count in enumerate(crowded) if bucket != own)


def test_who_asks_too_much_is_sent_away_and_nobody_else_is() -> None:
    desk = Desk(BudgetConfig(per_second=0.001, burst=50.0))
    greedy, modest = (Identity.generate().peer_id for _ in range(2))
    with pytest.raises(Busy):
        for _ in range(100):
            desk.service.find(Sender(greedy), [1] * 4)
    with pytest.raises(Busy):
        desk.service.store(Sender(greedy), [])
    desk.service.ping(Sender(modest))


def test_a_network_shares_what_a_few_peers_have() -> None:
    desk = Desk(BudgetConfig(per_second=0.001, burst=150.0))
    crowd = [PeerId(f"of one network {n}") for n in range(20)]
    served = 0
    for sender in (*(Sender(peer, subnet=SUBNET) for peer in crowd), Sender(PeerId("of none"))):
        with suppress(Busy):
            for _ in range(150):
                desk.service.ping(sender)
                served += 1
    assert served == 5 * 150


def test_a_peer_that_is_refused_uses_up_nothing_of_its_networks_share() -> None:
    desk = Desk(BudgetConfig(per_second=0.001, burst=150.0))
    for _ in range(1000):
        with suppress(Busy):
            desk.service.ping(Sender(PeerId("greedy"), subnet=SUBNET))
    for _ in range(100):
        desk.service.ping(Sender(PeerId("modest"), subnet=SUBNET))


def test_an_answer_that_cannot_be_paid_for_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, greedy = Desk(BudgetConfig(per_second=0.001, burst=60.0)), PeerId("anybody")
    for n in range(150):
        assert desk.service.records.put(7, f"p{n}", Kept(b"x" * 4000, NOW + 9, f"p{n}", f"p{n}"), NOW)
    made: list[int] = []
    monkeypatch.setattr(service, "pack_values", lambda items: bytes(made.append(1) or 1))
    desk.service.find(Sender(greedy), [7])
    for _ in range(20):
        with pytest.raises(Busy):
            desk.service.find(Sender(greedy), [7])
    assert len(made) == 1


def test_a_new_node_that_does_not_answer_keeps_others_waiting_for_one_request() -> None:
    desk, author, newcomer = Desk(), Identity.generate(), Identity.generate().peer_id
    for n in range(2000):
        record = provider_record(author, digest=digest(str(n)))
        desk.service.keep_own(key_id(key_of(record)), subkey_of(record), b"x", NOW + 60)
    desk.living = False
    meet(desk, lambda: desk.service.ping(as_node(newcomer)))
    assert len(desk.sent) == 1


def test_new_nodes_that_answer_slowly_hold_up_few_others() -> None:
    desk, slow = Desk(), {Identity.generate().peer_id for _ in range(5)}
    asked: list[PeerId] = []

    async def hand_over(node: Node) -> None:
        asked.append(node.peer)
        if node.peer in slow:
            await asyncio.sleep(60)

    desk.service._replicate_to = hand_over  # type: ignore[method-assign]
    honest = [Identity.generate().peer_id for _ in range(20)]

    async def main() -> None:
        for peer in (*slow, *honest):
            desk.service.ping(as_node(peer))
        async with asyncio.timeout(10):
            while not set(honest) <= {node.peer for node in desk.service.table}:
                await asyncio.sleep(0)
        assert set(asked) == {*slow, *honest}
        assert len(desk.service._admitting) == len(slow)
        await desk.service.aclose()
        assert not desk.service._newcomers

    asyncio.run(main())


def test_a_new_node_is_offered_what_it_should_keep_once_and_not_all_there_is() -> None:
    desk, author, newcomer = Desk(), Identity.generate(), Identity.generate().peer_id
    for n in range(2000):
        record = provider_record(author, digest=digest(str(n)))
        desk.service.keep_own(key_id(key_of(record)), subkey_of(record), b"x", NOW + 60)
    meet(desk, lambda: desk.service.ping(as_node(newcomer)))
    assert {node.peer for node, _ in desk.sent} == {newcomer}
    handed = [each for _, offers in desk.sent for each in offers]
    assert len(handed) == 512 and len(set(handed)) == 512
    desk.sent.clear()
    meet(desk, lambda: desk.service.ping(as_node(newcomer)))
    assert desk.sent == []


def test_a_dead_node_makes_room_in_a_full_bucket_and_a_living_one_does_not() -> None:
    desk = Desk()
    strangers = (Identity.generate().peer_id for _ in count())
    far = list(islice((peer for peer in strangers if _bucket(desk, peer) == 0), 21))
    for peer in far[:20]:
        assert desk.service.table.seen(Node(node_id(peer), peer))
    assert far[20] not in meet(desk, lambda: desk.service.ping(as_node(far[20])))
    desk.living = False
    noted = meet(desk, lambda: desk.service.ping(as_node(far[20])))
    assert far[20] in noted and far[0] not in noted


def _bucket(desk: Desk, peer: PeerId) -> int:
    """0 for those in one bucket that is far from us."""
    wanted = ((node_id(desk.identity.peer_id) >> 155) ^ 16) & 31
    return (node_id(peer) >> 155) ^ wanted


@given(ids, ids, ids, st.lists(ids, unique=True, max_size=12), st.integers(1, 6))
def test_of_all_who_keep_a_key_the_nearest_offers_it_to_a_new_keeper(
    key: int, newcomer: int, own: int, others: list[int], replicas: int
) -> None:
    nearest = sorted(others, key=lambda other: other ^ key)
    offered = falls_to(key, newcomer, own, nearest, replicas)
    keepers = sorted({*others, newcomer}, key=lambda other: other ^ key)[:replicas]
    if offered:
        assert newcomer in keepers and all(own ^ key <= other ^ key for other in nearest)
    elif newcomer in keepers and newcomer not in others:
        assert nearest[0] ^ key < own ^ key
