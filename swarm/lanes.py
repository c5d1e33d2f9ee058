"""One stream over several of libp2p's, for links over which payloads go both ways at once.

libp2p's multiplexer lets no more than 256 KiB of a stream be under way, and the word that they were read comes back behind
all that is sent the other way. Over one stream a link of 8 Mbps and 40 ms thus carries 54 to 76 % of its rate while both
ends send, one of 300 Mbps and 10 ms 65 %; over four, 91 and 98 %. Frame i of a direction goes over lane i mod n and
is taken from there, so that frames keep their order without numbers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fusion.swarm.frame_stream import FrameStream
from fusion.swarm.handlers import run
from fusion.swarm.transport import Buffer, Frame, Handler, PeerId, Stream

SUFFIX = "/lanes"  # of a protocol, where its streams come as lanes
MOST_LANES = 8
GATHER_SECONDS = 10.0  # from a stream's first lane to its last


class Lanes:
    """Implements `fusion.swarm.transport.Stream`. It breaks as soon as one of its lanes does."""

    def __init__(self, lanes: Sequence[FrameStream]) -> None:
        self.remote = lanes[0].remote
        self.protocol = lanes[0].protocol.removesuffix(SUFFIX)
        self._lanes = tuple(lanes)
        self._sent = 0
        self._taken = 0
        self._turn = asyncio.Lock()
        for lane in lanes:
            lane.lost.add_done_callback(partial(self._lost, lane))

    async def send(
        self, kind: str, header: Mapping[str, Any] | None = None, payload: Sequence[Buffer] = ()
    ) -> None:
        """As in the Protocol. A send that is cancelled while it waits for its turn has sent nothing."""
        message = self._lanes[0].encode(kind, header, payload)
        async with self._turn:
            lane = self._lanes[self._sent % len(self._lanes)]
            await lane.turn.acquire()  # the frame before it on this lane has left
            self._sent += 1
        try:
            await lane.send_in_turn(message)
        finally:
            lane.turn.release()

    async def receive(self) -> Frame:
        frame = await self._lanes[self._taken % len(self._lanes)].receive()
        self._taken += 1
        return frame

    def allow(self, payload_bytes: int) -> None:
        for lane in self._lanes:
            lane.allow(payload_bytes)

    async def aclose(self) -> None:
        await asyncio.gather(*(lane.aclose() for lane in self._lanes))

    def abort(self) -> None:
        for lane in self._lanes:
            lane.abort()

    def _lost(self, lane: FrameStream, _: asyncio.Future[None]) -> None:
        if lane.broke:
            for other in self._lanes:
                other.drop()


async def join(lanes: Sequence[FrameStream]) -> Stream:
    """The opening end of one stream over these, which were opened for it. Raises StreamBroken or StreamClosed."""
    key = secrets.token_hex(8)
    for number, lane in enumerate(lanes):
        await lane.send("lane", {"key": key, "lane": number, "of": len(lanes)})
    return Lanes(lanes)


@dataclass
class _Group:
    lanes: list[FrameStream | None]
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Gathering:
    """The accepting end: its `attend` handles the lanes of a protocol, and `handler` the streams that they make."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._groups: dict[tuple[PeerId, str], _Group] = {}

    async def attend(self, lane: Stream) -> None:
        """Until the whole stream has been handled. Raises ValueError for what is no lane, or stays alone."""
        assert isinstance(lane, FrameStream)
        try:
            async with asyncio.timeout(GATHER_SECONDS):
                frame = await lane.receive()
                group = self._enter(lane, frame)
                await group.complete.wait()
        except TimeoutError:
            raise ValueError(f"its other lanes did not come within {GATHER_SECONDS:g} s") from None
        finally:
            self._groups = {key: each for key, each in self._groups.items() if lane not in each.lanes}
        if group.lanes[0] is not lane:
            await group.over.wait()
            return
        try:
            await run(self._handler, Lanes([each for each in group.lanes if each is not None]))
        finally:
            group.over.set()

    def _enter(self, lane: FrameStream, frame: Frame) -> _Group:
        match frame.kind, frame.header:
            case "lane", {"key": str(key), "lane": int(number), "of": int(count)} if (
                0 <= number < count <= MOST_LANES
            ):
                group = self._groups.setdefault((lane.remote, key), _Group([None] * count))
                if len(group.lanes) != count or group.lanes[number] is not None:
                    raise ValueError(f"lane {number} of {count} does not fit the others")
                group.lanes[number] = lane
                if None not in group.lanes:
                    group.complete.set()
                return group
        raise ValueError(f"the first frame is {frame.kind!r}; a lane says which it is of how many")
