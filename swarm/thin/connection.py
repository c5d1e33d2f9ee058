"""A connection to one peer through py-libp2p: TCP, Noise, Yamux, and a protocol chosen for each stream. Runs in trio;
knows nothing of frames.

py-libp2p's exceptions depend on where a connection breaks, so all of them are caught here: callers see PeerUnreachable,
UnknownProtocol, and streams that end.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Self

import trio
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import ProtocolNotSupportedError
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream

from fusion.swarm.errors import PeerUnreachable, UnknownProtocol
from fusion.swarm.identity import Identity
from fusion.swarm.printable import one_line
from fusion.swarm.thin.addresses import Target
from fusion.swarm.transport import PeerId

logger = logging.getLogger(__name__)

NOISE, YAMUX = TProtocol("/noise"), TProtocol("/yamux/1.0.0")
DIAL_SECONDS = 8.0  # to one address, until streams can be opened
OPEN_SECONDS = 8.0
LINGER_SECONDS = 1.0  # for the remote end to end a stream that we ended
CHUNK_BYTES = 64 * 1024
LINE_CHARACTERS = 150


class Connection:
    """Made by `await Connection.dial(...)`; runs in its `nursery` until either side ends it."""

    def __init__(self, peer: PeerId, muxer: Yamux) -> None:
        self.peer = peer
        self._muxer = muxer

    @classmethod
    async def dial(cls, target: Target, identity: Identity, nursery: trio.Nursery) -> Self:
        """Raises PeerUnreachable where nobody, or another peer, answers."""
        tcp: trio.SocketStream | None = None
        try:
            with trio.fail_after(DIAL_SECONDS):
                tcp = await trio.open_tcp_stream(target.host, target.port)
                muxer = await _upgraded(tcp, target.peer, identity)
                connection = cls(target.peer, muxer)
                nursery.start_soon(connection._run)
                nursery.start_soon(connection._refuse_streams)
                await muxer.event_started.wait()
                return connection
        except BaseException as error:
            # py-libp2p may raise anything; or cancelled, as another address has answered
            if tcp is not None:
                await trio.aclose_forcefully(tcp)
            if not isinstance(error, Exception):
                raise
            raise PeerUnreachable(_reason(error, DIAL_SECONDS)) from error

    @property
    def alive(self) -> bool:
        return not self._muxer.event_shutting_down.is_set()

    async def open(self, protocol: str) -> YamuxStream:
        """Raises UnknownProtocol, PeerUnreachable."""
        stream: YamuxStream | None = None
        try:
            with trio.fail_after(OPEN_SECONDS):
                stream = await self._muxer.open_stream()
                client, communicator = MultiselectClient(), MultiselectCommunicator(stream)
                await client.handshake(communicator)
                await client.try_select(communicator, TProtocol(protocol))
                return stream
        except Exception as error:  # as above
            if stream is not None:
                await _reset(stream)
            if isinstance(error, ProtocolNotSupportedError):
                raise UnknownProtocol(f"{self.peer} does not speak {protocol}") from error
            raise PeerUnreachable(f"cannot reach {self.peer}: {_reason(error, OPEN_SECONDS)}") from error

    async def aclose(self) -> None:
        with suppress(Exception), trio.move_on_after(LINGER_SECONDS, shield=True):
            await self._muxer.secured_conn.close()
        self._muxer.event_shutting_down.set()

    async def _run(self) -> None:
        try:
            await self._muxer.start()
        except Exception as error:  # as above; its streams have ended
            logger.debug("the connection to %s ended: %r", self.peer, error)
        finally:
            await self.aclose()

    async def _refuse_streams(self) -> None:
        """A client serves nothing; peers open libp2p's identify streams, and go on without an answer."""
        with suppress(Exception):  # as above: the connection has ended
            while True:
                stream = await self._muxer.accept_stream()
                assert isinstance(stream, YamuxStream)
                await _reset(stream)


async def splice(stream: YamuxStream, local: trio.SocketStream) -> None:
    """Relay bytes, both ways, until one of the two ends; then end the other one, too. Backpressure: at most one chunk each way is
    buffered here."""
    try:
        async with trio.open_nursery() as nursery:
            inward = trio.Event()
            nursery.start_soon(_inward, stream, local, inward)
            await _outward(stream, local)
            with trio.move_on_after(LINGER_SECONDS):
                await inward.wait()
            nursery.cancel_scope.cancel()
    finally:
        await _reset(stream)  # no-op on one that has ended both ways
        await trio.aclose_forcefully(local)


async def _inward(stream: YamuxStream, local: trio.SocketStream, ended: trio.Event) -> None:
    try:
        while True:
            await local.send_all(await stream.read(CHUNK_BYTES))
    except (
        Exception
    ) as error:  # as above: the stream ended, was reset or lost its connection; or our end was closed
        logger.debug("nothing more from %s: %r", stream.muxed_conn.peer_id, error)
    finally:
        ended.set()
        await trio.aclose_forcefully(local)


async def _outward(stream: YamuxStream, local: trio.SocketStream) -> None:
    try:
        while data := await local.receive_some(CHUNK_BYTES):
            await stream.write(bytes(data))
        await stream.close()
    except Exception as error:  # as above
        logger.debug("nothing more to %s: %r", stream.muxed_conn.peer_id, error)


async def _upgraded(tcp: trio.SocketStream, peer: PeerId, identity: Identity) -> Yamux:
    raw = RawConnection(TrioTCPStream(tcp), initiator=True)
    await _choose(raw, NOISE)
    seed = identity.private_bytes()[-64:-32]
    key = Ed25519PrivateKey.from_bytes(seed)
    noise = Noise(KeyPair(key, key.get_public_key()), create_new_key_pair().private_key)
    secured = await noise.secure_outbound(raw, ID.from_base58(peer))
    if str(secured.get_remote_peer()) != peer:
        raise PeerUnreachable("another peer answers there")
    await _choose(secured, YAMUX)
    return Yamux(secured, ID.from_base58(peer), is_initiator=True)


async def _choose(connection: RawConnection, protocol: TProtocol) -> None:
    client, communicator = MultiselectClient(), MultiselectCommunicator(connection)
    await client.handshake(communicator)
    await client.try_select(communicator, protocol)


async def _reset(stream: YamuxStream) -> None:
    with suppress(Exception), trio.move_on_after(LINGER_SECONDS, shield=True):
        await stream.reset()


def _reason(error: Exception, seconds: float) -> str:
    """The innermost cause, in one line."""
    if isinstance(error, trio.TooSlowError):
        return f"no answer within {seconds:g} s"
    innermost: BaseException = error
    while innermost.__cause__ is not None or isinstance(innermost, BaseExceptionGroup):
        group = isinstance(innermost, BaseExceptionGroup)
        innermost = innermost.exceptions[0] if group else innermost.__cause__  # type: ignore[attr-defined, assignment]
    if isinstance(innermost, OSError) and innermost.strerror:
        return one_line(innermost.strerror, LINE_CHARACTERS)
    return one_line(str(innermost) or type(innermost).__name__, LINE_CHARACTERS)
