"""Connections of a thin client to peers, at most one to each. Runs in trio."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence

import trio

from fusion.swarm.errors import PeerUnreachable
from fusion.swarm.identity import Identity
from fusion.swarm.streams.frame_parser import delimited
from fusion.swarm.thin.addresses import Target
from fusion.swarm.thin.connection import Connection, splice
from fusion.swarm.thin.trio_thread import TrioThread
from fusion.swarm.transport import PeerId

STAGGER_SECONDS = 0.25  # between dialling one address of a peer and the next


class Dialer:
    def __init__(self, identity: Identity, thread: TrioThread) -> None:
        self._identity = identity
        self._thread = thread
        self._connections: dict[PeerId, Connection] = {}
        self._dialling: defaultdict[PeerId, trio.Lock] = defaultdict(trio.Lock)
        self._open = 0  # streams
        self._closed = trio.Event()  # set when the last of them has ended

    def is_connected(self, peer: PeerId) -> bool:
        """Whether there is a live connection. Thread-safe."""
        connection = self._connections.get(peer)
        return connection is not None and connection.alive

    async def connect(self, *targets: Target) -> Connection:
        """The connection to the one peer of these targets, dialled at the first that answers. Raises PeerUnreachable."""
        peer = targets[0].peer
        async with self._dialling[peer]:
            connection = self._connections.get(peer)
            if connection is None or not connection.alive:
                connection = self._connections[peer] = await self._first_of(targets)
            return connection

    async def _first_of(self, targets: Sequence[Target]) -> Connection:
        """Dial each target STAGGER_SECONDS after the one before, or once that has failed: addresses of a peer's own network come
        first, which from elsewhere do not answer. Raises the first target's error."""
        found, failures = list[Connection](), dict[Target, PeerUnreachable]()

        async def dial(target: Target, failed: trio.Event) -> None:
            try:
                connection = await Connection.dial(target, self._identity, self._thread.nursery)
            except PeerUnreachable as error:
                failures[target] = error
                failed.set()
                return
            if found:
                await connection.aclose()
            else:
                found.append(connection)
                dialling.cancel_scope.cancel()

        async with trio.open_nursery() as dialling:
            for target in targets:
                failed = trio.Event()
                dialling.start_soon(dial, target, failed)
                with trio.move_on_after(STAGGER_SECONDS):
                    await failed.wait()
        if not found:
            raise failures[targets[0]]
        return found[0]

    async def open(self, peer: PeerId, targets: tuple[Target, ...], protocol: str) -> socket.socket:
        """A stream to the peer, as one end of a socket pair. Its first message is an empty one, in place of p2pd's answer. Raises
        PeerUnreachable, UnknownProtocol."""
        if not targets:
            raise PeerUnreachable(f"cannot reach {peer}: nobody says where it listens")
        connection = await self.connect(*targets)
        try:
            stream = await connection.open(protocol)
        except PeerUnreachable:
            # The connection may be dead, which TCP notices only after a quarter of an hour: the next caller dials again. If it is
            # only slow, its open streams go on.
            if self._connections.get(peer) is connection:
                del self._connections[peer]
            raise
        near, far = socket.socketpair()
        local = trio.SocketStream(trio.socket.from_stdlib_socket(far))
        await local.send_all(delimited(b""))

        async def relay() -> None:
            self._open += 1
            try:
                await splice(stream, local)
            finally:
                self._open -= 1
                if not self._open:
                    self._closed.set()

        self._thread.nursery.start_soon(relay)
        return near

    async def aclose(self, seconds: float) -> None:
        """Wait up to `seconds` for streams that were closed here to end at the peers, too, then close all connections."""
        if self._open:
            self._closed = trio.Event()
            with trio.move_on_after(seconds):
                await self._closed.wait()
        for connection in self._connections.values():
            await connection.aclose()
