"""Batches the records that are published to one node at the same moment into one request: a peer with dozens of stages renews
dozens of claims at once, and a request costs both sides more than a record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.dht.guard import Offer
from fusion.swarm.dht.lookup import Node
from fusion.swarm.dht.wire import MAX_OFFERS
from fusion.swarm.transport import PeerId

# Which of the offers the node stored; empty where it did not answer.
Store = Callable[[Node, Sequence[Offer]], Awaitable[list[bool]]]
Waiting = tuple[Offer, asyncio.Future[bool]]


class StoreBatches:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[PeerId, list[Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def store(self, node: Node, offer: Offer) -> bool:
        """Whether the node stored it. Cancelling one caller does not cancel the request for the others."""
        taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(node.peer, [])
        waiting.append((offer, taken))
        if len(waiting) == 1:
            self._spawn(self._send(node))
        return await taken

    async def aclose(self) -> None:
        await cancel_all(self._tasks)
        for waiting in self._waiting.values():  # whose task has not started
            _set_results(waiting, [])
        self._waiting.clear()

    async def _send(self, node: Node) -> None:
        # A new task runs after all callers that are ready now have added theirs.
        waiting = self._waiting.pop(node.peer)
        parts = [waiting[at : at + MAX_OFFERS] for at in range(0, len(waiting), MAX_OFFERS)]
        await asyncio.gather(*(self._send_part(node, part) for part in parts))

    async def _send_part(self, node: Node, part: Sequence[Waiting]) -> None:
        taken: list[bool] = []
        try:
            taken = await self._store(node, [offer for offer, _ in part])
        finally:
            _set_results(part, taken)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _set_results(waiting: Sequence[Waiting], taken: Sequence[bool]) -> None:
    for number, (_, future) in enumerate(waiting):
        if not future.done():
            future.set_result(number < len(taken) and taken[number])
