"""A transport through a peer that runs on this machine (`fusion.swarm.control.server`). It needs neither hivemind nor p2pd, only the
peer's control socket. The directory is beside it (`fusion.swarm.control.directory`).

If the peer ends meanwhile, both fail over to what `elsewhere` opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fusion.swarm.control.server import LIMITS
from fusion.swarm.directory.api import Directory
from fusion.swarm.errors import (
    FrameError,
    PeerUnreachable,
    RemoteError,
    StreamBroken,
    StreamClosed,
    SwarmError,
    TransportError,
)
from fusion.swarm.protocol import CONTROL
from fusion.swarm.streams.frame_parser import delimited
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import Frame, Handler, PeerId, Stream, Traffic, Transport, checked

HELLO_SECONDS = 5.0  # a frozen peer accepts connections too
ANSWER_SECONDS = 20.0  # more than the timeouts of the peer's own requests

Elsewhere = Callable[[], Awaitable[tuple[Transport, Directory]]]


class Gone(PeerUnreachable):
    """No peer answers at the control socket, or no longer."""


class ControlTransport:
    """Implements `fusion.swarm.transport.Guided` for a command: it opens streams and serves none. Made by
    `await ControlTransport.attach(path)`. A command has no peer id: others see streams of `through`, the running peer."""

    def __init__(self, path: Path, elsewhere: Elsewhere | None = None) -> None:
        """`elsewhere` opens another transport and directory once the peer is gone; raises SwarmError if there are none."""
        self.peer_id = self.through = PeerId("")
        self._path = path
        self._elsewhere = elsewhere
        self._moved: asyncio.Task[tuple[Transport, Directory]] | None = None
        self._counter = TrafficCounter()
        self._addresses: tuple[str, ...] = ()
        self._streams: set[FrameStream] = set()

    @classmethod
    async def attach(cls, path: Path, elsewhere: Elsewhere | None = None) -> ControlTransport:
        """Raises PeerUnreachable if no peer answers at `path`."""
        transport = cls(path, elsewhere)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = (await transport.request("hello")).header
        except (SwarmError, TimeoutError) as error:
            raise Gone(f"no peer answers at {path}") from error
        transport.through = PeerId(str(hello.get("peer", "")))
        transport._addresses = tuple(map(str, hello.get("addresses") or ()))
        return transport

    @property
    def addresses(self) -> tuple[str, ...]:
        """Those of the running peer."""
        return self._addresses

    async def gateway(self) -> PeerId:
        return self.through

    async def connect(self, address: str) -> PeerId:
        try:
            frame = await self.request("connect", {"address": address})
            return PeerId(str(frame.header["peer"]))
        except Gone:
            return await (await self.moved())[0].connect(address)
        except (RemoteError, KeyError) as error:
            raise PeerUnreachable(str(error)) from error

    async def open(self, peer: PeerId, protocol: str, *, stripes: int = 1) -> Stream:
        if self._moved is None:
            try:
                return await self._open(peer, protocol)
            except Gone:
                pass
        return await (await self.moved())[0].open(peer, protocol, stripes=stripes)

    async def _open(self, peer: PeerId, protocol: str) -> FrameStream:
        stream = await self._dial(peer, protocol)
        try:
            await _exchange(stream, "open", {"peer": peer, "protocol": protocol})
        except BaseException as error:
            stream.abort()
            if isinstance(error, RemoteError | FrameError):
                raise PeerUnreachable(str(error)) from error
            raise
        return stream

    async def request(self, kind: str, header: Mapping[str, Any] | None = None) -> Frame:
        """One request that the running peer answers itself. Raises Gone, RemoteError."""
        stream = await self._dial(self.through, CONTROL.name)
        try:
            return await _exchange(stream, kind, header)
        finally:
            stream.abort()

    async def moved(self) -> tuple[Transport, Directory]:
        """The transport and directory used in place of the peer that is gone."""
        if self._elsewhere is None:
            raise PeerUnreachable("the peer that ran with this home has stopped")
        if self._moved is None:
            self._moved = asyncio.ensure_future(self._elsewhere())
        moved = self._moved
        try:
            return await asyncio.shield(moved)
        except SwarmError as error:
            if self._moved is moved:
                self._moved = None  # the next caller tries again
            raise PeerUnreachable(f"the peer that ran with this home has stopped, and {error}") from error

    async def serve(self, protocol: str, handler: Handler) -> None:
        raise TransportError("a command serves nothing: its peer does")

    def traffic(self) -> Mapping[PeerId, Traffic]:
        return self._counter.snapshot()

    async def aclose(self) -> None:
        for stream in list(self._streams):
            stream.abort()
        if self._moved is not None:
            self._moved.cancel()
            await asyncio.gather(self._moved, return_exceptions=True)

    async def _dial(self, peer: PeerId, protocol: str) -> FrameStream:
        loop = asyncio.get_running_loop()
        try:
            _, stream = await loop.create_unix_connection(
                lambda: FrameStream(LIMITS, self._counter, lambda *_: None, peer, protocol),
                path=str(self._path),
            )
            self._streams.add(stream)
            stream.lost.add_done_callback(lambda _: self._streams.discard(stream))
            await stream.write_message(delimited(CONTROL.name.encode()))
        except (OSError, StreamBroken) as error:
            raise Gone("the peer that ran with this home has stopped") from error
        return stream


async def _exchange(stream: FrameStream, kind: str, header: Mapping[str, Any] | None) -> Frame:
    """Raises Gone, RemoteError."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await stream.send(kind, header)
            return checked(await stream.receive())
    except (StreamBroken, StreamClosed) as error:
        raise Gone("the peer that ran with this home has stopped") from error
    except TimeoutError:
        raise PeerUnreachable("the peer that runs with this home does not answer") from None
