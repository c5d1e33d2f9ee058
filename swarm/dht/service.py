"""Answers other nodes' calls: stores records, and returns them and the nodes that we know. All of it bounded.

Every request is charged to its sender's budget before any work on it, and none can cost more than a few milliseconds of the
loop that also renews our leases. A node whose id does not follow from its peer id is ignored. A node that is new in our table
is offered, once and a little at a time, the records that it should keep from now on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice

import msgpack

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.dht.guard import Offer, check_offer
from fusion.swarm.dht.lookup import Node
from fusion.swarm.dht.record_store import OWN, Kept, RecordStore
from fusion.swarm.dht.request_budget import BudgetConfig, RequestBudget, spend_all
from fusion.swarm.dht.routing_table import RoutingTable
from fusion.swarm.dht.values import ID_BYTES, node_id, pack_values
from fusion.swarm.dht.wire import MAX_NEIGHBOURS, MAX_OFFERS, FoundAt, Sender
from fusion.swarm.errors import RecordError
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

ANSWER_BYTES = 1 << 20  # of values; more only where one key alone has more
BUSY = "busy: ask less"
SUBNET_PEERS = 4  # the budget of a public network, in peers'
_NEWCOMERS = 64  # waiting to be admitted
# Of them, since a slow one may take long to answer and to store records
_ADMITTED_AT_ONCE = 8
_REPLICATED = 512  # records to one newcomer
_WALKED_KEYS = 4096  # examined for it
_WALKED_AT_ONCE = 32
# Tokens: tenths of a millisecond.
_REQUEST = 1.0
_OFFER = 2.0
_KEY = 0.25
_ANSWERED_KIB = 0.05
_NEWCOMER = 100.0

# Which of the offers the node stored; empty where it did not answer.
Send = Callable[[Node, Sequence[Offer]], Awaitable[Sequence[bool]]]


class Busy(ValueError):
    """The sender has used up its budget."""


def falls_to(key: int, newcomer: int, own: int, others: Sequence[int], replicas: int) -> bool:
    """Whether we have to offer a newcomer our records of a key: we are the nearest of its holders, and the newcomer becomes one of
    them. `others`: the nodes nearest to the key besides us both, nearest first."""
    nearest = others[:replicas]
    if any(other ^ key < own ^ key for other in nearest):
        return False
    return len(nearest) < replicas or newcomer ^ key < nearest[-1] ^ key


class DhtService:
    """Implements `fusion.swarm.dht.wire.Server`."""

    def __init__(
        self,
        own: PeerId,
        now: Callable[[], float],
        subnets: Callable[[], Awaitable[Mapping[PeerId, str]]],
        send: Send,
        is_alive: Callable[[Node], Awaitable[bool]],
        *,
        replicas: int,
        budget: BudgetConfig | None = None,
    ) -> None:
        """`now`: unix seconds, by the swarm's clock. `subnets`: the public networks of connected peers. `send` offers records to a
        node. `is_alive` pings one."""
        self.table = RoutingTable(node_id(own))
        self.records = RecordStore()
        self._own = node_id(own)
        self._now = now
        self._subnets = subnets
        self._subnet_of: Mapping[PeerId, str] = {}
        self._send = send
        self._is_alive = is_alive
        self._replicas = replicas
        budget = budget or BudgetConfig()
        self._budget = RequestBudget(budget)
        self._of_subnets = RequestBudget(
            BudgetConfig(per_second=SUBNET_PEERS * budget.per_second, burst=SUBNET_PEERS * budget.burst)
        )
        self._newcomers: dict[Node, bool] = {}  # whether its admission has begun
        self._admitting: set[asyncio.Task[None] | None] = set()

    async def aclose(self) -> None:
        await cancel_all(task for task in self._admitting if task is not None)

    # Others' calls.

    def ping(self, sender: Sender) -> None:
        self._pay(sender, _REQUEST)
        self._note_sender(sender)

    def store(self, sender: Sender, offers: Sequence[Offer]) -> list[bool]:
        self._pay(sender, _REQUEST + _OFFER * len(offers))
        self._note_sender(sender)
        return [self._store(sender, offer) for offer in offers]

    def find(self, sender: Sender, keys: Sequence[int]) -> list[FoundAt]:
        """The results for as many of the keys, from the first, as an answer has room for."""
        self._pay(sender, _REQUEST + _KEY * len(keys))
        self._note_sender(sender)
        fitting: list[tuple[int, Mapping[str, Kept]]] = []
        total = 0
        for key in keys:
            values = self.values(key)
            size = sum(len(subkey) + len(kept.data) for subkey, kept in values.items())
            if fitting and total + size > ANSWER_BYTES:
                break
            fitting.append((key, values))
            total += size
        self._pay(sender, _ANSWERED_KIB * total / 1024)
        return [self._found(sender.peer, key, values) for key, values in fitting]

    def _found(self, sender: PeerId, key: int, values: Mapping[str, Kept]) -> FoundAt:
        packed = pack_values((s, kept.data, kept.until) for s, kept in values.items()) if values else None
        near = self.table.nearest(key, MAX_NEIGHBOURS + 1)
        return FoundAt(packed, [node for node in near if node.peer != sender][:MAX_NEIGHBOURS])

    def _pay(self, sender: Sender, tokens: float) -> None:
        accounts: list[tuple[RequestBudget, str]] = [(self._budget, sender.peer)]
        if sender.subnet is not None:
            accounts.append((self._of_subnets, sender.subnet))
        if not spend_all(accounts, tokens):
            raise Busy(BUSY)

    def _store(self, sender: Sender, offer: Offer) -> bool:
        now = self._now()
        try:
            subkey = check_offer(offer, now)
        except RecordError as error:
            logger.debug("refused to store a record: %s", error)
            return False
        kept = Kept(offer.data, offer.until, sender.peer, sender.subnet or sender.peer)
        return self.records.put(int.from_bytes(offer.key, "big"), subkey, kept, now)

    def account(self, peer: PeerId) -> str:
        """The account of a node: itself, or its public network, where that is known."""
        return self._subnet_of.get(peer, peer)

    # Our records.

    def values(self, key: int) -> Mapping[str, Kept]:
        return self.records.at(key, self._now())

    def keep_own(self, key: int, subkey: str, data: bytes, until: float) -> None:
        self.records.put(key, subkey, Kept(data, until, OWN, OWN), self._now())

    # Our routing table.

    def _note_sender(self, sender: Sender) -> None:
        if not sender.claimed:  # a client is no node
            return
        node = Node(node_id(sender.peer), sender.peer)
        if sender.claimed != node.id.to_bytes(ID_BYTES, "big"):
            logger.debug("a node id that is not that of %s", sender.peer)
        elif node in self.table:
            self.table.seen(node)
        elif len(self._newcomers) < _NEWCOMERS and self._budget.spend(sender.peer, _NEWCOMER):
            self._newcomers[node] = False
            if len(self._admitting) < _ADMITTED_AT_ONCE:
                self._admitting.add(asyncio.create_task(self._admit_waiting(), name="new DHT nodes"))

    async def admit(self, node: Node) -> bool:
        """Enter a node that answered or called us in our table; whether it is there now."""
        if node not in self.table and node.peer not in self._subnet_of:
            self._subnet_of = await self._subnets()
        return self.table.seen(node, self._subnet_of.get(node.peer))

    async def _admit_waiting(self) -> None:
        try:
            while (
                node := next((each for each, begun in self._newcomers.items() if not begun), None)
            ) is not None:
                self._newcomers[node] = True
                try:
                    await self._admit_newcomer(node)
                finally:
                    del self._newcomers[node]
        finally:
            # At once: later newcomers need another task.
            self._admitting.discard(asyncio.current_task())

    async def _admit_newcomer(self, node: Node) -> None:
        known = await self.admit(node)
        oldest = self.table.oldest_beside(node)
        if not known and oldest is not None and not await self._is_alive(oldest):
            self.table.remove(oldest)
            known = await self.admit(node)
        if known:
            await self._replicate_to(node)

    async def _replicate_to(self, newcomer: Node) -> None:
        offers: list[Offer] = []
        keys = list(islice(self.records.keys(), _WALKED_KEYS))
        for at in range(0, len(keys), _WALKED_AT_ONCE):
            for key in keys[at : at + _WALKED_AT_ONCE]:
                near = self.table.nearest(key, self._replicas + 1)
                others = [node.id for node in near if node != newcomer]
                if falls_to(key, newcomer.id, self._own, others, self._replicas):
                    place = key.to_bytes(ID_BYTES, "big")
                    values = self.values(key).items()
                    offers += [Offer(place, msgpack.packb(s), kept.data, kept.until) for s, kept in values]
            if len(offers) >= _REPLICATED:
                break
            await asyncio.sleep(0)
        for at in range(0, min(len(offers), _REPLICATED), MAX_OFFERS):
            if not await self._send(newcomer, offers[at : at + MAX_OFFERS]):
                return  # it does not answer, and others wait to be admitted
