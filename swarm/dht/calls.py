"""Our calls to other nodes. Replies are checked; nodes that fail are suspended for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgpack
from cachetools import FIFOCache
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from fusion.swarm.dht.clock import correction, median
from fusion.swarm.dht.guard import Offer
from fusion.swarm.dht.lookup import Node, NodeReply
from fusion.swarm.dht.service import BUSY
from fusion.swarm.dht.store_batches import StoreBatches
from fusion.swarm.dht.values import ID_BYTES, node_id, parse_values
from fusion.swarm.dht.wire import CALL_ERRORS, Wire
from fusion.swarm.directory.sealing import CLOCK_TOLERANCE_SECONDS
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

_KEYS_PER_QUERY = 32
_CLOCK_SAMPLES = 16
_CLOCK_SECONDS = 60.0  # for which a sampled clock is trusted; it may be set, too
_CLOCK_KEPT_SECONDS = 300.0  # of a node that no longer answers
_STEP_SECONDS = 1.0  # a larger step of our clock voids the samples
_SUSPENDED = 1024  # peers remembered
_FAILURES = 3  # in a row, after which a node is removed from the routing table


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
        """`admit` is called with each node that answers a ping, `gone` with those that no longer answer."""
        self._wire = wire
        self._call_seconds = call_seconds
        self._suspend_seconds = suspend_seconds
        self._admit = admit
        self._gone = gone
        # Until when, after how many failures in a row.
        self._suspended: FIFOCache[PeerId, tuple[float, int]] = FIFOCache(_SUSPENDED)
        # Others' clocks minus ours, and when sampled (monotonic). The oldest stay: newcomers do not outvote them.
        self._clocks: dict[PeerId, tuple[float, float]] = {}
        self._correction = 0.0  # of our clock, by theirs
        self._clock_offset = _clock_offset()  # at the time of the samples
        self._batches = StoreBatches(self.store)

    async def aclose(self) -> None:
        await self._batches.aclose()

    def now(self) -> float:
        """Unix seconds, by our clock as corrected by others'."""
        self._drop_clocks_if_set()
        return time.time() + self._correction

    def knows_clock_of(self, peer: PeerId) -> bool:
        self._drop_clocks_if_set()
        return peer in self._clocks

    def _offsets(self) -> list[float]:
        return [offset for offset, _ in self._clocks.values()]

    def _update_correction(self) -> None:
        self._correction = correction(self._offsets())

    def _drop_clocks_if_set(self) -> None:
        """Drop the samples of others' clocks if ours was set since, or the machine has slept."""
        offset = _clock_offset()
        if abs(offset - self._clock_offset) > _STEP_SECONDS:
            self._clocks.clear()
            self._update_correction()
            self._clock_offset = offset

    async def ping(self, peer: PeerId) -> None:
        """Raises one of CALL_ERRORS."""
        sent_at = time.monotonic()
        remote_time = await self._wire.ping(peer, self._call_seconds)
        took, received_at = time.monotonic() - sent_at, time.time()
        self._drop_clocks_if_set()
        await self._admit(Node(node_id(peer), peer))
        self._suspended.pop(peer, None)
        room = peer in self._clocks or len(self._clocks) < _CLOCK_SAMPLES
        if remote_time is not None and room and took < 1.0:
            self._clocks[peer] = remote_time - (received_at - took / 2), sent_at
            self._update_correction()
            offset = median(self._offsets())
            if abs(offset) > CLOCK_TOLERANCE_SECONDS:
                logger.warning("this machine's clock is %.0f s off the swarm's: set it", -offset)

    async def refresh_clocks(self) -> None:
        """Sample clocks again that were sampled a while ago: they may have been set since."""
        await asyncio.gather(*map(self._sample_clock, self._sampled_before(_CLOCK_SECONDS)))
        for peer in self._sampled_before(_CLOCK_KEPT_SECONDS):
            del self._clocks[peer]
        self._update_correction()

    def _sampled_before(self, seconds: float) -> list[PeerId]:
        now = time.monotonic()
        return [peer for peer, (_, at) in self._clocks.items() if now - at >= seconds]

    async def _sample_clock(self, peer: PeerId) -> None:
        try:
            await self.ping(peer)
        except CALL_ERRORS as error:
            logger.debug("%s did not answer for its clock: %r", peer, error)

    async def query(self, node: Node, keys: tuple[int, ...]) -> NodeReply | None:
        """A node's reply for the keys; None where it does not answer. It may return some of them at a time, within the time limit of
        one call; keys that are missing then are not queried further."""
        values: dict[int, dict[str, bytes]] = {}
        nearest: dict[int, list[Node]] = {}
        at, until = 0, time.monotonic() + self._call_seconds
        try:
            while at < len(keys) and (not at or time.monotonic() < until):
                part = keys[at : at + _KEYS_PER_QUERY]
                results = await self._wire.find(node.peer, part, self._call_seconds)
                for key, found in zip(part, results, strict=False):
                    values[key] = _values(node, found.value)
                    nearest[key] = [other for other in found.nearest if not self.is_suspended(other.peer)]
                at += len(results)
        except asyncio.CancelledError:
            self._failed(node.peer)  # the round ended before it answered: the others were much quicker
            raise
        except CALL_ERRORS as error:
            self._lost(node, error)
            return None
        self._suspended.pop(node.peer, None)
        return NodeReply(values, nearest)

    async def store(self, node: Node, offers: Sequence[Offer]) -> list[bool]:
        """Which of them the node stored; empty where it does not answer."""
        try:
            return await self._wire.store(node.peer, offers, self._call_seconds)
        except CALL_ERRORS as error:
            self._lost(node, error)
            return []

    async def store_one(self, node: Node, offer: Offer) -> bool:
        """Whether the node stored it; sent in one request with what else goes there now."""
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
            return  # it lives, but our budget there is used up
        # Not at the first failure: on a busy machine every neighbour may miss a deadline once.
        if self._failed(node.peer) >= _FAILURES:
            self._clocks.pop(node.peer, None)
            self._update_correction()
            self._gone(node)


def offer_of(place: int, subkey: str, data: bytes, until: float) -> Offer:
    """A record of ours for the nodes near `place`; `until` in unix seconds."""
    return Offer(place.to_bytes(ID_BYTES, "big"), msgpack.packb(subkey), data, until)


def _clock_offset() -> float:
    """Unix time minus monotonic time: constant until the clock is set."""
    return time.time() - time.monotonic()


def _values(node: Node, packed: bytes | None) -> dict[str, bytes]:
    if packed is None:
        return {}
    try:
        return parse_values(packed)
    except ValueError as error:  # of one key; the values of the others may be valid
        logger.debug("no value of %s: %s", node.peer, error)
        return {}
