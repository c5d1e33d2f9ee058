"""Receives others' calls, one message each way in hivemind's form, from p2pd as streams.

p2pd can deliver such a call as a message. It would then buffer the request, up to 4 MiB, and an unread answer for as long as the
connection lasts, and without a limit on their number. So each call is a socket here, like a stream of frames: closed once it is
answered, too large, or late. p2pd first writes who calls, and from which public network.

When calls or their bytes exceed the limits, the oldest call is dropped: an honest one ends within milliseconds, however many
others are left open. Each peer has its own limits, and so has each public network, since peer ids are free.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from cachetools import FIFOCache
from google.protobuf.message import DecodeError
from hivemind.proto import p2pd_pb2

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.errors import FrameError, TransportError
from fusion.swarm.streams.frame_parser import delimited, delimited_length
from fusion.swarm.streams.p2pd import Daemon
from fusion.swarm.streams.p2pd_control import disconnect, public_network, register_handler, remove_handler
from fusion.swarm.streams.peer_ids import from_bytes
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

_ENVELOPE_BYTES = 512  # around a request: an id, a peer id, a name
_MOST_INFO_BYTES = 1 << 12  # p2pd's header of a call: a peer id, an address, a name
_BACKLOG = 512
_SOCKET = "c.sock"
_MOST_UNREAD = 4  # answers of one peer dropped before it read them, until it is hung up on
_REMEMBERED = 4096  # peers with unread answers


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    seconds: float = 15.0  # from a call's start to the last byte of its answer; callers give up earlier
    per_peer: int = 64  # calls under way
    per_subnet: int = 256
    in_all: int = 512
    peer_bytes: int = 8 << 20  # of requests being received and answers being sent
    bytes_in_all: int = 32 << 20


@dataclass(frozen=True)
class Caller:
    peer: PeerId
    subnet: str | None  # the public network it calls from, where that is known


@dataclass(frozen=True)
class Method:
    """`answer` gets a request of at most `most_bytes`; an exception is sent to the caller in hivemind's form."""

    answer: Callable[[Caller, bytes], bytes]
    most_bytes: int


class CallServer:
    """Answers the calls that reach a p2pd. Made by `await CallServer.start(...)`, ended by `aclose`."""

    def __init__(self, daemon: Daemon, methods: Mapping[str, Method], limits: CallLimits) -> None:
        self.methods = dict(methods)
        self._limits = limits
        self._daemon = daemon
        self._path = daemon.directory / _SOCKET
        self._server: asyncio.AbstractServer | None = None
        self._calls: dict[_Call, float] = {}  # with their deadlines; oldest first
        self._counts: Counter[PeerId | str] = Counter()  # calls of each peer, and from each public network
        self._bytes: Counter[PeerId] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._hanging_up: dict[PeerId, asyncio.Task[None]] = {}
        self._unread: FIFOCache[PeerId, int] = FIFOCache(_REMEMBERED)  # answers dropped before they were read

    @classmethod
    async def start(
        cls, daemon: Daemon, methods: Mapping[str, Method], limits: CallLimits | None = None
    ) -> CallServer:
        """Raises TransportError where p2pd refuses, as for a method that is served already."""
        made = cls(daemon, methods, limits or CallLimits())
        loop = asyncio.get_running_loop()
        made._server = await loop.create_unix_server(
            lambda: _Call(made), path=str(made._path), backlog=_BACKLOG
        )
        try:
            await register_handler(daemon, list(methods), made._path)
        except BaseException:
            made._server.close()
            raise
        return made

    async def aclose(self) -> None:
        """Raises TransportError where p2pd does not answer, but closes in any case."""
        if self._server is not None:
            self._server.close()
        if self._timer is not None:
            self._timer.cancel()
        for call in list(self._calls):
            call.abort()
        await cancel_all(self._hanging_up.values())
        await remove_handler(self._daemon, list(self.methods), self._path)

    # Called by `_Call`.

    def mark_active(self, peer: bytes) -> None:
        self._daemon.connections.use(peer)

    def add(self, call: _Call) -> None:
        """Add a call whose caller is not known yet."""
        while len(self._calls) >= self._limits.in_all:
            self._drop_oldest()
        loop = asyncio.get_running_loop()
        self._calls[call] = loop.time() + self._limits.seconds
        if self._timer is None:
            self._timer = loop.call_later(self._limits.seconds, self._drop_late)

    def admit(self, caller: Caller) -> bool:
        """Count one more call of the caller; False, uncounted, where its limits are reached."""
        if self._counts[caller.peer] >= self._limits.per_peer:
            return False
        if caller.subnet is not None:
            if self._counts[caller.subnet] >= self._limits.per_subnet:
                return False
            self._counts[caller.subnet] += 1
        self._counts[caller.peer] += 1
        return True

    def reserve(self, call: _Call, caller: Caller, size: int) -> bool:
        """Reserve so many bytes for the call in place of those before, dropping the oldest calls if needed; False where the caller may not
        have them or the call itself was dropped."""
        others = self._bytes[caller.peer] - call.held
        if others + size > self._limits.peer_bytes:
            return False
        self._bytes[caller.peer], call.held = others + size, size
        while self._bytes.total() > self._limits.bytes_in_all:
            self._drop_oldest()
        return call in self._calls

    def remove(self, call: _Call, caller: Caller | None) -> None:
        self._calls.pop(call, None)
        if caller is None:
            return
        self._bytes[caller.peer] -= call.held
        if self._bytes[caller.peer] <= 0:
            del self._bytes[caller.peer]
        for holder in (caller.peer, caller.subnet):
            if holder is not None:
                self._counts[holder] -= 1
                if self._counts[holder] <= 0:
                    del self._counts[holder]

    def _drop_oldest(self) -> None:
        """Drop the oldest call. One unread answer is no evidence against its caller: it may have had no time to read it."""
        call = next(iter(self._calls))
        if call.unread and call.caller is not None:
            peer = call.caller.peer
            self._unread[peer] = self._unread.get(peer, 0) + 1
            if self._unread[peer] >= _MOST_UNREAD:
                del self._unread[peer]
                self._hang_up(peer)
        call.abort()

    def _drop_late(self) -> None:
        loop = asyncio.get_running_loop()
        for call, deadline in list(self._calls.items()):
            if deadline > loop.time():
                break
            if call.unread and call.caller is not None:
                self._hang_up(call.caller.peer)
            call.abort()
        first = next(iter(self._calls.values()), None)
        self._timer = None if first is None else loop.call_at(first, self._drop_late)

    def _hang_up(self, peer: PeerId) -> None:
        """Disconnect a peer that neither reads an answer nor closes its stream: p2pd would buffer its part of the answer for as long as
        the connection lasts."""
        if peer not in self._hanging_up:
            logger.debug("hung up on %s: it does not read our answers", peer)
            task = asyncio.create_task(self._disconnect(peer), name="hanging up")
            self._hanging_up[peer] = task
            task.add_done_callback(lambda _: self._hanging_up.pop(peer, None))

    async def _disconnect(self, peer: PeerId) -> None:
        with suppress(TransportError):
            await disconnect(self._daemon, peer)


class _Call(asyncio.Protocol):
    """One call: p2pd's header, the request, the answer."""

    def __init__(self, server: CallServer) -> None:
        self.caller: Caller | None = None
        self.held = 0  # bytes, of the request or of the answer
        self._server = server
        self._socket: asyncio.Transport | None = None
        self._received = bytearray()
        self._method: Method | None = None
        self._expected: int | None = None  # bytes of the request
        self._answered = False

    @property
    def unread(self) -> bool:
        """Whether there is an answer that could not be sent yet."""
        return self._answered and self._socket is not None and self._socket.get_write_buffer_size() > 0

    def abort(self) -> None:
        if self._socket is not None:
            self._socket.abort()
        self._end()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return  # bytes after the request are ignored
        self._received += data
        try:
            if self.caller is None and not self._read_header():
                return
            if self._expected is None and not self._read_length():
                return
            if len(self._received) >= (self._expected or 0):
                self._answer()
        except (FrameError, DecodeError, ValueError) as error:
            logger.debug("a call that makes no sense: %s", error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    # The steps; False where more bytes are needed first.

    def _read_header(self) -> bool:
        message = self._next(_MOST_INFO_BYTES)
        if message is None:
            return False
        info = p2pd_pb2.StreamInfo.FromString(message)
        self._method = self._server.methods.get(info.proto)
        caller = Caller(from_bytes(info.peer), public_network(info.addr))
        self._server.mark_active(info.peer)
        if self._method is None or not self._server.admit(caller):
            self.abort()
            return False
        self.caller = caller
        return True

    def _read_length(self) -> bool:
        found = delimited_length(self._received)
        if found is None:
            return False
        length, start = found
        assert self._method is not None and self.caller is not None
        most = self._method.most_bytes + _ENVELOPE_BYTES
        if length > most:
            raise FrameError(f"a request of {length} bytes; at most {most}")
        if not self._server.reserve(self, self.caller, length):
            self.abort()
            return False
        del self._received[:start]
        self._expected = length
        return True

    def _answer(self) -> None:
        assert self._method is not None and self.caller is not None and self._socket is not None
        request = p2pd_pb2.PersistentConnectionRequest.FromString(bytes(self._received[: self._expected]))
        self._received = bytearray()
        if not request.HasField("callUnary"):
            raise FrameError("no call")
        try:
            answered = p2pd_pb2.CallUnaryResponse(
                response=self._method.answer(self.caller, request.callUnary.data)
            )
        except Exception as error:  # the boundary between peers: no request may stop the node
            answered = p2pd_pb2.CallUnaryResponse(error=repr(error).encode())
        reply = p2pd_pb2.PersistentConnectionRequest(callId=request.callId, unaryResponse=answered)
        message = delimited(reply.SerializeToString())
        if not self._server.reserve(self, self.caller, len(message)):
            self.abort()
            return
        self._answered = True
        self._socket.write(message)
        self._socket.close()

    def _next(self, most_bytes: int) -> bytes | None:
        """Take one message off the front of the received bytes; None where it is not complete."""
        found = delimited_length(self._received)
        if found is None:
            return None
        length, start = found
        if length > most_bytes:
            raise FrameError(f"a message of {length} bytes; at most {most_bytes}")
        if len(self._received) < start + length:
            return None
        message = bytes(self._received[start : start + length])
        del self._received[: start + length]
        return message

    def _end(self) -> None:
        self._received = bytearray()
        caller, self.caller = self.caller, None
        self._server.remove(self, caller)
