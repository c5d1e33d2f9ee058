"""A long-lived stream with a task that writes: whoever computes puts frames in, and does not wait for the wire.

The first frame of such a stream is its dialler's `hello`, which says what the stream joins.
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

HELLO_SECONDS = 10.0  # for the first frame to come
MAX_UNSENT = 1 << 14  # frames that may wait for a reader; more, and it is taken for dead
LINGER_SECONDS = 1.0  # how long the last frames may take to go out
VALUE_BYTES = 32  # of memory that we count for each value in a header that waits, beside the text of it


async def dial(
    transport: Transport, peer: PeerId, protocol: WireProtocol, hello: Mapping[str, Any]
) -> Stream:
    """A new stream to the peer on which we have said hello. Raises PeerUnreachable or another TransportError."""
    stream = await transport.open(peer, protocol.name, stripes=protocol.stripes)
    try:
        await stream.send("hello", hello)
    except BaseException:
        stream.abort()
        raise
    return stream


async def hello(stream: Stream) -> Mapping[str, Any]:
    """What the dialler of an incoming stream says first. Raises FrameError, TimeoutError."""
    async with asyncio.timeout(HELLO_SECONDS):
        frame = await stream.receive()
    if frame.kind != "hello":
        raise FrameError(f"{stream.protocol} begins with hello, not {frame.kind[:40]!r}")
    return frame.header


@dataclass(frozen=True)
class Ended:
    """How a stream came to its end."""

    reason: str  # one line
    vanished: bool = False  # the other end is gone without a word


class QueuedStream:
    """Sends in order what is put in, and hands what arrives to `on_frame`, until the stream ends or `aclose`.

    `on_end` is called once when the stream ends otherwise than by `aclose` or `abort`; also where `on_frame` raises.
    Neither may block.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[Ended], None] = lambda ended: None,
        depth: int = 3,
    ) -> None:
        """`depth`: how many frames may be on their way before it is `full`."""
        self.stream = stream
        self.ended = asyncio.Event()
        self.sent_bytes = 0  # of payload
        self._outcome = Ended("closed")
        self._on_frame = on_frame
        self._on_end = on_end
        self._depth = depth
        self._direct = stream if isinstance(stream, FrameStream) else None
        # With how many bytes each counts; the first is being sent.
        self._unsent: deque[tuple[str, Mapping[str, Any], Sequence[Buffer], int]] = deque()
        self._unsent_bytes = 0
        self._closing = False  # once nothing is left to be sent
        self._rest_seconds = 0.0  # before the next frame is read
        self._wake = asyncio.Event()
        self._gone = asyncio.Event()  # set when a frame has gone out
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    def post(self, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Put a frame out without waiting. After the end it is dropped: `on_end` has told."""
        if self.ended.is_set():
            return
        if len(self._unsent) > MAX_UNSENT:
            self.end(f"{self.stream.remote} does not read what it is sent")
            return
        if self._sends_now(kind, header, payload):
            return
        size_bytes = memory_bytes(header) + _payload_bytes(payload)
        self._unsent.append((kind, header, payload, size_bytes))
        self._unsent_bytes += size_bytes
        self._wake.set()

    def _sends_now(self, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer]) -> bool:
        """Where nothing waits to be sent, a small frame goes out at once: to wake the task that writes takes longer."""
        if self._unsent or self._direct is None:
            return False
        try:
            if not self._direct.send_now(kind, header, payload):
                return False
        except Exception:
            return False  # the task that writes comes upon it as well, and ends the stream
        self.sent_bytes += _payload_bytes(payload)
        return True

    def rest(self, seconds: float) -> None:
        """From within `on_frame`: read nothing for so long, so that whoever asks too much waits for the answers."""
        self._rest_seconds = seconds

    @property
    def full(self) -> bool:
        """Whether so many frames wait that whoever has large ones should let them go out first (`room`)."""
        return len(self._unsent) >= self._depth and not self.ended.is_set()

    async def room(self) -> None:
        """Until it is not full, or has ended."""
        await self._fewer_than(self._depth)

    @property
    def unsent_bytes(self) -> int:
        """Of memory, of what has not gone out yet: payloads, and headers as they are counted."""
        return self._unsent_bytes

    async def flush(self) -> None:
        """Wait until all that was put in has been handed to the transport, or the stream has ended."""
        await self._fewer_than(1)

    async def _fewer_than(self, count: int) -> None:
        while len(self._unsent) >= count and not self.ended.is_set():
            self._gone.clear()
            await self._gone.wait()

    async def wait(self) -> Ended:
        """Until the stream has ended."""
        await self.ended.wait()
        return self._outcome

    def end(self, reason: str, *, vanished: bool = False) -> None:
        """Drop the stream and tell why. Idempotent."""
        if not self.ended.is_set():
            self._outcome = Ended(reason, vanished)
            self.abort()
            self._on_end(self._outcome)

    def abort(self) -> None:
        """Drop the stream, with what waits to be sent. Idempotent."""
        self.ended.set()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._gone.set()
        self.stream.abort()
        current = asyncio.current_task()
        for task in (self._writer, self._reader):
            if task is not current:
                task.cancel()

    async def aclose(self) -> None:
        """End the stream once what was put in has gone out, or has had its time. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self._gone.set()
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
                    self._gone.set()
                    self.sent_bytes += _payload_bytes(payload)
                if self._closing:
                    await self.stream.aclose()
                    return
                self._wake.clear()
                await self._wake.wait()
        except Exception as error:  # whatever a frame of ours does: what is put in would never go out again
            if not isinstance(error, (SwarmError, ValueError)):
                self._warn(error)
            await asyncio.sleep(0)  # what the other end has said already tells more than that we cannot send
            self._end_with(error)

    async def _read(self) -> None:
        try:
            while not self.ended.is_set():
                self._on_frame(await self.stream.receive())
                if self._rest_seconds:
                    seconds, self._rest_seconds = self._rest_seconds, 0.0
                    await asyncio.sleep(seconds)
        except Exception as error:
            # Whatever a frame does: a stream that nobody reads any more would never end
            if not isinstance(error, (StreamClosed, StreamBroken)):
                self._warn(error)
            self._end_with(error)

    def _warn(self, error: Exception) -> None:
        log.warning("%s with %s: %s", self.stream.protocol, self.stream.remote, error_line(error))
        log.debug("where it happened", exc_info=error)

    def _end_with(self, error: Exception) -> None:
        told = isinstance(error, (SwarmError, ValueError))
        self.end(
            (str(error) if told else error_line(error)) or "ended", vanished=isinstance(error, StreamBroken)
        )


def _payload_bytes(payload: Sequence[Buffer]) -> int:
    return sum(memoryview(buffer).nbytes for buffer in payload)


def memory_bytes(value: object) -> int:
    """Of a header or a value in it, roughly."""
    match value:
        case Mapping():
            return CONTAINER_BYTES + sum(memory_bytes(each) for item in value.items() for each in item)
        case list() | tuple():
            return CONTAINER_BYTES + sum(map(memory_bytes, value))
        case str() | bytes() | bytearray():
            return VALUE_BYTES + len(value)
    return VALUE_BYTES
