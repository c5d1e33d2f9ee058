"""The interface of the network: streams of frames between peers.

Two transports implement it: `fusion.swarm.streams.p2p` (libp2p, real processes) and `fusion.swarm.memory.network` (one process,
for unit tests). Sending waits while the other side does not read (backpressure: bounded memory on both sides). A stream ends
in one of three ways: we closed it, the remote end closed it (`StreamClosed`), it broke (`StreamBroken`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, Protocol, runtime_checkable

from fusion.swarm.errors import NotAdmitted, RemoteError

# The largest payload and header accepted from a stranger before its stream's handler allows more (`Stream.allow`).
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
    """The payload without references to other bytes of its frame; copied if it is a part of a larger buffer."""
    whole = isinstance(payload.obj, bytes | bytearray) and len(payload.obj) == len(payload)
    return payload if whole else memoryview(bytearray(payload))


class Stream(Protocol):
    remote: PeerId
    protocol: str

    @property
    def has_received(self) -> bool:
        """Whether a frame was received, or one that was allowed after it was announced is being received."""

    @property
    def arrived_bytes(self) -> int:
        """The bytes received so far, including those of incomplete frames."""

    async def send(
        self, kind: str, header: Mapping[str, Any] | None = None, payload: Sequence[Buffer] = ()
    ) -> None:
        """Send one frame; the payload is the concatenated buffers. Safe to call from several tasks at once: frames never
        interleave. Raises StreamBroken or StreamClosed."""

    async def receive(self) -> Frame:
        """The next frame. Raises StreamClosed at a clean end, StreamBroken if the remote end vanished, FrameError for a frame over a cap
        (the stream is closed then)."""

    async def announced(self) -> int:
        """The bytes of the next frame's payload, known from its head; a frame over the allowed size is not read until `allow`. More than
        UNASKED_BYTES, too, where its header is over the allowed size. Raises as `receive`."""

    def allow(self, payload_bytes: int) -> None:
        """Accept frames with payloads up to this size from now on, including one that waits already; for a larger one `receive`
        raises FrameError. Initially an incoming stream accepts UNASKED_BYTES, and headers of UNASKED_HEADER_BYTES until `allow` or our
        first frame; an outgoing one accepts the answer size configured for its protocol, or the limits."""

    async def aclose(self) -> None:
        """Close our side after all sent frames are delivered to the network. Idempotent."""

    def abort(self) -> None:
        """End the stream at once. Idempotent, never raises."""


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
        """Dial a full multiaddr; `open` can reach that peer afterwards. Raises PeerUnreachable, ValueError for an
        address that is not a multiaddr ending in /p2p/<peer id>."""

    async def open(self, peer: PeerId, protocol: str, *, stripes: int = 1) -> Stream:
        """A new stream to a peer we are connected to or that the DHT can locate; opening to ourselves works and
        stays in the process. `stripes`: the number of network streams to use, for payloads both ways at once (see
        `fusion.swarm.streams.striping`). Raises PeerUnreachable, or UnknownProtocol where the peer
        answers but does not speak `protocol`."""

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Run `handler` for each incoming stream of `protocol`, each in a task of its own. When it returns the
        stream is closed; an exception of SwarmError or ValueError is sent to the other end as a frame of kind
        `error` with header {"message": one line} and logged in one line; the peer goes on."""

    def traffic(self) -> Mapping[PeerId, Traffic]:
        """Bytes exchanged with each peer since the start."""

    async def aclose(self) -> None: ...


@runtime_checkable
class Guided(Transport, Protocol):
    """The transport of a command that is no peer itself, and uses one as its gateway."""

    async def gateway(self) -> PeerId:
        """The peer to send requests to that any peer can answer. Raises PeerUnreachable."""


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
    """The frame. Raises RemoteError, with the remote one-line text, for an `error` frame (NotAdmitted where it names a closed job)."""
    if frame.kind == "error":
        message = str(frame.header.get("message", "no reason given"))[:500]
        closed, ask = frame.header.get("closed"), frame.header.get("ask")
        if isinstance(closed, str):
            peers = ask[:MAX_ASK] if isinstance(ask, list) else []
            raise NotAdmitted(message, closed, tuple(peer for peer in peers if isinstance(peer, str)))
        raise RemoteError(message)
    return frame
