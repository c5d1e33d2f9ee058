"""What the rest of the project knows of the wire: streams of frames between peers.

Two transports implement it: `fusion.swarm.streams.p2p` (libp2p, real processes) and `fusion.swarm.memory.network` (one process,
for unit tests). Sending waits when the other side has not read for a while (bounded memory on both sides). A
stream ends in one of three named ways: we closed it, they closed it (`StreamClosed`), it broke (`StreamBroken`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, Protocol, runtime_checkable

from fusion.swarm.errors import NotAdmitted, RemoteError

UNASKED_BYTES = 64 * 1024
UNASKED_HEADER_BYTES = 32 * 1024
MAX_ASK = 8  # other peers that an error names

PeerId = NewType("PeerId", str)  # base58 text of the libp2p peer id
Buffer = bytes | bytearray | memoryview
Header = dict[str, Any]  # msgpack-able: str keys; None, bool, int, float, str, bytes, list, dict values


@dataclass(frozen=True)
class Frame:
    """One message. `kind` picks the handler; `payload` is raw bytes (tensor data), never msgpack."""

    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    payload: memoryview = field(default_factory=lambda: memoryview(b""))


def by_itself(payload: memoryview) -> memoryview:
    """The payload, which keeps nothing else that came in one frame with it."""
    whole = isinstance(payload.obj, bytes | bytearray) and len(payload.obj) == len(payload)
    return payload if whole else memoryview(bytearray(payload))


class Stream(Protocol):
    remote: PeerId
    protocol: str

    @property
    def has_received(self) -> bool:
        """Whether a frame of the other end has come in, or one is on its way that was allowed once it was announced."""

    @property
    def arrived_bytes(self) -> int:
        """What has come in so far, of frames that are not whole yet as well."""

    async def send(
        self, kind: str, header: Mapping[str, Any] | None = None, payload: Sequence[Buffer] = ()
    ) -> None:
        """Send one frame; the payload is the buffers one after another. Safe to call from several tasks at once:
        frames never interleave. Raises StreamBroken or StreamClosed."""

    async def receive(self) -> Frame:
        """The next frame. Raises StreamClosed at a clean end, StreamBroken if the other end vanished, FrameError
        for bytes that break a cap (the stream is then closed)."""

    async def announced(self) -> int:
        """Bytes of the payload of the next frame, once its head is here: one over what is allowed is not read before more is.
        More than UNASKED_BYTES as well where its header is. Raises as `receive`."""

    def allow(self, payload_bytes: int) -> None:
        """Take frames with payloads up to this size from now on, also one that waits to be received already; for a
        larger one `receive` raises FrameError. A stream that a stranger opened takes UNASKED_BYTES until its handler
        knows who that is, and headers of UNASKED_HEADER_BYTES until that allows anything or has sent something; one that we opened takes what answers may have where the transport was told, else what its limits allow."""

    async def aclose(self) -> None:
        """Finish our side after what was sent has gone out. Idempotent."""

    def abort(self) -> None:
        """Drop the stream at once. Idempotent, never raises."""


Handler = Callable[[Stream], Awaitable[None]]


@dataclass(frozen=True)
class Traffic:
    """Bytes of frames (headers and payloads) since the start."""

    sent_bytes: int = 0
    received_bytes: int = 0


class Transport(Protocol):
    peer_id: PeerId

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs (ending in /p2p/<peer id>) at which others can dial us now, the most useful first."""

    async def connect(self, address: str) -> PeerId:
        """Dial a full multiaddr; afterwards `open` reaches that peer. Raises PeerUnreachable, ValueError for an
        address that is not a multiaddr ending in /p2p/<peer id>."""

    async def open(self, peer: PeerId, protocol: str, *, stripes: int = 1) -> Stream:
        """A new stream to a peer we are connected to or that the DHT can locate; opening to ourselves works and
        stays in the process. `stripes`: over how many of the network's streams, for payloads both ways at once (see
        `fusion.swarm.streams.striping`). Raises PeerUnreachable, or UnknownProtocol where the peer is
        there and does not speak `protocol`."""

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Run `handler` for each incoming stream of `protocol`, each in a task of its own. When it returns the
        stream is closed; an exception of SwarmError or ValueError is sent to the other end as a frame of kind
        `error` with header {"message": one line} and logged in one line; the peer goes on."""

    def traffic(self) -> Mapping[PeerId, Traffic]:
        """Bytes exchanged with each peer since the start."""

    async def aclose(self) -> None: ...


@runtime_checkable
class Guided(Transport, Protocol):
    """The transport of a command that is no peer itself: one of them tells it of the swarm."""

    async def gateway(self) -> PeerId:
        """The peer to ask for what any peer can tell or do. Raises PeerUnreachable."""


async def call(
    transport: Transport,
    peer: PeerId,
    protocol: str,
    kind: str,
    header: Mapping[str, Any] | None = None,
    payload: Sequence[Buffer] = (),
) -> Frame:
    """One request, one reply, on a stream of its own. A reply of kind `error` raises RemoteError."""
    stream = await transport.open(peer, protocol)
    try:
        await stream.send(kind, header, payload)
        return checked(await stream.receive())
    finally:
        stream.abort()


def checked(frame: Frame) -> Frame:
    """The frame, unless it is an `error` frame: then RemoteError with the other side's one-line text."""
    if frame.kind == "error":
        message = str(frame.header.get("message", "no reason given"))[:500]
        closed, ask = frame.header.get("closed"), frame.header.get("ask")
        if isinstance(closed, str):
            peers = ask[:MAX_ASK] if isinstance(ask, list) else []
            raise NotAdmitted(message, closed, tuple(peer for peer in peers if isinstance(peer, str)))
        raise RemoteError(message)
    return frame
