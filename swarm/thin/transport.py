"""The transport of a client without p2pd: py-libp2p dials, in a thread that runs trio (`fusion.swarm.thin.trio_thread`).

A stream is a socket pair: at one end frames are read and written as on p2pd's sockets, with the same caps, backpressure and ends
(`fusion.swarm.streams.frame_stream`); at the other end the bytes are relayed to libp2p.

Imports py-libp2p and trio only at the first dial.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.errors import PeerUnreachable, StreamBroken, TransportError
from fusion.swarm.identity import Identity
from fusion.swarm.protocol import MAX_PASSED_BYTES
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.frames import FrameLimits
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.swarm_key import Authorizer
from fusion.swarm.thin.addresses import dialable, parse
from fusion.swarm.transport import Handler, PeerId, Stream, Traffic

if TYPE_CHECKING:
    from fusion.swarm.thin.dialer import Dialer
    from fusion.swarm.thin.trio_thread import TrioThread

logger = logging.getLogger(__name__)

KNOWN_PEERS = 1024  # whose addresses are remembered
STAGGER_SECONDS = 0.25  # between dialling one of several peers and the next
FLUSH_SECONDS = 0.5  # for the ends of streams to reach the peers


@dataclass(frozen=True, kw_only=True)
class ThinConfig:
    identity: Identity
    ways: tuple[str, ...]  # multiaddrs of peers, any of which may be the gateway
    authorizer: Authorizer | None = None  # of a closed swarm
    limits: FrameLimits = FrameLimits(payload_bytes=MAX_PASSED_BYTES)  # noqa: RUF009 - frozen
    # The largest payload accepted on a stream, by protocol (`fusion.swarm.protocol`); of others that of `limits`.
    answer_bytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ways:
            raise ValueError("at least one address")


class ThinTransport:
    """Implements `fusion.swarm.transport.Guided` for a command: it opens streams and serves none. `through` is its
    gateway."""

    def __init__(self, config: ThinConfig) -> None:
        self.peer_id = config.identity.peer_id
        self.through: PeerId | None = None
        self._config = config
        self._named = {target.peer for target in dialable(config.ways)}
        self._known: dict[PeerId, tuple[str, ...]] = {}  # oldest first
        self._failed: set[PeerId] = set()  # tried last
        self._counter = TrafficCounter()
        self._streams: set[FrameStream] = set()
        self._trio: TrioThread | None = None
        self._dialer: Dialer
        self._starting = asyncio.Lock()
        self._moving = asyncio.Lock()

    @property
    def addresses(self) -> tuple[str, ...]:
        return ()

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Remember the multiaddrs of a peer. Beyond KNOWN_PEERS the oldest are dropped, except connected peers and those that the user
        named."""
        found = tuple(address for address in addresses if dialable((address,)))
        if not found:
            return
        self._known.pop(peer, None)
        if len(self._known) >= KNOWN_PEERS:
            oldest = next((each for each in self._known if not self._is_kept(each)), None)
            if oldest is None:
                return
            del self._known[oldest]
        self._known[peer] = found

    def _is_kept(self, peer: PeerId) -> bool:
        return peer in self._named or (self._trio is not None and self._dialer.is_connected(peer))

    async def gateway(self) -> PeerId:
        """The same peer as before while it answers, else any that does."""
        async with self._moving:  # callers that wait for it find the new gateway
            if self.through is None or self.through in self._failed:
                ways: dict[PeerId, dict[str, None]] = {}
                for address in chain(self._config.ways, *self._known.values()):
                    ways.setdefault(parse(address).peer, {})[address] = None
                fresh = [found for peer, found in ways.items() if peer not in self._failed]
                self.through = await self._first_of([tuple(found) for found in fresh or ways.values()])
            return self.through

    def doubt(self, peer: PeerId) -> None:
        """The peer did not answer: prefer others from now on."""
        self._failed.add(peer)

    async def connect(self, address: str) -> PeerId:
        return await self._connect((address,))

    async def _connect(self, addresses: tuple[str, ...]) -> PeerId:
        """Connect to the one peer of these addresses."""
        targets = [parse(address) for address in addresses]
        peer = targets[0].peer
        self.learn(peer, dict.fromkeys((*self._known.get(peer, ()), *addresses)))
        try:
            await (await self._started()).call(self._dialer.connect, *targets)
        except PeerUnreachable as error:
            raise PeerUnreachable(f"no peer answers at {addresses[0]}: {error}") from error
        return peer

    async def open(self, peer: PeerId, protocol: str, *, stripes: int = 1) -> Stream:
        trio = await self._started()
        targets = dialable(self._known.get(peer, ()))
        near = await trio.call(self._dialer.open, peer, targets, protocol, unused=socket.socket.close)
        stream = FrameStream(
            *(self._config.limits, self._counter, lambda *_: None, peer, protocol),
            allowed=self._config.answer_bytes.get(protocol),
            authorizer=self._config.authorizer,
        )
        self._streams.add(stream)
        stream.lost.add_done_callback(lambda _: self._streams.discard(stream))
        loop = asyncio.get_running_loop()
        if near.family == getattr(socket, "AF_UNIX", None):
            await loop.create_unix_connection(lambda: stream, sock=near)
        else:  # Windows has only TCP socket pairs
            await loop.create_connection(lambda: stream, sock=near)
        return stream

    async def serve(self, protocol: str, handler: Handler) -> None:
        raise TransportError("a client serves nothing")

    def traffic(self) -> Mapping[PeerId, Traffic]:
        return self._counter.snapshot()

    def has_received_from(self, peer: PeerId) -> bool:
        """Whether we have received anything from it."""
        return self._counter.snapshot().get(peer, Traffic()).received_bytes > 0

    async def aclose(self) -> None:
        """Close every stream and connection, waiting briefly until the peers have seen it. Idempotent."""
        for stream in list(self._streams):
            stream.abort()
        if self._trio is not None:
            with suppress(TimeoutError, RuntimeError):
                async with asyncio.timeout(2 * FLUSH_SECONDS):
                    await self._trio.call(self._dialer.aclose, FLUSH_SECONDS)
            with suppress(TimeoutError):
                await self._trio.aclose()

    async def _started(self) -> TrioThread:
        async with self._starting:
            if self._trio is None:
                trio, dialer = _machinery()
                self._trio, self._dialer = trio, dialer(self._config.identity, trio)
                await trio.start()
            return self._trio

    async def _first_of(self, peers: list[tuple[str, ...]]) -> PeerId:
        """The first that answers of the peers with these addresses: each is dialled STAGGER_SECONDS after the one before, or once
        that has failed. Raises the first one's PeerUnreachable."""
        waiting, tasks = list(peers), list[asyncio.Task[PeerId]]()
        try:
            while True:
                if waiting:
                    tasks.append(asyncio.create_task(self._connect(waiting.pop(0))))
                pending = [task for task in tasks if not task.done()]
                pause = STAGGER_SECONDS if waiting else None
                if pending:
                    await asyncio.wait(pending, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done() and task.exception() is None:
                        return task.result()
                if not waiting and all(task.done() for task in tasks):
                    raise tasks[0].exception() or StreamBroken("nobody answers")
        finally:
            await cancel_all(tasks)


def _machinery() -> tuple[TrioThread, type[Dialer]]:
    from fusion.swarm.thin.libp2p import forget_libp2p, keep_quiet, lean_libp2p

    keep_quiet()
    try:
        with lean_libp2p():
            from fusion.swarm.thin.dialer import Dialer
            from fusion.swarm.thin.trio_thread import TrioThread
    except (
        ImportError,
        AttributeError,
        TypeError,
    ) as error:  # another release of py-libp2p, with other parts
        logger.debug("py-libp2p as a whole, since %r", error)
        forget_libp2p()
        from fusion.swarm.thin.dialer import Dialer
        from fusion.swarm.thin.trio_thread import TrioThread
    return TrioThread(), Dialer
