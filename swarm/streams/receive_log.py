"""When the bytes of payloads were received, per peer: the log from which rates are estimated. No I/O."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from cachetools import FIFOCache

from fusion.swarm.streams.link_estimate import Read, Sample, sample
from fusion.swarm.transport import PeerId

KEPT_SECONDS = 4.0
KEPT_READS = 4096
KEPT_PEERS = 256
TOGETHER_SECONDS = 0.0005  # closer reads are merged: a fast link would fill the log otherwise


class ReceiveLog:
    """Streams log every read that is a part of a larger payload; see `fusion.swarm.streams.link_estimate`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reads: FIFOCache[PeerId, deque[Read]] = FIFOCache(KEPT_PEERS)
        self._open: dict[PeerId, int] = {}  # payloads under way

    def read(self, peer: PeerId, size: int, *, began: bool, ended: bool) -> None:
        """Log `size` bytes from `peer`, of a payload that `began` or `ended` with this read, or neither."""
        now, under_way = self._clock(), self._open.get(peer, 0)
        reads = self._reads.get(peer)
        if reads is None:
            reads = self._reads[peer] = deque(maxlen=KEPT_READS)
        last = reads[-1] if reads else None
        first = began and under_way == 0
        if last is not None and not first and now - last.at < TOGETHER_SECONDS:
            reads[-1] = Read(last.at, last.size + size, last.first)
        else:
            reads.append(Read(now, size, first))
        while reads[0].at < now - KEPT_SECONDS:
            reads.popleft()
        self._count(peer, int(began) - int(ended))

    def aborted(self, peer: PeerId) -> None:
        """A payload under way will not be completed: its stream ended, or we stopped reading it."""
        self._count(peer, -1)

    def forget(self, peer: PeerId) -> None:
        """Drop the log of `peer`: its bytes so far were probes, not traffic."""
        self._reads.pop(peer, None)

    def peers(self, since: float) -> tuple[PeerId, ...]:
        """The peers with payload bytes after `since`."""
        return tuple(peer for peer, reads in self._reads.items() if reads and reads[-1].at >= since)

    def sample(self, peer: PeerId, since: float, rtt_seconds: float | None) -> Sample | None:
        return sample(tuple(self._reads.get(peer, ())), since, rtt_seconds)

    def _count(self, peer: PeerId, change: int) -> None:
        count = self._open.get(peer, 0) + change
        if count > 0:
            self._open[peer] = count
        else:
            self._open.pop(peer, None)
