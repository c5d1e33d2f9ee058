"""What our node does for others: keeps records, tells what it keeps and whom it knows. All of it bounded.

Every request is paid for out of its sender's budget before it is worked on, and none can cost more than a few milliseconds of
the loop that also renews our leases. A node whose id does not follow from its peer id is not taken note of. Whoever is new
in our table is offered what it should keep from now on, a little at a time and once.
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
SUBNET_PEERS = 4  # a network may use as much of us as so many peers
_NEWCOMERS = 64  # waiting to be let in
# Of them; one that answers slowly takes as long as it likes to be asked and offered records
_ADMITTED_AT_ONCE = 8
_HANDED_OVER = 512  # records to one newcomer
_WALKED_KEYS = 4096  # looked through for it
_WALKED_AT_ONCE = 32
# Tokens: tenths of a millisecond.
_REQUEST = 1.0
_OFFER = 2.0
_KEY = 0.25
_ANSWERED_KIB = 0.05
_NEWCOMER = 100.0

# Which of the offers the node took; none of them where it did not answer.
Send = Callable[[Node, Sequence[Offer]], Awaitable[Sequence[bool]]]


class Busy(ValueError):
    """A peer has used up what it may use of us."""


def falls_to(key: int, newcomer: int, own: int, others: Sequence[int], replicas: int) -> bool:
    """Whether we are to offer a newcomer what we keep under a key: of all who keep it we are the nearest, and it will be
    one of them. `others`: the nodes nearest to the key besides us both, nearest first."""
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
        lives: Callable[[Node], Awaitable[bool]],
        *,
        replicas: int,
        budget: BudgetConfig | None = None,
    ) -> None:
        """`now`: unix seconds, by the swarm's clock. `subnets`: of the peers that are connected with us, those in public
        networks. `send`: offer records to a node. `lives`: ask one for a sign of life."""
        self.table = RoutingTable(node_id(own))
        self.records = RecordStore()
        self._own = node_id(own)
        self._now = now
        self._subnets = subnets
        self._subnet_of: Mapping[PeerId, str] = {}
        self._send = send
        self._lives = lives
        self._replicas = replicas
        budget = budget or BudgetConfig()
        self._budget = RequestBudget(budget)
        self._of_subnets = RequestBudget(
            BudgetConfig(per_second=SUBNET_PEERS * budget.per_second, burst=SUBNET_PEERS * budget.burst)
        )
        self._newcomers: dict[Node, bool] = {}  # whether it is being let in already
        self._admitting: set[asyncio.Task[None] | None] = set()

    async def aclose(self) -> None:
        await cancel_all(task for task in self._admitting if task is not None)

    # What others ask.

    def ping(self, sender: Sender) -> None:
        self._pay(sender, _REQUEST)
        self._meet(sender)

    def store(self, sender: Sender, offers: Sequence[Offer]) -> list[bool]:
        self._pay(sender, _REQUEST + _OFFER * len(offers))
        self._meet(sender)
        return [self._keep(sender, offer) for offer in offers]

    def find(self, sender: Sender, keys: Sequence[int]) -> list[FoundAt]:
        """Of as many of the keys as an answer has room for: the first ones."""
        self._pay(sender, _REQUEST + _KEY * len(keys))
        self._meet(sender)
        told: list[tuple[int, Mapping[str, Kept]]] = []
        total = 0
        for key in keys:
            values = self.values(key)
            size = sum(len(subkey) + len(kept.data) for subkey, kept in values.items())
            if told and total + size > ANSWER_BYTES:
                break
            told.append((key, values))
            total += size
        self._pay(sender, _ANSWERED_KIB * total / 1024)
        return [self._found(sender.peer, key, values) for key, values in told]

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

    def _keep(self, sender: Sender, offer: Offer) -> bool:
        now = self._now()
        try:
            subkey = check_offer(offer, now)
        except RecordError as error:
            logger.debug("refused to store a record: %s", error)
            return False
        kept = Kept(offer.data, offer.until, sender.peer, sender.subnet or sender.peer)
        return self.records.put(int.from_bytes(offer.key, "big"), subkey, kept, now)

    def account(self, peer: PeerId) -> str:
        """Whose share a node's part in things counts as: its own, or that of its public network, where that is known."""
        return self._subnet_of.get(peer, peer)

    # What we keep.

    def values(self, key: int) -> Mapping[str, Kept]:
        return self.records.at(key, self._now())

    def keep_own(self, key: int, subkey: str, data: bytes, until: float) -> None:
        self.records.put(key, subkey, Kept(data, until, OWN, OWN), self._now())

    # Whom we know.

    def _meet(self, sender: Sender) -> None:
        if not sender.claimed:  # a client: no node
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
        """Take note of a node that answered us or asked; whether it is in our table now."""
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
                    await self._let_in(node)
                finally:
                    del self._newcomers[node]
        finally:
            # At once: whoever comes from now on needs another task.
            self._admitting.discard(asyncio.current_task())

    async def _let_in(self, node: Node) -> None:
        known = await self.admit(node)
        oldest = self.table.oldest_beside(node)
        if not known and oldest is not None and not await self._lives(oldest):
            self.table.remove(oldest)
            known = await self.admit(node)
        if known:
            await self._hand_over(node)

    async def _hand_over(self, newcomer: Node) -> None:
        handed: list[Offer] = []
        keys = list(islice(self.records.keys(), _WALKED_KEYS))
        for at in range(0, len(keys), _WALKED_AT_ONCE):
            for key in keys[at : at + _WALKED_AT_ONCE]:
                near = self.table.nearest(key, self._replicas + 1)
                others = [node.id for node in near if node != newcomer]
                if falls_to(key, newcomer.id, self._own, others, self._replicas):
                    place = key.to_bytes(ID_BYTES, "big")
                    values = self.values(key).items()
                    handed += [Offer(place, msgpack.packb(s), kept.data, kept.until) for s, kept in values]
            if len(handed) >= _HANDED_OVER:
                break
            await asyncio.sleep(0)
        for at in range(0, min(len(handed), _HANDED_OVER), MAX_OFFERS):
            if not await self._send(newcomer, handed[at : at + MAX_OFFERS]):
                return  # it does not answer, and others wait to be let in
