"""Our calls to other nodes: what comes back is checked, what does not come back is remembered for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgpack
from cachetools import FIFOCache
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from fusion.swarm.dht.clock import correction, middle
from fusion.swarm.dht.guard import Offer
from fusion.swarm.dht.lookup import Node, NodeReply
from fusion.swarm.dht.service import BUSY
from fusion.swarm.dht.store_batches import StoreBatches
from fusion.swarm.dht.values import ID_BYTES, node_id, parse_values
from fusion.swarm.dht.wire import CALL_ERRORS, Wire
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

_BIG_ANSWER_BYTES = (
    512 * 1024
)  # hivemind's limit for one answer is 4 MiB, and nodes of former versions know no other
_KEYS_PER_ASK = 32
_CLOCK_SAMPLES = 16
_SUSPENDED = 1024  # peers remembered
_FAILURES = 3  # in a row, after which a node is left out of the routing table


class Calls:
    def __init__(
        self,
        wire: Wire,
        *,
        call_seconds: float,
        suspend_seconds: float,
        admit: Callable[[Node], Awaitable[object]],
        gone: Callable[[Node], None],
    ) -> None:
        """`admit` is told of each node that answers a ping, `gone` of those that no longer answer."""
        self._wire = wire
        self._call_seconds = call_seconds
        self._suspend_seconds = suspend_seconds
        self._admit = admit
        self._gone = gone
        # Until when, after how many failures in a row.
        self._suspended: FIFOCache[PeerId, tuple[float, int]] = FIFOCache(_SUSPENDED)
        # Others' clocks less ours. Who has been there longest stays: newcomers do not outvote them.
        self._offsets: dict[PeerId, float] = {}
        self._keys_per_ask = _KEYS_PER_ASK
        self._batches = StoreBatches(self.store)

    async def aclose(self) -> None:
        await self._batches.aclose()

    def now(self) -> float:
        """Unix seconds, by our clock as the others' correct it."""
        return time.time() + correction(self._offsets.values())

    def knows_clock_of(self, peer: PeerId) -> bool:
        return peer in self._offsets

    async def ping(self, peer: PeerId) -> None:
        """Raises one of CALL_ERRORS."""
        asked_at = time.time()
        theirs = await self._wire.ping(peer, self._call_seconds)
        answered_at = time.time()
        await self._admit(Node(node_id(peer), peer))
        self._suspended.pop(peer, None)
        room = peer in self._offsets or len(self._offsets) < _CLOCK_SAMPLES
        if theirs is not None and room and answered_at - asked_at < 1.0:
            self._offsets[peer] = theirs - (asked_at + answered_at) / 2
            offset = middle(self._offsets.values())
            if abs(offset) > CLOCK_TOLERANCE_SECONDS:
                logger.warning("this machine's clock is %.0f s off the swarm's: set it", -offset)

    async def ask(self, node: Node, keys: tuple[int, ...]) -> NodeReply | None:
        """What a node says of the keys; None where it does not answer."""
        values: dict[int, dict[str, bytes]] = {}
        nearest: dict[int, list[Node]] = {}
        at = 0
        try:
            while at < len(keys):
                part = keys[at : at + self._keys_per_ask]
                answer, size = await self._wire.find(node.peer, part, self._call_seconds)
                if size > _BIG_ANSWER_BYTES:
                    self._keys_per_ask = max(1, self._keys_per_ask // 2)
                for key, found in zip(part, answer, strict=False):
                    values[key] = _values(node, found.value)
                    nearest[key] = [other for other in found.nearest if not self.is_suspended(other.peer)]
                at += len(answer)
        except asyncio.CancelledError:
            self._failed(node.peer)  # the others were so much quicker that nobody waits for it any longer
            raise
        except CALL_ERRORS as error:
            self._lost(node, error)
            return None
        self._suspended.pop(node.peer, None)
        return NodeReply(values, nearest)

    async def store(self, node: Node, offers: Sequence[Offer]) -> list[bool]:
        """Which of them the node took; none where it does not answer."""
        try:
            return await self._wire.store(node.peer, offers, self._call_seconds)
        except CALL_ERRORS as error:
            self._lost(node, error)
            return []

    async def store_one(self, node: Node, offer: Offer) -> bool:
        """Whether the node took it, in one request with what else goes there now."""
        return await self._batches.store(node, offer)

    # Nodes that fail.

    def is_suspended(self, peer: PeerId) -> bool:
        until, _ = self._suspended.get(peer, (0.0, 0))
        return time.monotonic() < until

    def _failed(self, peer: PeerId) -> int:
        _, failures = self._suspended.pop(peer, (0.0, 0))
        pause = self._suspend_seconds * 2 ** min(failures, 4)
        self._suspended[peer] = (time.monotonic() + pause, failures + 1)
        return failures + 1

    def _lost(self, node: Node, error: Exception) -> None:
        logger.debug("no answer from %s: %r", node.peer, error)
        if isinstance(error, P2PHandlerError) and BUSY in str(error):
            return  # it lives, and has had enough of us
        # One failure is no death: on a busy machine every neighbour may miss a deadline once.
        if self._failed(node.peer) >= _FAILURES:
            self._offsets.pop(node.peer, None)
            self._gone(node)


def offer_of(place: int, subkey: str, data: bytes, until: float) -> Offer:
    """A record of ours for the nodes near `place`; `until` in unix seconds."""
    return Offer(place.to_bytes(ID_BYTES, "big"), msgpack.packb(subkey), data, until)


def _values(node: Node, packed: bytes | None) -> dict[str, bytes]:
    if packed is None:
        return {}
    try:
        return parse_values(packed)
    except ValueError as error:  # of one key; what it says of the others may be good
        logger.debug("no value of %s: %s", node.peer, error)
        return {}
