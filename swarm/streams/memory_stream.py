"""A stream within one process: the memory transport's, and a real peer's stream to itself.

Frames are encoded and decoded, and payloads copied, exactly as over a network.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fusion.swarm.errors import FrameError, StreamBroken, StreamClosed, TransportError
from fusion.swarm.streams import frames
from fusion.swarm.streams.frames import DEFAULT_LIMITS, FrameLimits
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import UNASKED_BYTES, UNASKED_HEADER_BYTES, Buffer, Frame, PeerId

BUFFERED_BYTES = 1 << 20  # in a stream, before its sender has to wait; one frame always fits


class _Pipe:
    """One direction of a stream: encoded frames, sent and not yet received."""

    def __init__(self) -> None:
        self.frames: deque[tuple[bytes, bytearray]] = deque()
        self.size = 0
        self.arrived_bytes = 0
        self.end: Literal["", "closed", "broken"] = ""
        self.changed = asyncio.Event()

    def put(self, head: bytes, payload: bytearray) -> None:
        self.frames.append((head, payload))
        self.size += len(head) + len(payload)
        self.arrived_bytes += len(head) + len(payload)
        self.wake()

    def take(self) -> tuple[bytes, bytearray]:
        head, payload = self.frames.popleft()
        self.size -= len(head) + len(payload)
        self.wake()
        return head, payload

    def finish(self, how: Literal["closed", "broken"]) -> None:
        self.end = self.end or how
        self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class MemoryStream:
    """One end of a pair of pipes. Implements `fusion.swarm.transport.Stream`."""

    def __init__(
        self,
        remote: PeerId,
        protocol: str,
        incoming: _Pipe,
        outgoing: _Pipe,
        limits: FrameLimits,
        traffic: TrafficCounter,
        allowed: int,
    ) -> None:
        self.remote = remote
        self.protocol = protocol
        self._incoming = incoming
        self._outgoing = outgoing
        self._limits = limits
        self._traffic = traffic
        self._allowed = allowed
        self._full_headers = allowed > UNASKED_BYTES  # accept headers up to the limits
        self._turn = asyncio.Lock()
        self._closed = False
        self._has_received = False

    @property
    def has_received(self) -> bool:
        return self._has_received or bool(self._incoming.frames)

    @property
    def arrived_bytes(self) -> int:
        return self._incoming.arrived_bytes

    async def send(
        self, kind: str, header: Mapping[str, Any] | None = None, payload: Sequence[Buffer] = ()
    ) -> None:
        head, views, size = frames.encode(kind, header, payload, self._limits)
        async with self._turn:
            pipe = self._outgoing
            while True:
                if self._closed:
                    raise StreamClosed(f"{self.protocol}: we closed this stream")
                if pipe.end or self._incoming.end:
                    raise self._ended(pipe.end or self._incoming.end)
                if not pipe.size or pipe.size + len(head) + size <= BUFFERED_BYTES:
                    break
                await pipe.changed.wait()
            pipe.put(head, bytearray().join(views))
            self._full_headers = True
            self._traffic.sent(self.remote, len(head) + size)

    async def receive(self) -> Frame:
        await self.announced()
        head, payload = self._incoming.take()
        self._has_received = True
        if self._large_header(head):
            self.abort()
            raise FrameError(
                f"{self.remote} on {self.protocol}: a header of {len(head)} bytes is not allowed now"
            )
        if len(payload) > self._allowed:
            self.abort()
            raise FrameError(
                f"{self.remote} on {self.protocol}: a payload of {len(payload)} bytes; at most {self._allowed} "
                "are allowed now"
            )
        self._traffic.received(self.remote, len(head) + len(payload))
        kind, header = frames.decode_header(memoryview(head)[frames.HEAD_BYTES :])
        return Frame(kind, header, memoryview(payload))

    async def announced(self) -> int:
        pipe = self._incoming
        while not pipe.frames:
            if self._closed:
                raise StreamClosed(f"{self.protocol}: we closed this stream")
            if pipe.end:
                raise self._ended(pipe.end)
            await pipe.changed.wait()
        head, payload = pipe.frames[0]
        return max(len(payload), UNASKED_BYTES + len(head)) if self._large_header(head) else len(payload)

    def _large_header(self, head: bytes) -> bool:
        return not self._full_headers and len(head) > frames.HEAD_BYTES + UNASKED_HEADER_BYTES

    def allow(self, payload_bytes: int) -> None:
        self._full_headers = True
        self._allowed = min(payload_bytes, self._limits.payload_bytes)

    async def aclose(self) -> None:
        self._finish("closed")

    def abort(self) -> None:
        self._finish("broken")

    def _finish(self, how: Literal["closed", "broken"]) -> None:
        self._closed = True
        self._outgoing.finish(how)
        self._incoming.finish(how)
        self._incoming.frames.clear()

    def lose(self) -> None:
        """Break the stream as a cut link does: frames under way are lost."""
        for pipe in (self._incoming, self._outgoing):
            pipe.frames.clear()
            pipe.size = 0
            pipe.finish("broken")

    @property
    def ended(self) -> bool:
        return self._closed or bool(self._incoming.end and self._outgoing.end)

    def _ended(self, how: str) -> TransportError:
        if how == "closed":
            return StreamClosed(f"{self.remote} closed the {self.protocol} stream")
        return StreamBroken(f"the {self.protocol} stream to {self.remote} broke")


def stream_pair(
    here: PeerId,
    there: PeerId,
    protocol: str,
    limits: FrameLimits = DEFAULT_LIMITS,
    traffic: tuple[TrafficCounter, TrafficCounter] | None = None,
) -> tuple[MemoryStream, MemoryStream]:
    """Two ends of one stream: the first is held by `here`, which opened it, the second by `there`."""
    near, far = traffic or (TrafficCounter(), TrafficCounter())
    one, two = _Pipe(), _Pipe()
    return (
        MemoryStream(there, protocol, one, two, limits, near, limits.payload_bytes),
        MemoryStream(here, protocol, two, one, limits, far, min(UNASKED_BYTES, limits.payload_bytes)),
    )
