"""Runs the handlers of incoming streams, by a table of protocols.

Both transports use it, so that a handler has the same contract on either: it runs in a task of its own, its error is sent to the
other end in one line, and the stream is always ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from fusion.swarm.errors import StreamBroken, StreamClosed, TransportError
from fusion.swarm.printable import error_line
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.transport import Handler, PeerId, Stream

logger = logging.getLogger(__name__)

ERROR_SECONDS = 5.0  # for the other end to accept an error frame
FIRST_FRAME_SECONDS = 10.0  # for the opener's first frame, whatever the protocol
IDLE_CHECK_SECONDS = 15.0  # between two checks for idle streams
SUFFIX = "/lanes"  # of a protocol's name, for a lane of a striped stream


class Handlers:
    """Runs at most `per_peer` handlers at once for each peer, `per_subnet` for each public network, and `in_all`; further streams are
    dropped. At most `silent` streams may be without a first frame: a further one replaces the oldest, so that an opener that
    sends at once, as honest peers do, gets in however many others stay silent. Peer ids are free, so a stranger can get
    around `per_peer`, but not around the other limits. A stream is also dropped when neither side has sent a frame for
    the `idle_seconds` of its protocol."""

    def __init__(
        self,
        *,
        per_peer: int = 256,
        per_subnet: int = 512,
        in_all: int = 2048,
        silent: int = 128,
        idle_seconds: Mapping[str, float] | None = None,
    ) -> None:
        self._handlers: dict[str, Handler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: Counter[PeerId | str] = Counter()  # of each peer, and of each public network
        self._idle_seconds = dict(idle_seconds or {})
        self._open: dict[FrameStream, float] = {}  # with the seconds that each may be idle
        self._idle_timer: asyncio.TimerHandle | None = None
        self._per_peer = per_peer
        self._per_subnet = per_subnet
        self._in_all = in_all
        self._most_silent = silent
        # Streams without a first frame when last checked, with the deadlines for it; oldest first.
        self._silent: dict[Stream, float] = {}
        # One for all: a timer of its own would keep a stream's memory until it fires.
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __contains__(self, protocol: str) -> bool:
        return protocol in self._handlers

    def add(self, protocol: str, handler: Handler) -> None:
        if protocol in self._handlers:
            raise ValueError(f"{protocol} is already served")
        self._handlers[protocol] = handler

    def accept(self, stream: Stream) -> None:
        """Start the stream's handler and return at once."""
        handler = self._handlers.get(stream.protocol)
        if handler is None or self._closed:
            stream.abort()
            return
        if self._running[stream.remote] >= self._per_peer:
            logger.warning("dropped a stream of %s: it has %d open already", stream.remote, self._per_peer)
            stream.abort()
            return
        subnet = stream.subnet if isinstance(stream, FrameStream) else None
        if subnet is not None and self._running[subnet] >= self._per_subnet:
            logger.warning("dropped a stream from %s: it has %d open already", subnet, self._per_subnet)
            stream.abort()
            return
        if len(self._tasks) >= self._in_all:
            logger.warning("dropped a stream of %s: %d are open in all", stream.remote, self._in_all)
            stream.abort()
            return
        self._await_first_frame(stream)
        self._watch(stream)
        self._running[stream.remote] += 1
        if subnet is not None:
            self._running[subnet] += 1
        task = asyncio.create_task(run(handler, stream), name=f"{stream.protocol} from {stream.remote}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finished(done, stream))

    def _await_first_frame(self, stream: Stream) -> None:
        if len(self._silent) >= self._most_silent:
            self._silent = {each: until for each, until in self._silent.items() if not each.has_received}
        if len(self._silent) >= self._most_silent:
            self._drop_silent(next(iter(self._silent)))
        loop = asyncio.get_running_loop()
        self._silent[stream] = loop.time() + FIRST_FRAME_SECONDS
        if self._timer is None:
            self._timer = loop.call_later(FIRST_FRAME_SECONDS, self._drop_late)

    def _drop_late(self) -> None:
        loop = asyncio.get_running_loop()
        for stream, until in list(self._silent.items()):
            if stream.has_received or until <= loop.time():
                self._drop_silent(stream)
        first = min(self._silent.values(), default=None)
        self._timer = None if first is None else loop.call_at(first, self._drop_late)

    def _drop_silent(self, stream: Stream) -> None:
        del self._silent[stream]
        if not stream.has_received:
            logger.debug("hung up on %s, which opened %s and said nothing", stream.remote, stream.protocol)
            stream.abort()

    def _watch(self, stream: Stream) -> None:
        seconds = self._idle_seconds.get(stream.protocol.removesuffix(SUFFIX))
        if seconds is not None and isinstance(stream, FrameStream):
            self._open[stream] = seconds
            if self._idle_timer is None:
                loop = asyncio.get_running_loop()
                self._idle_timer = loop.call_later(IDLE_CHECK_SECONDS, self._drop_idle)

    def _drop_idle(self) -> None:
        loop = asyncio.get_running_loop()
        for stream, seconds in list(self._open.items()):
            if loop.time() - stream.used_at >= seconds:
                logger.debug("hung up on %s: %s idle for %.0f s", stream.remote, stream.protocol, seconds)
                stream.abort()
        self._idle_timer = loop.call_later(IDLE_CHECK_SECONDS, self._drop_idle) if self._open else None

    def _finished(self, task: asyncio.Task[None], stream: Stream) -> None:
        self._silent.pop(stream, None)
        self._tasks.discard(task)
        holders: list[PeerId | str] = [stream.remote]  # "" where it is a command of this machine
        if isinstance(stream, FrameStream):
            self._open.pop(stream, None)
            if stream.subnet is not None:
                holders.append(stream.subnet)
        for holder in holders:
            self._running[holder] -= 1
            if self._running[holder] <= 0:
                del self._running[holder]

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel the running handlers without waiting, and accept no more streams. Not the calling task, if it is a handler."""
        self._closed = True
        for timer in (self._timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        return tasks

    async def aclose(self) -> None:
        """Cancel the running handlers and wait for them."""
        await asyncio.gather(*self.cancel(), return_exceptions=True)


async def run(handler: Handler, stream: Stream) -> None:
    """Run the handler, send its error to the other end, and end the stream."""
    try:
        await handler(stream)
    except asyncio.CancelledError:
        stream.abort()
        raise
    except Exception as error:  # the boundary between peers: no stream may stop the peer
        line = error_line(error)
        gone = isinstance(error, (StreamClosed, StreamBroken))
        logger.log(
            logging.DEBUG if gone else logging.WARNING, "%s from %s: %s", stream.protocol, stream.remote, line
        )
        logger.debug("where it happened", exc_info=error)
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(ERROR_SECONDS):
                await stream.send("error", {"message": line})
    try:
        await stream.aclose()
    except asyncio.CancelledError:
        stream.abort()
        raise
