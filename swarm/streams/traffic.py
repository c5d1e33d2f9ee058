"""How many bytes of frames went to and came from each peer, and when those of large payloads came."""

from __future__ import annotations

from collections.abc import Mapping

from fusion.swarm.streams.receive_log import ReceiveLog
from fusion.swarm.transport import PeerId, Traffic


class TrafficCounter:
    """Bytes of frames per peer since the start."""

    def __init__(self) -> None:
        self.receive_log = ReceiveLog()
        self._bytes: dict[PeerId, list[int]] = {}

    def sent(self, peer: PeerId, size: int) -> None:
        self._bytes.setdefault(peer, [0, 0])[0] += size

    def received(self, peer: PeerId, size: int) -> None:
        self._bytes.setdefault(peer, [0, 0])[1] += size

    def snapshot(self) -> Mapping[PeerId, Traffic]:
        return {peer: Traffic(*both) for peer, both in self._bytes.items()}
