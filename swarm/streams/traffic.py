"""Bytes of frames sent to and received from each peer, and when those of large payloads were received."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.swarm.streams.receive_log import ReceiveLog
from fusion.swarm.transport import PeerId, Traffic

# Every command has a peer id of its own, and ids are free: those with the fewest bytes are dropped.
MAX_PEERS = 1024


class TrafficCounter:
    """Bytes of frames per peer, since the start or since the peer was dropped."""

    def __init__(self) -> None:
        self.receive_log = ReceiveLog()
        self._bytes: dict[PeerId, list[int]] = {}

    def sent(self, peer: PeerId, size: int) -> None:
        self._of(peer)[0] += size

    def received(self, peer: PeerId, size: int) -> None:
        self._of(peer)[1] += size

    def snapshot(self) -> Mapping[PeerId, Traffic]:
        return {peer: Traffic(*both) for peer, both in self._bytes.items()}

    def _of(self, peer: PeerId) -> list[int]:
        both = self._bytes.get(peer)
        if both is None:
            if len(self._bytes) >= MAX_PEERS:
                few = sorted(self._bytes, key=lambda known: sum(self._bytes[known]))
                # Not one by one: a thousand ids must not cost a thousand sorts
                for known in few[: MAX_PEERS // 8]:
                    del self._bytes[known]
            both = self._bytes[peer] = [0, 0]
        return both
