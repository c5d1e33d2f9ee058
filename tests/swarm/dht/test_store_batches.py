"""Records that are published at the same moment, and the results that their publishers get."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fusion.swarm.dht.guard import Offer
from fusion.swarm.dht.lookup import Node
from fusion.swarm.dht.store_batches import StoreBatches
from fusion.swarm.dht.values import node_id
from fusion.swarm.dht.wire import MAX_OFFERS
from fusion.swarm.transport import PeerId

A, B = (Node(node_id(PeerId(name)), PeerId(name)) for name in "ab")


def offers(count: int) -> list[Offer]:
    return [Offer(bytes(20), b"", b"%d" % number, 1.0) for number in range(count)]


class Nodes:
    """They take what is not named `refused`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, int]] = []
        self.open = asyncio.Event()

    async def store(self, node: Node, offers: Sequence[Offer]) -> list[bool]:
        self.requests.append((node.peer, len(offers)))
        await self.open.wait()
        return [] if node is B else [offer.data != b"3" for offer in offers]


def test_what_is_published_at_once_goes_in_one_request_and_each_is_told_of_its_own() -> None:
    async def main() -> None:
        nodes = Nodes()
        batches = StoreBatches(nodes.store)
        first = [asyncio.ensure_future(batches.store(A, offer)) for offer in offers(5)]
        silent = asyncio.ensure_future(batches.store(B, offers(1)[0]))
        await asyncio.sleep(0.001)
        assert nodes.requests == [("a", 5), ("b", 1)]
        later = asyncio.ensure_future(batches.store(A, offers(1)[0]))
        await asyncio.sleep(0.001)
        assert nodes.requests[2:] == [("a", 1)], "what comes later does not wait for an answer"
        first[0].cancel()
        nodes.open.set()
        assert await asyncio.gather(*first[1:]) == [True, True, False, True]
        assert await later and not await silent
        await batches.aclose()

    asyncio.run(main())


def test_a_request_has_no_more_than_a_node_takes() -> None:
    async def main() -> None:
        nodes = Nodes()
        nodes.open.set()
        batches = StoreBatches(nodes.store)
        taken = await asyncio.gather(*(batches.store(A, offer) for offer in offers(2 * MAX_OFFERS + 1)))
        assert [count for _, count in nodes.requests] == [MAX_OFFERS, MAX_OFFERS, 1]
        assert taken.count(False) == 1

    asyncio.run(main())


def test_whoever_waits_when_it_closes_is_told_that_nothing_was_taken() -> None:
    async def main() -> None:
        batches = StoreBatches(Nodes().store)
        for begun in (True, False):
            waiting = asyncio.ensure_future(batches.store(A, offers(1)[0]))
            await asyncio.sleep(0.001 if begun else 0)
            await batches.aclose()
            assert not await waiting

    asyncio.run(main())
