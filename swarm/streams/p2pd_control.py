"""Requests to the p2pd that we started, each over a connection of its own, and hivemind's `P2P` over it, for our calls of the DHT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Container, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE, ControlClient, DaemonConnector
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from fusion.swarm.errors import PeerUnreachable, TransportError, UnknownProtocol
from fusion.swarm.printable import error_line
from fusion.swarm.streams.frame_parser import delimited
from fusion.swarm.streams.p2pd import Daemon
from fusion.swarm.streams.peer_ids import to_bytes
from fusion.swarm.subnets import subnet_of
from fusion.swarm.swarm_key import Authorizer
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

CONTROL_SECONDS = 30.0  # for p2pd to answer
GONE = "p2pd is gone"
NOT_SPOKEN = "protocols not supported"
SILENT_SECONDS = 1.5  # without a first answer, after which the connection is checked
_LIST_SECONDS = 2.0  # between two lists of the connections
_NEXT_LIST_SECONDS = 0.5  # after one that found too many
_AT_ONCE = 128  # disconnected, before the event loop runs others
_PING = "/ipfs/ping/1.0.0"  # answered by every libp2p host, even if our process beside it is frozen
_PING_BYTES = 32
_TCP = 6  # in a multiaddr; two bytes of a port follow
_PLAIN_TCP_BYTES = (8, 20)  # of a multiaddr of an IPv4 or IPv6 address and a TCP port


class AttachedP2P(P2P):  # type: ignore[misc]
    """hivemind's P2P, with hooks of our transport around each call, and failing at once when p2pd is dead, where it would wait
    for answers until each caller's timeout."""

    daemon: Daemon
    authorizer: Authorizer | None  # of a closed swarm
    # The transport's hooks: before each call, after p2pd could not deliver one, and for one unanswered for SILENT_SECONDS.
    before_call: Callable[[PeerID], Awaitable[None]]
    call_failed: Callable[[], None]
    unanswered: Callable[[PeerID], None]
    dead = False

    async def call_protobuf_handler(self, peer_id: PeerID, *arguments: Any, **options: Any) -> Any:
        if self.dead:
            raise P2PDaemonError(GONE)
        await self.before_call(peer_id)
        self.daemon.connections.use(bytes(peer_id.to_bytes()))
        # A timer rather than a timeout: callers also cancel calls for other reasons.
        late = asyncio.get_running_loop().call_later(SILENT_SECONDS, self.unanswered, peer_id)
        try:
            return await super().call_protobuf_handler(peer_id, *arguments, **options)
        except P2PDaemonError:
            self.call_failed()
            raise
        finally:
            late.cancel()

    def mark_dead(self) -> None:
        self.dead = True
        control = self._client.control
        for task in (control._read_task, control._write_task):
            if task is not None:  # marks their error retrieved
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        for call in control._pending_calls.values():
            if not call.done():
                call.set_exception(P2PDaemonError(GONE))


class _Control(ControlClient):  # type: ignore[misc]
    """hivemind's connection to p2pd, for our calls of the DHT. Writes all pending messages at once, where hivemind writes the
    length of each byte by byte, then the message."""

    async def _write_to_persistent_conn(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while True:
                messages = [await self._pending_messages.get()]
                while not self._pending_messages.empty():
                    messages.append(self._pending_messages.get_nowait())
                writer.write(b"".join(map(framed, messages)))
                await writer.drain()


class _Waiting(dict[Any, "asyncio.Future[Any]"]):
    """hivemind's pending calls, without cancelled ones: an answer to a call that was cancelled a moment ago would end the task that
    reads all answers, and with it every later call."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


async def attach(daemon: Daemon, authorizer: Authorizer | None = None) -> AttachedP2P:
    """As hivemind's `P2P.replicate`, with a control connection of our own."""
    p2p = AttachedP2P()
    p2p.daemon, p2p.authorizer = daemon, authorizer
    p2p._child, p2p._alive = None, True
    p2p._daemon_listen_maddr = Multiaddr(f"/unix{daemon.control_path}")
    p2p._client_listen_maddr = Multiaddr(f"/unix{daemon.directory / 'h.sock'}")
    p2p._client = Client(_initialized_with_create=True)
    async with asyncio.timeout(CONTROL_SECONDS):
        p2p._client.control = await _Control.create(
            DaemonConnector(p2p._daemon_listen_maddr),
            p2p._client_listen_maddr,
            persistent_conn_max_msg_size=DEFAULT_MAX_MSG_SIZE,
        )
        p2p._client.control._pending_calls = _Waiting(p2p._client.control._pending_calls)
        await p2p._ping_daemon()
    return p2p


def framed(message: Message) -> bytes:
    """A message in p2pd's framing."""
    return delimited(message.SerializeToString())


async def request(daemon: Daemon, message: p2pd_pb2.Request) -> p2pd_pb2.Response:
    """Send one request over a connection of its own. Raises TransportError, PeerUnreachable for an error of p2pd."""
    response = p2pd_pb2.Response()
    writer = None
    try:
        async with asyncio.timeout(CONTROL_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(daemon.control_path))
            writer.write(framed(message))
            await read_pbmsg_safe(reader, response)
    except (OSError, asyncio.IncompleteReadError, DecodeError) as error:
        raise no_answer(error) from error
    finally:
        if writer is not None:
            writer.close()
    if response.type == p2pd_pb2.Response.ERROR:
        raise PeerUnreachable(reason(response.error.msg))
    return response


async def register_handler(daemon: Daemon, protocols: Sequence[str], socket: Path) -> None:
    """Make p2pd connect each incoming stream of these protocols to `socket`. Raises TransportError."""
    handler = p2pd_pb2.StreamHandlerRequest(addr=_unix(socket), proto=protocols, balanced=False)
    await request(daemon, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler))


async def remove_handler(daemon: Daemon, protocols: Sequence[str], socket: Path) -> None:
    """Undo `register_handler`. Raises TransportError."""
    handler = p2pd_pb2.RemoveStreamHandlerRequest(addr=_unix(socket), proto=protocols)
    kind = p2pd_pb2.Request.REMOVE_STREAM_HANDLER
    await request(daemon, p2pd_pb2.Request(type=kind, removeStreamHandler=handler))


async def disconnect(daemon: Daemon, peer: PeerId) -> None:
    """Close the connections to a peer, and every stream over them. Raises TransportError."""
    which = p2pd_pb2.DisconnectRequest(peer=to_bytes(peer))
    await request(daemon, p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=which))


async def hang_up_on_idle(
    daemon: Daemon, busy: Callable[[], Container[bytes]], hung_up: Callable[[], None]
) -> None:
    """Close surplus idle connections (`fusion.swarm.idle_connections`) until cancelled. `busy`: the peers with a stream; `hung_up` is
    called after some were closed. Keeps one connection to p2pd open: a p2pd that has run out of files accepts no other."""
    while True:
        await asyncio.sleep(_LIST_SECONDS)
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(daemon.control_path))
            with contextlib.closing(writer):
                while True:
                    found = await _hang_up_on_surplus(daemon, reader, writer, busy)
                    if found:
                        hung_up()
                    await asyncio.sleep(_NEXT_LIST_SECONDS if found else _LIST_SECONDS)
        except (OSError, asyncio.IncompleteReadError, DecodeError) as error:  # TimeoutError is one
            logger.debug("connections not listed: %r", error)


async def _hang_up_on_surplus(
    daemon: Daemon,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    busy: Callable[[], Container[bytes]],
) -> int:
    """Close the surplus of p2pd's connections once; returns how many."""
    response = p2pd_pb2.Response()
    async with asyncio.timeout(CONTROL_SECONDS):
        writer.write(framed(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)))
        await read_pbmsg_safe(reader, response)
    connected = [(info.id, public_network(info.addrs[0]) if info.addrs else None) for info in response.peers]
    surplus = daemon.connections.surplus(connected, busy())
    if surplus:
        logger.debug("hanging up on %d of %d that are connected", len(surplus), len(connected))
    for at in range(0, len(surplus), _AT_ONCE):
        some = surplus[at : at + _AT_ONCE]
        requests = [p2pd_pb2.DisconnectRequest(peer=peer) for peer in some]
        kind = p2pd_pb2.Request.DISCONNECT
        async with asyncio.timeout(CONTROL_SECONDS):
            writer.write(b"".join(framed(p2pd_pb2.Request(type=kind, disconnect=each)) for each in requests))
            for _ in some:
                await read_pbmsg_safe(reader, p2pd_pb2.Response())
        await asyncio.sleep(0)
    return len(surplus)


async def answers_ping(daemon: Daemon, peer: bytes, seconds: float) -> bool:
    """Whether the peer answers a libp2p ping over our connection within so many seconds; True, too, where p2pd knows that there is no
    connection. Raises TransportError where p2pd itself does not answer."""
    opening = p2pd_pb2.StreamOpenRequest(peer=peer, proto=[_PING], timeout=int(CONTROL_SECONDS))
    response = p2pd_pb2.Response()
    writer = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(str(daemon.control_path))
            writer.write(framed(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)))
            await read_pbmsg_safe(reader, response)
            if response.type != p2pd_pb2.Response.ERROR:
                writer.write(os.urandom(_PING_BYTES))
                await reader.readexactly(_PING_BYTES)
    except TimeoutError:
        return False
    except asyncio.IncompleteReadError:
        return True  # the connection ended meanwhile
    except (OSError, DecodeError) as error:
        raise no_answer(error) from error
    finally:
        if writer is not None:
            writer.transport.abort()
    return True


def _unix(socket: Path) -> bytes:
    address: bytes = Multiaddr(f"/unix{socket}").to_bytes()
    return address


def public_network(address: bytes) -> str | None:
    """The public network (`fusion.swarm.subnets`) of a binary multiaddr of p2pd's; None, too, for a kind that hivemind cannot parse:
    p2pd has more kinds."""
    # Cached without the port
    if len(address) in _PLAIN_TCP_BYTES and address[-3] == _TCP:
        address = address[:-2] + bytes(2)
    return _public_network(address)


@lru_cache(1024)
def _public_network(address: bytes) -> str | None:
    try:
        return subnet_of(str(Multiaddr(address)))
    except Exception:  # the parser of multiaddrs raises whatever its codecs do
        return None


def check_answer(data: bytes | None, what: str) -> None:
    """Raises UnknownProtocol where the other end answered but does not speak the protocol; PeerUnreachable or TransportError for
    other errors of p2pd."""
    response = p2pd_pb2.Response()
    try:
        if data is None:
            raise PeerUnreachable(f"{what}: p2pd hung up")
        response.ParseFromString(data)
    except DecodeError as error:
        raise TransportError(f"{what}: p2pd's answer makes no sense") from error
    if response.type == p2pd_pb2.Response.ERROR:
        message = f"{what}: {reason(response.error.msg)}"
        # go-multistream's error after the handshake.
        raise UnknownProtocol(message) if NOT_SPOKEN in response.error.msg else PeerUnreachable(message)


def reason(message: str) -> str:
    """The last, most telling part of a Go error, in one short line."""
    text = " ".join(message.split())
    return text if len(text) <= 200 else f"{text[:80]} ... {text[-100:]}"


def no_answer(error: BaseException) -> TransportError:
    return TransportError(f"p2pd does not answer: {error_line(error)}")
