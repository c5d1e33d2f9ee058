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

_KEYS_PER_ASK = 32
_CLOCK_SAMPLES = 16
_CLOCK_SECONDS = 60.0  # for which a clock is taken to be as it was told; it may be set as well
_CLOCK_KEPT_SECONDS = 300.0  # of one who no longer answers
_STEP_SECONDS = 1.0  # by which our clock has to be set for what others' told of it to be void
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
        self._told: dict[PeerId, tuple[float, float]] = {}  # and when, by the clock that only rises
        self._correction = 0.0  # by them
        self._since_start = _since_start()  # the machine's, as of when they were told
        self._batches = StoreBatches(self.store)

    async def aclose(self) -> None:
        await self._batches.aclose()

    def now(self) -> float:
        """Unix seconds, by our clock as the others' correct it."""
        self._forget_if_set()
        return time.time() + self._correction

    def knows_clock_of(self, peer: PeerId) -> bool:
        self._forget_if_set()
        return peer in self._told

    def _offsets(self) -> list[float]:
        return [offset for offset, _ in self._told.values()]

    def _reckon(self) -> None:
        """Others' clocks have been told, or forgotten."""
        self._correction = correction(self._offsets())

    def _forget_if_set(self) -> None:
        """What others' clocks are ahead of ours is asked anew once ours was set, or the machine has slept."""
        since_start = _since_start()
        if abs(since_start - self._since_start) > _STEP_SECONDS:
            self._told.clear()
            self._reckon()
            self._since_start = since_start

    async def ping(self, peer: PeerId) -> None:
        """Raises one of CALL_ERRORS."""
        asked_at = time.monotonic()
        theirs = await self._wire.ping(peer, self._call_seconds)
        took, answered_at = time.monotonic() - asked_at, time.time()
        self._forget_if_set()
        await self._admit(Node(node_id(peer), peer))
        self._suspended.pop(peer, None)
        room = peer in self._told or len(self._told) < _CLOCK_SAMPLES
        if theirs is not None and room and took < 1.0:
            self._told[peer] = theirs - (answered_at - took / 2), asked_at
            self._reckon()
            offset = middle(self._offsets())
            if abs(offset) > CLOCK_TOLERANCE_SECONDS:
                logger.warning("this machine's clock is %.0f s off the swarm's: set it", -offset)

    async def ask_clocks(self) -> None:
        """Ask those anew who told of their clocks a while ago: one that was wrong then may have been set since."""
        await asyncio.gather(*map(self._ask_clock, self._sampled_before(_CLOCK_SECONDS)))
        for peer in self._sampled_before(_CLOCK_KEPT_SECONDS):
            del self._told[peer]
        self._reckon()

    def _sampled_before(self, seconds: float) -> list[PeerId]:
        now = time.monotonic()
        return [peer for peer, (_, at) in self._told.items() if now - at >= seconds]

    async def _ask_clock(self, peer: PeerId) -> None:
        try:
            await self.ping(peer)
        except CALL_ERRORS as error:
            logger.debug("%s does not tell of its clock: %r", peer, error)

    async def ask(self, node: Node, keys: tuple[int, ...]) -> NodeReply | None:
        """What a node says of the keys; None where it does not answer. It may tell of some of them at a time, for as long as one
        call may take: what it has not told of by then it is not asked for."""
        values: dict[int, dict[str, bytes]] = {}
        nearest: dict[int, list[Node]] = {}
        at, until = 0, time.monotonic() + self._call_seconds
        try:
            while at < len(keys) and (not at or time.monotonic() < until):
                part = keys[at : at + _KEYS_PER_ASK]
                answer = await self._wire.find(node.peer, part, self._call_seconds)
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
            self._told.pop(node.peer, None)
            self._reckon()
            self._gone(node)


def offer_of(place: int, subkey: str, data: bytes, until: float) -> Offer:
    """A record of ours for the nodes near `place`; `until` in unix seconds."""
    return Offer(place.to_bytes(ID_BYTES, "big"), msgpack.packb(subkey), data, until)


def _since_start() -> float:
    """By how much the clock is ahead of the one that only rises: the same until somebody sets it."""
    return time.time() - time.monotonic()


def _values(node: Node, packed: bytes | None) -> dict[str, bytes]:
    if packed is None:
        return {}
    try:
        return parse_values(packed)
    except ValueError as error:  # of one key; what it says of the others may be good
        logger.debug("no value of %s: %s", node.peer, error)
        return {}
