"""A long-lived stream with a writer task: callers queue frames without waiting for the network.

The first frame of such a stream is its dialler's `hello`, with what the stream is for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.swarm.errors import FrameError, StreamBroken, StreamClosed, SwarmError
from fusion.swarm.printable import error_line
from fusion.swarm.protocol import WireProtocol
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.frames import CONTAINER_BYTES
from fusion.swarm.transport import Buffer, Frame, PeerId, Stream, Transport

log = logging.getLogger(__name__)

HELLO_SECONDS = 10.0  # for the first frame to arrive
MAX_UNSENT = 1 << 14  # queued frames; with more, the remote end is taken for dead
LINGER_SECONDS = 1.0  # for the last frames to be sent
VALUE_BYTES = 32  # of memory, estimated for each value in a queued header, beside its text


async def dial(
    transport: Transport, peer: PeerId, protocol: WireProtocol, hello: Mapping[str, Any]
) -> Stream:
    """A new stream to the peer, `hello` sent. Raises PeerUnreachable or another TransportError."""
    stream = await transport.open(peer, protocol.name, stripes=protocol.stripes)
    try:
        await stream.send("hello", hello)
    except BaseException:
        stream.abort()
        raise
    return stream


async def hello(stream: Stream) -> Mapping[str, Any]:
    """The header of the dialler's hello on an incoming stream. Raises FrameError, TimeoutError."""
    async with asyncio.timeout(HELLO_SECONDS):
        frame = await stream.receive()
    if frame.kind != "hello":
        raise FrameError(f"{stream.protocol} begins with hello, not {frame.kind[:40]!r}")
    return frame.header


@dataclass(frozen=True)
class Ended:
    """Why a stream ended."""

    reason: str  # one line
    vanished: bool = False  # the remote end is gone without an end mark


class QueuedStream:
    """Sends queued frames in order, and calls `on_frame` with received ones, until the stream ends or `aclose`.

    `on_end` is called once when the stream ends otherwise than by `aclose` or `abort`; also when `on_frame` raises. Neither may
    block.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Ended], None] = lambda ended: None,
        depth: int = 3,
    ) -> None:
        """`depth`: how many frames may be queued before it is `full`."""
        self.stream = stream
        self.ended = asyncio.Event()
        self.sent_bytes = 0  # of payload
        self._outcome = Ended("closed")
        self._on_frame = on_frame
        self._on_end = on_end
        self._depth = depth
        self._direct = stream if isinstance(stream, FrameStream) else None
        # With the memory of each in bytes; the first is being sent.
        self._unsent: deque[tuple[str, Mapping[str, Any], Sequence[Buffer], int]] = deque()
        self._unsent_bytes = 0
        self._closing = False  # close once the queue is empty
        self._rest_seconds = 0.0  # before the next frame is read
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()  # set when a frame was sent, or the stream ended
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    def post(self, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Queue a frame. Dropped after the end, which `on_end` has reported."""
        if self.ended.is_set():
            return
        if len(self._unsent) > MAX_UNSENT:
            self.end(f"{self.stream.remote} does not read what it is sent")
            return
        if self._send_at_once(kind, header, payload):
            return
        size_bytes = memory_bytes(header) + _payload_bytes(payload)
        self._unsent.append((kind, header, payload, size_bytes))
        self._unsent_bytes += size_bytes
        self._wake.set()

    def _send_at_once(self, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer]) -> bool:
        """Send a small frame directly where none is queued: waking the writer task takes longer. Whether it was sent."""
        if self._unsent or self._direct is None:
            return False
        try:
            if not self._direct.send_now(kind, header, payload):
                return False
        except Exception:
            return False  # the writer task meets the same error, and ends the stream
        self.sent_bytes += _payload_bytes(payload)
        return True

    def rest(self, seconds: float) -> None:
        """For `on_frame`: read nothing for so long, as backpressure on a peer that requests too much."""
        self._rest_seconds = seconds

    @property
    def full(self) -> bool:
        """Whether `depth` frames are queued, so that senders of large ones should await `room` first."""
        return len(self._unsent) >= self._depth and not self.ended.is_set()

    async def room(self) -> None:
        """Wait until it is not full, or has ended."""
        await self._fewer_than(self._depth)

    @property
    def unsent_bytes(self) -> int:
        """Memory of the queued frames: payloads, and headers as estimated."""
        return self._unsent_bytes

    async def flush(self) -> None:
        """Wait until all queued frames were given to the transport, or the stream has ended."""
        await self._fewer_than(1)

    async def _fewer_than(self, count: int) -> None:
        while len(self._unsent) >= count and not self.ended.is_set():
            self._progress.clear()
            await self._progress.wait()

    async def wait(self) -> Ended:
        """Wait until the stream has ended; returns why."""
        await self.ended.wait()
        return self._outcome

    def end(self, reason: str, *, vanished: bool = False) -> None:
        """Abort the stream and report why by `on_end`. Idempotent."""
        if not self.ended.is_set():
            self._outcome = Ended(reason, vanished)
            self.abort()
            self._on_end(self._outcome)

    def abort(self) -> None:
        """Abort the stream and drop the queue. Idempotent."""
        self.ended.set()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._progress.set()
        self.stream.abort()
        current = asyncio.current_task()
        for task in (self._writer, self._reader):
            if task is not current:
                task.cancel()

    async def aclose(self) -> None:
        """Close the stream once the queue is sent, at the latest after LINGER_SECONDS. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self._progress.set()
            self._reader.cancel()
            self._closing = True
            self._wake.set()
            await asyncio.wait([self._writer], timeout=LINGER_SECONDS)
        self.abort()
        await asyncio.gather(self._writer, self._reader, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while True:
                while self._unsent:
                    kind, header, payload, size_bytes = self._unsent[0]
                    await self.stream.send(kind, header, payload)
                    self._unsent.popleft()
                    self._unsent_bytes -= size_bytes
                    self._progress.set()
                    self.sent_bytes += _payload_bytes(payload)
                if self._closing:
                    await self.stream.aclose()
                    return
                self._wake.clear()
                await self._wake.wait()
        except Exception as error:  # any error has to end the stream: nothing would be sent any more
            if not isinstance(error, (SwarmError, ValueError)):
                self._warn(error)
            # Let the reader report first: a received reason is better than our send error.
            await asyncio.sleep(0)
            self._end_with(error)

    async def _read(self) -> None:
        try:
            while not self.ended.is_set():
                self._on_frame(await self.stream.receive())
                if self._rest_seconds:
                    seconds, self._rest_seconds = self._rest_seconds, 0.0
                    await asyncio.sleep(seconds)
        except Exception as error:
            # Any error has to end the stream: nothing would be read any more
            if not isinstance(error, (StreamClosed, StreamBroken)):
                self._warn(error)
            self._end_with(error)

    def _warn(self, error: Exception) -> None:
        log.warning("%s with %s: %s", self.stream.protocol, self.stream.remote, error_line(error))
        log.debug("where it happened", exc_info=error)

    def _end_with(self, error: Exception) -> None:
        own_text = isinstance(error, (SwarmError, ValueError))
        self.end(
            (str(error) if own_text else error_line(error)) or "ended",
            vanished=isinstance(error, StreamBroken),
        )


def _payload_bytes(payload: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in payload)


def memory_bytes(value: object) -> int:
    """The rough memory of a header, or of a value in it."""
    match value:
        case Mapping():
            return CONTAINER_BYTES + sum(memory_bytes(each) for item in value.items() for each in item)
        case list() | tuple():
            return CONTAINER_BYTES + sum(map(memory_bytes, value))
        case str() | bytes() | bytearray():
            return VALUE_BYTES + len(value)
    return VALUE_BYTES
