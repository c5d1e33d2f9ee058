"""The transport between real peers: libp2p streams through hivemind's P2P and its p2pd daemon.

We start p2pd ourselves (`fusion.swarm.streams.p2pd`) and attach hivemind's `P2P` to it for the DHT. Frames use raw streams, which we
open at the daemon's control socket: a raw stream ends when the other process ends, where hivemind's calls may hang, and its
frames can be read straight into their own memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import hivemind.hivemind_cli
from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.errors import (
    DaemonDied,
    PeerUnreachable,
    StreamBroken,
    StreamClosed,
    TransportError,
    UnknownProtocol,
)
from fusion.swarm.streams.dial_workaround import forwarded_address
from fusion.swarm.streams.dialer import Dialer, accepts, tcp_target
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.handlers import SUFFIX, Handlers
from fusion.swarm.streams.memory_stream import stream_pair
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.streams.p2pd import Daemon
from fusion.swarm.streams.p2pd_control import (
    CONTROL_SECONDS,
    GONE,
    SILENT_SECONDS,
    AttachedP2P,
    answers_ping,
    attach,
    check_answer,
    disconnect,
    framed,
    hang_up_on_idle,
    no_answer,
    public_network,
    register_handler,
    request,
)
from fusion.swarm.streams.peer_ids import from_bytes, to_bytes
from fusion.swarm.streams.reachable import is_loopback, local_network, reachable
from fusion.swarm.streams.striping import Gathering, join
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import UNASKED_BYTES, Handler, PeerId, Stream, Traffic

logger = logging.getLogger(__name__)

_ADDRESS_SECONDS = 10.0  # between two reads: libp2p discovers its outside addresses over time
_KNOCK_SECONDS = 3.0
_PING_SECONDS = 3.0  # over a connection whose buffers may be full
_CONNECTIONS_LOW, _CONNECTIONS_HIGH, _GRACE_SECONDS = 2560, 3072, 15  # of p2pd's own connection manager
_CONNECTED_SECONDS = 2.0  # the age of p2pd's list that suffices for the DHT's many small calls


class P2PTransport:
    """Implements `fusion.swarm.transport.Transport`. Made by `async with P2PTransport.start(config) as transport`."""

    def __init__(self, config: P2PConfig, daemon: Daemon, p2p: AttachedP2P) -> None:
        self.peer_id: PeerId = config.identity.peer_id
        self.p2p = p2p  # for the DHT, which runs in this loop
        self._config = config
        self._daemon = daemon
        self._dialer = Dialer(
            self._list_connected, self._dial, is_alive=self._is_alive, hang_up=self._disconnect
        )
        p2p.before_call, p2p.call_failed = self._before_call, self._dialer.invalidate
        p2p.unanswered = lambda peer: self._dialer.unanswered(PeerId(peer.to_base58()))
        daemon.ended.add_done_callback(lambda _: p2p.mark_dead())
        self._handlers = Handlers(per_peer=config.streams_per_peer, idle_seconds=config.idle_seconds)
        self.counter = TrafficCounter()
        self._listen_path = daemon.directory / "s.sock"
        self._server: asyncio.AbstractServer | None = None
        self._addresses: tuple[str, ...] = ()
        self._all_addresses: tuple[str, ...] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: set[FrameStream] = set()

    @classmethod
    @asynccontextmanager
    async def start(cls, config: P2PConfig) -> AsyncIterator[P2PTransport]:
        """A running transport for the length of the block.

        Raises TransportError in one line: a taken port, an unwritable runtime directory, an identity in use.
        """
        transport = await cls.launch(config)
        try:
            yield transport
        finally:
            await transport.aclose()

    @classmethod
    async def launch(cls, config: P2PConfig) -> P2PTransport:
        """As `start`, for callers that end it with `aclose` themselves."""
        daemon = await Daemon.start(
            Path(hivemind.hivemind_cli.__file__).parent / "p2pd",
            _p2pd_arguments(config),
            identity=config.identity,
            listen=config.listen,
            runtime_dir=config.runtime_dir,
            start_seconds=config.start_seconds,
        )
        transport: P2PTransport | None = None
        try:
            transport = cls(config, daemon, await attach(daemon, config.authorizer))
            await transport._start()
        except BaseException as error:
            if transport is not None:
                await transport.aclose()
            else:
                await daemon.aclose()
            if isinstance(error, (OSError, P2PDaemonError, asyncio.IncompleteReadError)):
                raise no_answer(error) from error
            raise
        return transport

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._incoming, path=str(self._listen_path))
        await self._refresh_addresses()
        self._tasks = [
            asyncio.create_task(self._keep_addresses(), name="addresses"),
            asyncio.create_task(
                hang_up_on_idle(self._daemon, self._busy, self._dialer.invalidate), name="idle connections"
            ),
        ]

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._addresses

    @property
    def all_addresses(self) -> tuple[str, ...]:
        """Also the loopback addresses, and these first: they work whatever happens to the machine's networks."""
        return self._all_addresses

    async def failed(self) -> DaemonDied:
        """Wait until p2pd dies by itself; returns an error with the reason. The transport is unusable then."""
        return DaemonDied(await asyncio.shield(self._daemon.ended))

    @property
    def runtime_dir(self) -> Path:
        """A private directory with a path short enough for UNIX sockets, removed when we end."""
        return self._daemon.directory

    @property
    def alive(self) -> bool:
        """Whether p2pd runs; see `failed`."""
        return not self._daemon.ended.done()

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember the multiaddrs of a peer, so that it can be reached at once when it comes back."""
        if peer != self.peer_id:
            self._dialer.learn(peer, addresses)

    async def connect(self, address: str) -> PeerId:
        _, peer = split_address(address)
        if peer == self.peer_id:
            return peer
        self._dialer.hint(peer, address)  # even if it is dead now: p2pd must not dial it in vain
        try:
            async with asyncio.timeout(self._config.dial_seconds):
                if peer not in await self._dialer.connected():
                    await accepts(address, min(_KNOCK_SECONDS, self._config.dial_seconds))
                    await self._dial(peer, [address])
                    self._dialer.invalidate()
        except TimeoutError:
            raise PeerUnreachable(
                f"{address} did not answer within {self._config.dial_seconds:g} s"
            ) from None
        return peer

    async def open(self, peer: PeerId, protocol: str, *, stripes: int = 1) -> Stream:
        if peer == self.peer_id:
            return self._open_here(protocol)
        if stripes == 1:
            return await self._open(peer, protocol)
        opening = [asyncio.create_task(self._open(peer, protocol + SUFFIX)) for _ in range(stripes)]
        try:
            return await join(await asyncio.gather(*opening))
        except BaseException as error:
            for task in opening:
                task.cancel()
            for opened in await asyncio.gather(*opening, return_exceptions=True):
                if isinstance(opened, FrameStream):
                    opened.abort()
            if isinstance(error, (StreamBroken, StreamClosed)):
                raise PeerUnreachable(f"cannot reach {peer}: {error}") from error
            raise

    async def _open(self, peer: PeerId, protocol: str) -> FrameStream:
        opening, loop = self._open_request(peer, protocol), asyncio.get_running_loop()
        answer: asyncio.Future[bytes | None] = loop.create_future()

        def opened(_: FrameStream, data: bytes | None) -> None:
            if not answer.done():
                answer.set_result(data)

        stream: FrameStream | None = None

        def report_late() -> None:
            if stream is None or not (stream.has_received or stream.lost.done()):
                self._dialer.unanswered(peer)

        # p2pd may report a stream as open before the other end has answered.
        timer = loop.call_later(SILENT_SECONDS, report_late)
        try:
            async with asyncio.timeout(self._config.dial_seconds):
                await self._dialer.reach(peer)
                _, stream = await loop.create_unix_connection(
                    lambda: FrameStream(
                        self._config.limits,
                        self.counter,
                        opened,
                        peer,
                        protocol,
                        self._config.answer_bytes.get(protocol.removesuffix(SUFFIX)),
                        self._config.authorizer,
                    ),
                    path=str(self._daemon.control_path),
                )
                await stream.write_message(framed(opening))
                data = await answer
            check_answer(data, f"cannot open {protocol} to {peer}")
        except BaseException as error:
            timer.cancel()
            if stream is not None:
                stream.abort()
            if (reason := self._why_unreachable(peer, error)) is not None:
                raise PeerUnreachable(reason) from error
            raise
        self._track(stream)
        return stream

    def _open_request(self, peer: PeerId, protocol: str) -> p2pd_pb2.Request:
        try:
            stream_open = p2pd_pb2.StreamOpenRequest(peer=to_bytes(peer), proto=[protocol])
        except ValueError as error:
            raise PeerUnreachable(str(error)) from error
        stream_open.timeout = _whole_seconds(self._config.dial_seconds)
        return p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=stream_open)

    def _why_unreachable(self, peer: PeerId, error: BaseException) -> str | None:
        """The text for an error while opening a stream; None where the error needs no other."""
        match error:
            case TimeoutError():
                return f"{peer} did not answer within {self._config.dial_seconds:g} s"
            case OSError():
                return f"cannot reach {peer}: {GONE}"
            case PeerUnreachable() | UnknownProtocol():
                return None
            case TransportError():
                return f"cannot reach {peer}: {error}"
        return None

    async def serve(self, protocol: str, handler: Handler) -> None:
        gathering = Gathering(handler)
        self._handlers.add(protocol, handler)
        self._handlers.add(protocol + SUFFIX, gathering.handle_lane)
        await register_handler(self._daemon, [protocol, protocol + SUFFIX], self._listen_path)

    def traffic(self) -> Mapping[PeerId, Traffic]:
        return self.counter.snapshot()

    async def aclose(self) -> None:
        await cancel_all(self._tasks)
        self._tasks = []
        await self._dialer.aclose()
        await self._handlers.aclose()
        if self._server is not None:
            self._server.close()
        for stream in list(self._streams):
            stream.abort()
        with suppress(P2PDaemonError, OSError):
            await self.p2p.shutdown()  # closes hivemind's own connection; p2pd is not its child
        await self._daemon.aclose()

    # Streams.

    def _incoming(self) -> FrameStream:
        config = self._config
        return FrameStream(
            config.limits, self.counter, self._accept, allowed=UNASKED_BYTES, authorizer=config.authorizer
        )

    def _accept(self, stream: FrameStream, data: bytes | None) -> None:
        """`data`: p2pd's first message on a new incoming stream, with its opener and protocol."""
        info = p2pd_pb2.StreamInfo()
        try:
            if data is None:
                return
            info.ParseFromString(data)
        except DecodeError:
            stream.abort()
            return
        stream.remote = from_bytes(info.peer)
        stream.protocol = info.proto
        stream.subnet = public_network(info.addr)
        self._track(stream)
        self._handlers.accept(stream)

    def _track(self, stream: FrameStream) -> None:
        self._streams.add(stream)
        stream.lost.add_done_callback(lambda _: self._untrack(stream))

    def _busy(self) -> set[bytes]:
        return {to_bytes(stream.remote) for stream in self._streams}

    def _untrack(self, stream: FrameStream) -> None:
        self._streams.discard(stream)
        self._daemon.connections.use(to_bytes(stream.remote))
        self._dialer.invalidate(stream.remote if stream.broke else None)

    def _open_here(self, protocol: str) -> Stream:
        if protocol not in self._handlers:
            raise UnknownProtocol(f"{self.peer_id} (this peer) does not speak {protocol}")
        both = (self.counter, TrafficCounter())  # bytes within the process count once
        near, far = stream_pair(self.peer_id, self.peer_id, protocol, self._config.limits, both)
        self._handlers.accept(far)
        return near

    # p2pd.

    async def _list_connected(self) -> frozenset[PeerId]:
        try:
            response = await request(self._daemon, p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        except TransportError as error:
            raise PeerUnreachable(GONE) from error
        return frozenset(from_bytes(info.id) for info in response.peers)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        try:
            await self._connect_to(peer, addresses)
        except PeerUnreachable as error:
            target = next(filter(None, map(tcp_target, addresses)), None)
            if "dial backoff" not in str(error) or target is None:
                raise
            try:
                await self._end_backoff(peer, *target)
            except OSError as failure:  # such as no free file: callers that retry for ever must go on
                raise PeerUnreachable(f"cannot reach {peer}: {failure.strerror or failure}") from failure
            await self._connect_to(peer, addresses)

    async def _end_backoff(self, peer: PeerId, host: str, port: int) -> None:
        """End libp2p's dial backoff for the peer by a connection that is closed at once."""
        async with forwarded_address(host, port) as address:
            await self._connect_to(peer, [f"{address}/p2p/{peer}"])
            await self._disconnect(peer)

    async def _disconnect(self, peer: PeerId) -> None:
        await disconnect(self._daemon, peer)

    async def _is_alive(self, peer: PeerId) -> bool:
        """Whether the connection to the peer answers a ping or carries frames: full buffers may delay a ping."""
        before = {stream: stream.progress for stream in self._streams if stream.remote == peer}
        if await answers_ping(self._daemon, to_bytes(peer), _PING_SECONDS):
            return True
        return any(stream.progress != was for stream, was in before.items() if not stream.lost.done())

    async def _connect_to(self, peer: PeerId, addresses: Sequence[str]) -> None:
        connect = p2pd_pb2.ConnectRequest(peer=to_bytes(peer))
        self._daemon.connections.use(connect.peer)
        for address in addresses:
            with suppress(ValueError):  # anybody's record may have invalid addresses
                connect.addrs.append(split_address(address)[0].to_bytes())
        if not connect.addrs:
            raise PeerUnreachable(f"cannot reach {peer}: none of its addresses is one")
        connect.timeout = _whole_seconds(self._config.dial_seconds)
        await request(self._daemon, p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect))

    async def _before_call(self, peer: PeerID) -> None:
        try:
            await self._dialer.reach(PeerId(peer.to_base58()), max_age_seconds=_CONNECTED_SECONDS)
        except TransportError as error:
            raise P2PDaemonError(str(error)) from error

    async def _refresh_addresses(self) -> None:
        with contextlib.suppress(ValueError):  # raised by hivemind where there are none
            async with asyncio.timeout(CONTROL_SECONDS):
                visible = await self.p2p.get_visible_maddrs(latest=True)
            found = sorted(map(str, visible), key=lambda address: not is_loopback(address))
            self._all_addresses = tuple(found)
            self._addresses = reachable(self._all_addresses, local_network())

    async def _keep_addresses(self) -> None:
        while True:
            await asyncio.sleep(_ADDRESS_SECONDS)
            with contextlib.suppress(P2PDaemonError, OSError, asyncio.IncompleteReadError):
                await self._refresh_addresses()


def split_address(address: str) -> tuple[Multiaddr, PeerId]:
    """The part to dial and the peer id of a full multiaddr. Raises ValueError in one line."""
    where, _, peer = address.rpartition("/p2p/")
    try:
        to_bytes(PeerId(peer))
        if not where:
            raise ValueError("no address to dial")
        return Multiaddr(where), PeerId(peer)
    except Exception as error:  # the parser of multiaddrs raises whatever its codecs do
        raise ValueError(f"{address!r} is not a multiaddr that ends in /p2p/<peer id>") from error


def _p2pd_arguments(config: P2PConfig) -> list[str]:
    loopback = all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in config.listen)
    outside = int(not loopback)  # NAT mapping and detection are useless on loopback
    arguments = ["-dhtServer=1", "-tls=1", "-connManager=1", "-relay=1"]
    # It knows nothing of our streams, so its limits lie above those of `fusion.swarm.idle_connections`, which trims earlier.
    arguments += [
        f"-connLo={_CONNECTIONS_LOW}",
        f"-connHi={_CONNECTIONS_HIGH}",
        f"-connGrace={_GRACE_SECONDS}s",
    ]
    arguments += [f"-autonat={outside}", f"-natPortMap={outside}"]
    if config.announce:
        arguments.append(f"-announceAddrs={','.join(config.announce)}")
    return arguments


def _whole_seconds(seconds: float) -> int:
    return max(1, round(seconds))
