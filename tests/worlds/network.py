"""The simulated network: `fusion.swarm.transport.Transport` between lanes of one virtual-time loop.

It gives the guarantees of the real transport: the frames of one stream arrive whole, in order and once, until the stream
ends. It ends with a clean close after all frames, or breaks and loses the last ones. The seed decides everything else: the
delay of a frame, the order of frames of different streams, when an end learns that its stream broke, which frames are lost.
Headers are msgpack, as on the wire.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worlds.virtual_time import Lane, VirtualLoop

from fusion.swarm.errors import FrameError, PeerUnreachable, StreamBroken, StreamClosed, UnknownProtocol
from fusion.swarm.streams import frames
from fusion.swarm.streams.handlers import Handlers
from fusion.swarm.transport import UNASKED_BYTES, Buffer, Frame, Handler, PeerId, Stream, Traffic

DIAL_SECONDS = 5.0  # timeout of a dial that gets no answer
# The longest time from a process's end until the other ends of its streams learn of it (measured).
NOTICE_SECONDS = 0.02
KEEPALIVE_SECONDS = 12.0  # about how long a stream to a silent peer stays up

Watch = Callable[["WorldStream", str, Mapping[str, Any], bytes, bytes], None]


class WorldStream:
    """One end of a stream. `twin` is the other end; each belongs to a lane."""

    __slots__ = (
        "_allowed", "_arrives", "_closed", "_end", "_heard", "_inbox", "_network", "_waiter", "arrived_bytes", "held",
        "lane", "local", "protocol", "remote", "said", "twin",
    )  # fmt: skip

    twin: WorldStream

    def __init__(
        self, network: Network, local: PeerId, remote: PeerId, protocol: str, lane: Lane, allowed: int
    ) -> None:
        self.local, self.remote, self.protocol, self.lane = local, remote, protocol, lane
        self.held: list[tuple[str, bytes, bytes] | str] = []  # sent during a partition; arrives when it heals
        self.said: dict[str, Any] = {}  # what the observers store about the stream
        self._network = network
        self._allowed = allowed
        self._inbox: deque[tuple[str, bytes, bytes]] = deque()
        self._arrives = 0.0  # when the last frame that this end sent arrives
        self._closed = self._heard = False
        self._end = ""
        self._waiter: asyncio.Future[None] | None = None
        self.arrived_bytes = 0

    @property
    def has_received(self) -> bool:
        return self._heard or bool(self._inbox)

    async def send(
        self, kind: str, header: Mapping[str, Any] | None = None, payload: Sequence[Buffer] = ()
    ) -> None:
        if self._closed:
            raise StreamClosed(f"{self.protocol}: we closed this stream")
        if self._end:
            raise self._ended()
        head, views, _ = frames.encode(kind, header, payload)
        network, data = self._network, b"".join(views)
        network.watch(self, kind, header or {}, head, data)
        if self.lane.dead:  # a fault killed the sender at this frame
            await network.loop.create_future()
        self._post((kind, head, data))

    def _post(self, item: tuple[str, bytes, bytes] | str) -> None:
        network, twin = self._network, self.twin
        if twin.lane.dead:
            # A machine that is up resets a stream that it does not know; one that is gone sends nothing.
            if self.remote not in network.gone and network.reachable(self.local, self.remote):
                self.lose(network.notice())
            return
        if self.held or not network.reachable(self.local, self.remote):
            self.held.append(item)
            return
        loop = network.loop
        self._arrives = max(self._arrives, loop.now + network.delay(self.local, self.remote))
        if isinstance(item, str):
            loop.call_at(self._arrives, twin._finish, item, context=twin.lane.context)
        else:
            loop.call_at(self._arrives, twin._arrive, item, context=twin.lane.context)

    def release(self) -> None:
        """Send the frames that a partition held back."""
        held, self.held = self.held, []
        for item in held:
            self._post(item)

    def _arrive(self, item: tuple[str, bytes, bytes]) -> None:
        if not self._end and not self._closed:
            self._inbox.append(item)
            self.arrived_bytes += sum(map(len, item[1:]))
            self._wake()

    def _finish(self, how: str) -> None:
        if not self._end:
            self._end = how
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def announced(self) -> int:
        while not self._inbox:
            if self._closed:
                raise StreamClosed(f"{self.protocol}: we closed this stream")
            if self._end:
                raise self._ended()
            if self._waiter is not None:
                raise RuntimeError("two tasks receive from one stream")
            self._waiter = self._network.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return len(self._inbox[0][2])

    async def receive(self) -> Frame:
        await self.announced()
        kind, head, payload = self._inbox.popleft()
        self._heard = True
        if len(payload) > self._allowed:
            self.abort()
            raise FrameError(f"{self.remote} on {self.protocol}: a payload of {len(payload)} bytes")
        kind, header = frames.decode_header(memoryview(head)[frames.HEAD_BYTES :])
        return Frame(kind, header, memoryview(bytearray(payload)))

    def allow(self, payload_bytes: int) -> None:
        self._allowed = payload_bytes

    async def aclose(self) -> None:
        self._shut("closed")

    def abort(self) -> None:
        self._shut("broken")

    def _shut(self, how: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._inbox.clear()
        self._wake()
        self._network.forget(self)
        if not self._end:
            if how == "broken":
                self._arrives = (
                    0.0  # the break may overtake frames that have not arrived, which are then lost
                )
            self._post(how)

    def lose(self, after_seconds: float) -> None:
        """Break this end of the stream after `after_seconds`; frames that arrive before still count."""
        loop = self._network.loop
        loop.call_at(loop.now + after_seconds, self._finish, "broken", context=self.lane.context)

    @property
    def over(self) -> bool:
        return self._closed or bool(self._end)

    def _ended(self) -> StreamClosed | StreamBroken:
        if self._end == "closed":
            return StreamClosed(f"{self.remote} closed the {self.protocol} stream")
        return StreamBroken(f"the {self.protocol} stream to {self.remote} broke")


class Network:
    """The links between all peers.

    `slowest_seconds` is the longest usual one-way delay of a link. `watch` is called with every frame that is sent: its
    stream, kind and header, and its bytes (head with header, and payload).
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, slowest_seconds: float) -> None:
        self.loop = loop
        self.transports: dict[PeerId, WorldTransport] = {}
        self.gone: set[PeerId] = set()  # vanished machines, which send nothing, not even a reset
        self.watch: Watch = lambda stream, kind, header: None
        self._rng = rng
        self._slowest = slowest_seconds
        self._usual: dict[tuple[PeerId, PeerId], float] = {}
        self._sides: dict[PeerId, int] = {}  # the side of each peer in a partition; empty without one
        self._streams: dict[WorldStream, None] = {}

    def delay(self, one: PeerId, two: PeerId) -> float:
        """The delay of one frame: near the link's usual delay, sometimes much longer."""
        usual = self._usual.get((one, two))
        if usual is None:
            usual = self._usual[one, two] = self._usual[two, one] = self._slowest * self._rng.random() ** 2
        draw = self._rng.random()
        return usual * (0.5 + draw) if draw < 0.97 else usual + self._slowest * 10 * self._rng.random()

    def reachable(self, one: PeerId, two: PeerId) -> bool:
        return not self._sides or self._sides.get(one, 0) == self._sides.get(two, 0)

    def answers(self, one: PeerId, two: PeerId) -> bool:
        """Whether a packet from `one` finds a machine at `two`."""
        return self.reachable(one, two) and two not in self.gone

    # --- streams

    async def open(self, opener: WorldTransport, peer: PeerId, protocol: str) -> WorldStream:
        me = opener.peer_id
        if not self.answers(me, peer):
            await asyncio.sleep(DIAL_SECONDS * (0.5 + self._rng.random() / 2))
            raise PeerUnreachable(f"cannot reach {peer}: no answer")
        await asyncio.sleep(self.delay(me, peer) + self.delay(peer, me))
        target = self.transports.get(peer)
        if target is None or not self.answers(me, peer):
            raise PeerUnreachable(f"cannot reach {peer}")
        if protocol not in target.handlers:
            raise UnknownProtocol(f"{peer} does not speak {protocol}")
        near = WorldStream(self, me, peer, protocol, opener.lane, 1 << 30)
        far = WorldStream(self, peer, me, protocol, target.lane, UNASKED_BYTES)
        near.twin, far.twin = far, near
        self._streams[near] = self._streams[far] = None
        self.loop.call_at(
            self.loop.now + self.delay(me, peer), target.handlers.accept, far, context=target.lane.context
        )
        # A frame cannot arrive before the stream is open.
        near._arrives = self.loop.now + self._slowest * 0.01
        return near

    def forget(self, stream: WorldStream) -> None:
        self._streams.pop(stream, None)

    def cut(self, one: PeerId, two: PeerId) -> None:
        """Break every stream between the two peers."""
        for stream in [s for s in self._streams if s.local == one and s.remote == two]:
            self._lose_both(stream)

    def partition(self, group: set[PeerId], other: set[PeerId], patience_seconds: float) -> None:
        """Let no packet pass between the two groups; streams between them break after about `patience_seconds`."""
        self._sides = {**dict.fromkeys(group, 1), **dict.fromkeys(other, 2)}
        for stream in list(self._streams):
            if not self.reachable(stream.local, stream.remote):
                stream.lose(patience_seconds * (0.2 + self._rng.random()))

    def joins_side(self, peer: PeerId) -> None:
        """Put a peer that starts during a partition on a random side of it."""
        if self._sides:
            self._sides[peer] = self._rng.choice((1, 2))

    def heal(self) -> None:
        self._sides = {}
        for stream in list(self._streams):
            stream.release()

    def remove(self, peer: PeerId, *, silently: bool) -> None:
        """Remove a process. Its machine resets the streams at once, or (`silently`) is gone as well."""
        self.transports.pop(peer, None)
        if silently:
            self.gone.add(peer)
        for stream in [s for s in self._streams if s.local == peer]:
            del self._streams[stream]
            notice = KEEPALIVE_SECONDS * (0.5 + self._rng.random()) if silently else self.notice()
            stream.twin.lose(notice)

    def _lose_both(self, stream: WorldStream) -> None:
        stream.lose(self.notice())
        stream.twin.lose(self.notice())

    def notice(self) -> float:
        return NOTICE_SECONDS * (0.2 + 0.8 * self._rng.random())


class WorldTransport:
    """Implements `fusion.swarm.transport.Transport` for one lane. `failed` is called with the errors of handlers."""

    def __init__(
        self, network: Network, peer_id: PeerId, lane: Lane, failed: Callable[[Lane, Exception], None]
    ) -> None:
        self.peer_id = peer_id
        self.lane = lane
        self.handlers = Handlers()
        self._network = network
        self._failed = failed
        network.transports[peer_id] = self
        network.gone.discard(peer_id)

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/{self.peer_id}/p2p/{self.peer_id}",)

    async def connect(self, address: str) -> PeerId:
        peer = PeerId(address.rpartition("/")[2])
        if peer not in self._network.transports or not self._network.answers(self.peer_id, peer):
            raise PeerUnreachable(f"cannot reach {address}")
        return peer

    async def open(self, peer: PeerId, protocol: str, *, stripes: int = 1) -> WorldStream:
        return await self._network.open(self, peer, protocol)

    async def serve(self, protocol: str, handler: Handler) -> None:
        async def watched(stream: Stream) -> None:
            try:
                await handler(stream)
            except Exception as error:
                self._failed(self.lane, error)
                raise

        self.handlers.add(protocol, watched)

    def traffic(self) -> Mapping[PeerId, Traffic]:
        return {}

    async def aclose(self) -> None:
        self._network.transports.pop(self.peer_id, None)
        await self.handlers.aclose()
