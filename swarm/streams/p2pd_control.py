"""What is said to a p2pd that we started: requests over connections of their own, and hivemind's `P2P` over it, for our calls of the DHT."""

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

CONTROL_SECONDS = 30.0  # for p2pd to answer on its own machine
GONE = "p2pd is gone"
NOT_SPOKEN = "protocols not supported"
SILENT_SECONDS = 1.5  # without a first answer, after which a connection may have died
_LOOK_SECONDS = 2.0  # between looks at who is connected
_NEXT_LOOK_SECONDS = 0.5  # after one that found too many
_AT_ONCE = 128  # that are hung up on, before others have a turn
_PING = "/ipfs/ping/1.0.0"  # every libp2p host answers it, whatever our process beside it does
_PING_BYTES = 32
_TCP = 6  # in a multiaddr; two bytes of a port follow
_PLAIN_TCP_BYTES = (8, 20)  # of one of an IPv4 or IPv6 address and such a port


class AttachedP2P(P2P):  # type: ignore[misc]
    """hivemind's P2P, which asks us before it calls another peer, and fails at once when p2pd is dead: by itself it
    would wait for answers until every caller's time is up."""

    daemon: Daemon
    authorizer: Authorizer | None  # of a closed swarm
    before_call: Callable[[PeerID], Awaitable[None]]  # these three are the transport's
    call_failed: Callable[[], None]  # p2pd did not get through
    unanswered: Callable[[PeerID], None]  # for longer than usual
    dead = False

    async def call_protobuf_handler(self, peer_id: PeerID, *arguments: Any, **options: Any) -> Any:
        if self.dead:
            raise P2PDaemonError(GONE)
        await self.before_call(peer_id)
        self.daemon.connections.use(bytes(peer_id.to_bytes()))
        # By a timer: whoever gives a call up cancels it, for reasons of its own as well.
        late = asyncio.get_running_loop().call_later(SILENT_SECONDS, self.unanswered, peer_id)
        try:
            return await super().call_protobuf_handler(peer_id, *arguments, **options)
        except P2PDaemonError:
            self.call_failed()
            raise
        finally:
            late.cancel()

    def bury(self) -> None:
        self.dead = True
        control = self._client.control
        for task in (control._read_task, control._write_task):
            if task is not None:  # they end with an error that nobody asks for
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        for call in control._pending_calls.values():
            if not call.done():
                call.set_exception(P2PDaemonError(GONE))


class _Control(ControlClient):  # type: ignore[misc]
    """hivemind's connection to p2pd, for our calls of the DHT. By itself it writes the length
    of each message byte by byte, then the message: here all that waits goes out in one write."""

    async def _write_to_persistent_conn(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while True:
                messages = [await self._pending_messages.get()]
                while not self._pending_messages.empty():
                    messages.append(self._pending_messages.get_nowait())
                writer.write(b"".join(map(framed, messages)))
                await writer.drain()


class _Waiting(dict[Any, "asyncio.Future[Any]"]):
    """hivemind's calls under way, without those whose caller has given up: an answer to one that comes before the caller
    had its turn would end the task that reads all answers, and with it every later call."""

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
    """A message as p2pd reads it."""
    return delimited(message.SerializeToString())


async def ask(daemon: Daemon, request: p2pd_pb2.Request) -> p2pd_pb2.Response:
    """One request over a connection of its own. Raises TransportError, PeerUnreachable for what p2pd could not do."""
    response = p2pd_pb2.Response()
    writer = None
    try:
        async with asyncio.timeout(CONTROL_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(daemon.control_path))
            writer.write(framed(request))
            await read_pbmsg_safe(reader, response)
    except (OSError, asyncio.IncompleteReadError, DecodeError) as error:
        raise unanswered(error) from error
    finally:
        if writer is not None:
            writer.close()
    if response.type == p2pd_pb2.Response.ERROR:
        raise PeerUnreachable(reason(response.error.msg))
    return response


async def hand_over(daemon: Daemon, protocols: Sequence[str], socket: Path) -> None:
    """From now on p2pd gives each incoming stream of these protocols to whoever listens there, as a connection. Raises
    TransportError."""
    request = p2pd_pb2.StreamHandlerRequest(addr=_unix(socket), proto=protocols, balanced=False)
    await ask(daemon, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request))


async def take_back(daemon: Daemon, protocols: Sequence[str], socket: Path) -> None:
    """Ends `hand_over`."""
    request = p2pd_pb2.RemoveStreamHandlerRequest(addr=_unix(socket), proto=protocols)
    kind = p2pd_pb2.Request.REMOVE_STREAM_HANDLER
    await ask(daemon, p2pd_pb2.Request(type=kind, removeStreamHandler=request))


async def disconnect(daemon: Daemon, peer: PeerId) -> None:
    """Ends the connections to a peer, and every stream over them. Raises TransportError."""
    request = p2pd_pb2.DisconnectRequest(peer=to_bytes(peer))
    await ask(daemon, p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=request))


async def hang_up_on_idle(
    daemon: Daemon, busy: Callable[[], Container[bytes]], hung_up: Callable[[], None]
) -> None:
    """Ends those connections that are too many of those that nobody uses (`fusion.swarm.idle_connections`), until cancelled. `busy`: the
    peers with a stream. Over one connection to p2pd, which stays open: a p2pd that has run out of files takes no other."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(daemon.control_path))
            with contextlib.closing(writer):
                while True:
                    found = await _hang_up_on_surplus(daemon, reader, writer, busy)
                    if found:
                        hung_up()
                    await asyncio.sleep(_NEXT_LOOK_SECONDS if found else _LOOK_SECONDS)
        except (OSError, asyncio.IncompleteReadError, DecodeError) as error:  # TimeoutError is one
            logger.debug("who is connected is not known: %r", error)


async def _hang_up_on_surplus(
    daemon: Daemon,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    busy: Callable[[], Container[bytes]],
) -> int:
    """On how many."""
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
    """Whether the connection to the peer carries a few bytes there and back within so many seconds; True as well where
    p2pd knows that there is none. Raises TransportError where p2pd itself does not answer."""
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
        raise unanswered(error) from error
    finally:
        if writer is not None:
            writer.transport.abort()
    return True


def _unix(socket: Path) -> bytes:
    address: bytes = Multiaddr(f"/unix{socket}").to_bytes()
    return address


def public_network(address: bytes) -> str | None:
    """The public network (`fusion.swarm.subnets`) of an address as p2pd gives it; None as well for one of a kind that hivemind does not
    know: p2pd dials more kinds."""
    # Who is remembered is remembered at any port
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
    """Raises UnknownProtocol where the other end answered, but not that; else PeerUnreachable or TransportError for
    what p2pd could not do."""
    response = p2pd_pb2.Response()
    try:
        if data is None:
            raise PeerUnreachable(f"{what}: p2pd hung up")
        response.ParseFromString(data)
    except DecodeError as error:
        raise TransportError(f"{what}: p2pd's answer makes no sense") from error
    if response.type == p2pd_pb2.Response.ERROR:
        message = f"{what}: {reason(response.error.msg)}"
        # What go-multistream says after both ends have shaken hands.
        raise UnknownProtocol(message) if NOT_SPOKEN in response.error.msg else PeerUnreachable(message)


def reason(message: str) -> str:
    """The last, most telling part of a Go error, in one short line."""
    text = " ".join(message.split())
    return text if len(text) <= 200 else f"{text[:80]} ... {text[-100:]}"


def unanswered(error: BaseException) -> TransportError:
    return TransportError(f"p2pd does not answer: {error_line(error)}")
