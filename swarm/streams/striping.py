"""One stream over several of libp2p's, for links over which payloads go both ways at once.

libp2p's multiplexer has a window of 256 KiB per stream, and its acknowledgements queue behind all that is sent the other way. Over
one stream a link of 8 Mbps and 40 ms thus carries 54 to 76 % of its rate while both ends send, one of 300 Mbps and 10 ms
65 %; over four, 91 and 98 %. Frame i of a direction goes over lane i mod n and is received from there, so that frames keep
their order without sequence numbers. A large frame is split into pieces over all lanes: alone on one lane, it would wait
for the window as often.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy

from fusion.swarm.errors import FrameError
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.frames import Message
from fusion.swarm.streams.handlers import SUFFIX, run
from fusion.swarm.transport import Buffer, Frame, Handler, PeerId, Stream

MOST_LANES = 8
LEAST_PIECE_BYTES = 64 * 1024
MOST_PIECE_BYTES = 256 * 1024
PIECE = "piece"  # the kind of all pieces but the first
SIZE = ""  # the key in the first piece's header: bytes of the whole payload
GATHER_SECONDS = 10.0  # from a stream's first lane to its last


class StripedStream:
    """Implements `fusion.swarm.transport.Stream`. It breaks as soon as one of its lanes does."""

    def __init__(self, stripes: Sequence[FrameStream]) -> None:
        self.remote = stripes[0].remote
        self.protocol = stripes[0].protocol.removesuffix(SUFFIX)
        self._stripes = tuple(stripes)
        self._sent = 0
        self._received = 0
        self._pieces = _Pieces()
        self._turn = asyncio.Lock()
        for lane in stripes:
            lane.lost.add_done_callback(partial(self._lost, lane))

    @property
    def has_received(self) -> bool:
        return any(lane.has_received for lane in self._stripes)

    @property
    def arrived_bytes(self) -> int:
        return sum(lane.arrived_bytes for lane in self._stripes)

    async def send(
        self, kind: str, header: Mapping[str, Any] | None = None, payload: Sequence[Buffer] = ()
    ) -> None:
        """As in the Protocol. A send that is cancelled while it waits for its turn has sent nothing; one that is
        cancelled after part of a large frame has left breaks the stream."""
        first, *others = self._messages(kind, header or {}, payload)
        if not others:
            async with self._turn:
                lane = await self._next()
            try:
                await lane.send_in_turn(first)
            finally:
                lane.turn.release()
            return
        sending: list[asyncio.Task[None]] = []
        try:
            async with self._turn:
                for message in (first, *others):
                    lane = await self._next()
                    task = asyncio.create_task(lane.send_in_turn(message))
                    # Not in the task itself: one that is cancelled before it starts runs nothing.
                    task.add_done_callback(partial(_release_turn, lane))
                    sending.append(task)
            await asyncio.gather(*sending)
        except BaseException:
            if sending:
                self.abort()
                await asyncio.gather(*sending, return_exceptions=True)
            raise

    def _messages(self, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer]) -> list[Message]:
        """The encoded frame, or the pieces of a large one: the first has its kind, header and size."""
        lane = self._stripes[0]
        whole = lane.encode(kind, header, payload)
        _, views, size = whole
        if size <= LEAST_PIECE_BYTES:
            return [whole]
        piece = min(max(-(-size // len(self._stripes)), LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
        pieces = _cut(views, piece)
        first = lane.encode(kind, {**header, SIZE: size}, next(pieces))
        return [first, *(lane.encode(PIECE, None, each) for each in pieces)]

    async def _next(self) -> FrameStream:
        """The next lane, its `turn` acquired once the frame before was sent."""
        lane = self._stripes[self._sent % len(self._stripes)]
        await lane.turn.acquire()
        self._sent += 1
        return lane

    async def receive(self) -> Frame:
        while True:
            frame = await self._stripes[self._received % len(self._stripes)].receive()
            self._received += 1
            try:
                whole = self._pieces.add(frame, self._stripes[0].allowed)
            except FrameError as error:
                self.abort()
                raise FrameError(f"{self.remote} on {self.protocol}: {error}") from error
            if whole is not None:
                return whole

    async def announced(self) -> int:
        """As in the Protocol; of a frame in pieces, the bytes of its next piece."""
        return await self._stripes[self._received % len(self._stripes)].announced()

    def allow(self, payload_bytes: int) -> None:
        for lane in self._stripes:
            lane.allow(payload_bytes)

    async def aclose(self) -> None:
        await asyncio.gather(*(lane.aclose() for lane in self._stripes))

    def abort(self) -> None:
        for lane in self._stripes:
            lane.abort()

    def _lost(self, lane: FrameStream, _: asyncio.Future[None]) -> None:
        if lane.broke:
            for other in self._stripes:
                other.drop()


class _Pieces:
    """Assembles frames from their pieces."""

    def __init__(self) -> None:
        self._first: Frame | None = None  # of a frame that is not whole yet
        self._payload = memoryview(b"")
        self._filled = 0

    def add(self, frame: Frame, allowed: int) -> Frame | None:
        """The frame that is complete with this one, if any. Raises FrameError for a piece that does not fit, or a payload of more than
        `allowed` bytes."""
        if self._first is None:
            if SIZE not in frame.header:
                return frame
            size = frame.header[SIZE]
            if type(size) is not int or size <= len(frame.payload):
                raise FrameError(f"the first piece of a payload of {size!r} bytes")
            if size > allowed:
                raise FrameError(f"a payload of {size} bytes; at most {allowed} are allowed now")
            # Its pages are used only as they are written to: a peer that announces much and sends nothing costs nothing.
            self._first, self._payload, self._filled = frame, numpy.empty(size, numpy.uint8).data, 0
        elif frame.kind != PIECE:
            raise FrameError(f"a {frame.kind!r} frame among the pieces of another")
        end = self._filled + len(frame.payload)
        if not frame.payload or end > len(self._payload):
            raise FrameError(f"a piece of {len(frame.payload)} bytes that does not fit its frame")
        self._payload[self._filled : end] = frame.payload
        self._filled = end
        if end < len(self._payload):
            return None
        header = {key: value for key, value in self._first.header.items() if key != SIZE}
        whole = Frame(self._first.kind, header, self._payload)
        self._first, self._payload = None, memoryview(b"")
        return whole


def _release_turn(lane: FrameStream, piece: asyncio.Task[None]) -> None:
    if piece.cancelled():
        lane.abort()  # the lane lacks a piece: nothing may follow
    lane.turn.release()


def _cut(views: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """The concatenated views, cut into pieces of `size` bytes, the last one shorter. Nothing is copied."""
    piece, left = [], size
    for view in views:
        while len(view) >= left:
            piece.append(view[:left])
            yield piece
            view, piece, left = view[left:], [], size
        if view:
            piece.append(view)
            left -= len(view)
    if piece:
        yield piece


async def join(stripes: Sequence[FrameStream]) -> Stream:
    """The opening end of one stream over these lanes. Raises StreamBroken or StreamClosed."""
    key = secrets.token_hex(8)
    for number, lane in enumerate(stripes):
        await lane.send("lane", {"key": key, "lane": number, "of": len(stripes)})
    return StripedStream(stripes)


@dataclass
class _Group:
    stripes: list[FrameStream | None]
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Gathering:
    """The accepting end: `handle_lane` handles the lanes of a protocol, and `handler` the streams that they form."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._groups: dict[tuple[PeerId, str], _Group] = {}

    async def handle_lane(self, lane: Stream) -> None:
        """Return once the whole stream has been handled. Raises ValueError for a first frame of another kind, or where other lanes are
        missing."""
        assert isinstance(lane, FrameStream)
        group: _Group | None = None
        try:
            try:
                async with asyncio.timeout(GATHER_SECONDS):
                    frame = await lane.receive()
                    group = self._add_to_group(lane, frame)
                    await group.complete.wait()
            except TimeoutError:
                raise ValueError(f"its other lanes did not come within {GATHER_SECONDS:g} s") from None
            finally:
                self._groups = {key: each for key, each in self._groups.items() if lane not in each.stripes}
            if group.stripes[0] is lane:
                stripes = [each for each in group.stripes if each is not None]
                await run(self._handler, StripedStream(stripes))
            else:
                await group.over.wait()
        finally:
            # Also when the last lane arrived just as this one timed out: that lane waits for `over`.
            if group is not None and group.stripes[0] is lane:
                group.over.set()

    def _add_to_group(self, lane: FrameStream, frame: Frame) -> _Group:
        match frame.kind, frame.header:
            case "lane", {"key": str(key), "lane": int(number), "of": int(count)} if (
                0 <= number < count <= MOST_LANES
            ):
                group = self._groups.setdefault((lane.remote, key), _Group([None] * count))
                if len(group.stripes) != count or group.stripes[number] is not None:
                    raise ValueError(f"lane {number} of {count} does not fit the others")
                group.stripes[number] = lane
                if None not in group.stripes:
                    group.complete.set()
                return group
        raise ValueError(f"the first frame is {frame.kind!r}; a lane says which it is of how many")
