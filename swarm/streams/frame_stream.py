"""A stream of frames over one socket, with backpressure: sends wait for the kernel, reads stop while frames are not taken.

A stream ends in one of three ways: we closed it; the remote end closed it (an end mark arrived); it broke (the socket ended without
one, as when a process is killed). An end mark is answered with one at once, and the closing end waits for the answer: libp2p
may drop a stream, with the frames sent on it, that ends before the other side has accepted it (seen on one in thirteen
streams aborted right after a small send, on a busy machine).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from fusion.swarm.errors import FrameError, StreamBroken, StreamClosed, TransportError
from fusion.swarm.streams import frames
from fusion.swarm.streams.frame_parser import FrameParser
from fusion.swarm.streams.frames import FrameLimits, Message
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.swarm_key import Authorizer
from fusion.swarm.transport import UNASKED_BYTES, UNASKED_HEADER_BYTES, Buffer, Frame, PeerId

# Of received frames, before we stop reading; one frame more may be under way. UNASKED_BYTES on a stream that allows no larger
# payloads, as those that strangers open.
UNREAD_BYTES = 1 << 20
_UNREAD_FRAMES = 256
TOKEN = "member"  # the kind of the first frame, each way, in a closed swarm
_JOINED_BYTES = 64 * 1024  # frames up to this size are sent as one buffer, larger ones without a copy
_LINGER_SECONDS = 2.0


class FrameStream(asyncio.BufferedProtocol):
    """Implements `fusion.swarm.transport.Stream` on a socket whose first message (of p2pd's) goes to `opened`.

    `remote` and `protocol` are set by `opened` for an incoming stream, by the caller for an outgoing one.
    """

    def __init__(
        self,
        limits: FrameLimits,
        traffic: TrafficCounter,
        opened: Callable[[FrameStream, bytes | None], None],
        remote: PeerId = PeerId(""),  # noqa: B008
        protocol: str = "",
        allowed: int | None = None,
        authorizer: Authorizer | None = None,
    ) -> None:
        """`allowed`: the largest payload to accept at first (see `Stream.allow`); on an incoming stream with it, headers of at most
        UNASKED_HEADER_BYTES are accepted until `allow` or our first frame. `authorizer`: of a closed swarm, of which only members'
        frames are accepted and answered."""
        self.remote = remote
        self.protocol = protocol
        self.subnet: str | None = None  # the public network of the opener, where that is known
        self.used_at = asyncio.get_running_loop().time()  # when a frame last came in or went out
        self.arrived_bytes = 0
        self._awaited = False  # a frame, allowed after it was announced, is being received
        self._limits = limits
        self._authorizer = authorizer
        self._token_sent = authorizer is None  # ahead of our first frame
        self._admitted = authorizer is None  # the remote end, by the token in its first frame
        self._outgoing = bool(remote)  # we opened it
        self._traffic = traffic
        self._opened: Callable[[FrameStream, bytes | None], None] | None = opened
        self._parser = FrameParser(limits, preamble=True)
        self._parser.allow(limits.payload_bytes if allowed is None else allowed)
        self._full_headers = self._outgoing or allowed is None  # accept headers up to the limits
        if not self._full_headers:
            self._parser.allow_headers(UNASKED_HEADER_BYTES)
        self._socket: asyncio.Transport | None = None
        self._failure: FrameError | None = None
        self._closed = False
        self.lost = asyncio.get_running_loop().create_future()
        self._remote_ended = asyncio.Event()  # its end mark was received, or it is gone
        self._end_sent = False
        self._reading_paused = False
        self._filling = False  # a payload is being received; its reads are timed
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None  # pending while the kernel's buffer is full
        self.turn = asyncio.Lock()  # held around `send_in_turn`

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's own class does not inherit from asyncio's
        self._socket = cast(asyncio.Transport, transport)
        # No buffer of our own: a send returns when the kernel has all of it.
        self._socket.set_write_buffer_limits(high=0)
        if self._closed:
            self.drop()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.room()

    def buffer_updated(self, nbytes: int) -> None:
        socket = self._socket
        assert socket is not None
        self.arrived_bytes += nbytes
        try:
            self._parser.advance(nbytes)
        except FrameError as error:
            self._fail(error)
        if self._opened is not None and self._parser.preamble is not None:
            opened, self._opened = self._opened, None
            opened(self, self._parser.preamble)
        if not self._admitted and not self._admit():
            return
        self._time(nbytes)
        if self._parser.ended:
            self._send_end()
            self._remote_ended.set()
        if self._closed:
            self._parser.forget()
            if self._parser.refused:
                self.drop()
        elif self._full() and not self._reading_paused and not socket.is_closing():
            self._reading_paused = True
            self._stop_timing()
            socket.pause_reading()
        self._wake_reader()

    def eof_received(self) -> bool:
        return False  # p2pd ends both directions at once

    def pause_writing(self) -> None:
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self._stop_timing()
        self._remote_ended.set()
        if self._opened is not None:
            opened, self._opened = self._opened, None
            opened(self, None)
        self.resume_writing()
        self._wake_reader()

    # The interface.

    @property
    def broke(self) -> bool:
        """Whether it ended without an end mark of either side."""
        return self.lost.done() and not self._closed and not self._parser.ended

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes received, and bytes not yet taken by p2pd: either changes while the connection carries anything."""
        return self.arrived_bytes, 0 if self._socket is None else self._socket.get_write_buffer_size()

    @property
    def has_received(self) -> bool:
        return self._parser.has_received or self._awaited

    @property
    def allowed(self) -> int:
        """The largest payload that is accepted now."""
        return self._parser.allowed

    async def send(
        self, kind: str, header: Mapping[str, Any] | None = None, payload: Sequence[Buffer] = ()
    ) -> None:
        """As in the Protocol. The payload's memory may be used again once this returns. A send that is cancelled
        after part of a large frame has left breaks the stream."""
        message = self.encode(kind, header, payload)
        async with self.turn:
            await self.send_in_turn(message)

    def send_now(self, kind: str, header: Mapping[str, Any] | None, payload: Sequence[Buffer]) -> bool:
        """Send a small frame at once if that needs no waiting. False, with nothing sent, where it does or the stream has ended (`send`
        raises why). Raises FrameError, ValueError."""
        socket = self._socket
        if socket is None or socket.is_closing() or self.lost.done() or self._closed or self._parser.ended:
            return False
        if not self._token_sent or self._writable is not None or self.turn.locked():
            return False
        head, views, size = self.encode(kind, header, payload)
        if len(head) + size > _JOINED_BYTES:
            return False
        socket.write(b"".join((head, *views)))
        self._accept_full_headers()
        self.used_at = asyncio.get_running_loop().time()
        self._traffic.sent(self.remote, len(head) + size)
        return True

    def encode(self, kind: str, header: Mapping[str, Any] | None, payload: Sequence[Buffer]) -> Message:
        """Raises FrameError for a frame over the limits."""
        return frames.encode(kind, header, payload, self._limits)

    async def send_in_turn(self, message: Message) -> None:
        """As `send`, for the holder of `turn`. Its bytes are the next ones on the wire when this first waits."""
        head, views, size = message
        if self._closed or self._parser.ended:  # the remote end has stopped reading, too
            raise self._ended()
        if not self._token_sent:
            head = self._token() + head
        if len(head) + size <= _JOINED_BYTES:
            await self._write(b"".join((head, *views)))
        else:
            try:
                await self._write(head, *views)
            except asyncio.CancelledError:
                self.abort()
                raise
        self._accept_full_headers()
        self.used_at = asyncio.get_running_loop().time()
        self._traffic.sent(self.remote, len(head) + size)

    async def receive(self) -> Frame:
        while not self._parser.ready or self._closed:
            if self._parser.refused and self._failure is None and not self._closed:
                self._fail(FrameError(self._parser.refusal))
            await self._more()
        try:
            frame, size = self._parser.take()
        except FrameError as error:
            self._parser.forget()
            self._fail(error)
            raise self._with_origin(error) from error
        self.used_at = asyncio.get_running_loop().time()
        self._traffic.received(self.remote, size)
        self._resume_reading()
        return frame

    async def announced(self) -> int:
        while self._closed or not (self._parser.ready or self._parser.refused):
            await self._more()
        return self._parser.announced

    def allow(self, payload_bytes: int) -> None:
        self._full_headers = True
        announced = self._parser.refused > 0
        try:
            self._parser.allow(payload_bytes)
            self._parser.allow_headers(self._limits.header_bytes)
        except FrameError as error:
            self._fail(error)
        self._awaited |= announced and not self._parser.refused
        self._resume_reading()
        self._wake_reader()

    def _accept_full_headers(self) -> None:
        """After our first frame: the reply may have a large header."""
        if not self._full_headers:
            self.allow(self._parser.allowed)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._close()
        if self.lost.done() or self._socket is None:
            return
        if self._parser.refused:
            self.drop()  # the refused frame would have to be read only to be discarded
            return
        # Discard what arrives until the remote end's mark: a socket closed with unread bytes would lose the sent ones. Then
        # shut down our half: p2pd ends the stream and hangs up.
        try:
            async with asyncio.timeout(_LINGER_SECONDS):
                if self._reading_paused and not self._socket.is_closing():
                    self._socket.resume_reading()
                async with self.turn:
                    self._send_end()
                await self._remote_ended.wait()
                if not self._socket.is_closing():
                    self._socket.write_eof()
                await asyncio.shield(self.lost)
        except (OSError, RuntimeError, TimeoutError):
            pass  # the remote end is gone or does not answer
        finally:
            self.drop()

    def abort(self) -> None:
        self._close()
        self.drop()

    async def write_message(self, message: bytes) -> None:
        """Send raw bytes to p2pd, ahead of the first frame."""
        await self._write(message)

    # Inside.

    async def _more(self) -> None:
        """Wait until bytes are received. Raises the reason if the stream has ended."""
        if self._closed:
            raise StreamClosed(f"{self.protocol}: we closed this stream")
        if self._failure is not None:
            raise self._with_origin(self._failure) from self._failure
        if self._parser.ended or self.lost.done():
            raise self._ended()
        if self._reader is not None:
            raise RuntimeError("two tasks receive from one stream")
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _token(self) -> bytes:
        """The frame ahead of our first one, with our token. Raises StreamBroken on a stream whose opener has not shown its own."""
        if not self._outgoing and not self._admitted:
            raise StreamBroken(f"{self.remote} has not shown that it is a member of this swarm")
        assert self._authorizer is not None
        self._token_sent = True
        return self.encode(TOKEN, {"token": self._authorizer.token}, ())[0]

    def _admit(self) -> bool:
        """Check the token in the first frame; whether the stream may be used now. Aborts, without an answer, for a non-member."""
        if self._parser.ready:
            assert self._authorizer is not None
            with suppress(FrameError):
                frame, _ = self._parser.take()
                token = frame.header.get("token") if frame.kind == TOKEN else None
                self._admitted = self._authorizer.admits(self.remote, token)
            self._parser.has_received = self._parser.ready > 0
        elif not (self._parser.ended or self._parser.refused or self._failure):
            return False  # an incomplete frame
        if not self._admitted:
            self.abort()
        return self._admitted

    def _time(self, nbytes: int) -> None:
        before, now = self._filling, self._parser.filling and self._failure is None
        if before or now:
            self._filling = now
            self._traffic.receive_log.read(self.remote, nbytes, began=not before, ended=not now)

    def _stop_timing(self) -> None:
        if self._filling:
            self._filling = False
            self._traffic.receive_log.aborted(self.remote)

    def _resume_reading(self) -> None:
        if self._reading_paused and not self._full() and self._socket is not None:
            self._reading_paused = False
            if not self._socket.is_closing():
                self._socket.resume_reading()

    def _full(self) -> bool:
        if self._parser.refused:
            return True
        unread = UNREAD_BYTES if self._parser.allowed > UNASKED_BYTES else UNASKED_BYTES
        return self._parser.ready_bytes >= unread or self._parser.ready >= _UNREAD_FRAMES

    async def _write(self, *parts: Buffer) -> None:
        if self._socket is None or self.lost.done() or self._socket.is_closing():
            raise self._ended()
        for part in parts:
            self._socket.write(part)
        while self._writable is not None:
            await asyncio.shield(self._writable)
        if self.lost.done():
            raise self._ended()

    def _fail(self, error: FrameError) -> None:
        self._failure = error
        self.drop()

    def _with_origin(self, error: FrameError) -> FrameError:
        return FrameError(f"{self.remote} on {self.protocol}: {error}")

    def _ended(self) -> TransportError:
        if self._closed:
            return StreamClosed(f"{self.protocol}: we closed this stream")
        if self._parser.ended:
            return StreamClosed(f"{self.remote} closed the {self.protocol} stream")
        return StreamBroken(f"the {self.protocol} stream to {self.remote} broke")

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._parser.forget()
            self._wake_reader()

    def _send_end(self) -> None:
        if not self._admitted and not self._outgoing:
            return  # a non-member gets not even that
        if not self._end_sent and self._socket is not None and not self._socket.is_closing():
            self._end_sent = True
            self._socket.write(frames.END)  # frames are written whole, so this never lands inside one

    def drop(self) -> None:
        """Abort the socket; frames received before can still be taken."""
        if self._socket is not None and not self.lost.done():
            self._socket.abort()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
