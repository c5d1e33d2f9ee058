"""The swarm through a peer that runs on this machine (`fusion.swarm.control.server`): a transport and a directory that
need neither hivemind nor p2pd, only the peer's control socket.

Where the peer ends meanwhile, both go on elsewhere: through what `elsewhere` opens then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from fusion.swarm.control.server import LIMITS
from fusion.swarm.directory import sealing
from fusion.swarm.directory.api import RECORD_TTL_SECONDS, Directory
from fusion.swarm.directory.records import (
    ClaimRecord,
    Digest,
    JobId,
    JobRecord,
    LinkRecord,
    PeerRecord,
    ProviderRecord,
    Record,
)
from fusion.swarm.errors import (
    FrameError,
    PeerUnreachable,
    RemoteError,
    StreamBroken,
    StreamClosed,
    SwarmError,
    TransportError,
)
from fusion.swarm.identity import verify
from fusion.swarm.protocol import CONTROL
from fusion.swarm.streams.frame_parser import delimited
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import Frame, Handler, PeerId, Stream, Traffic, Transport, checked

HELLO_SECONDS = 5.0  # a peer that is frozen accepts connections too
ANSWER_SECONDS = 20.0  # more than the peer gives those whom it asks in turn

R = TypeVar("R", PeerRecord, JobRecord, ClaimRecord, ProviderRecord, LinkRecord)
Elsewhere = Callable[[], Awaitable[tuple[Transport, Directory]]]


class Gone(PeerUnreachable):
    """Nobody answers at the control socket (any more)."""


class ControlTransport:
    """Implements `fusion.swarm.transport.Guided` for a command: it opens streams and serves none. Made by
    `await ControlTransport.attach(path)`. A command has no id; to others `through`, the running peer, opens the stream."""

    def __init__(self, path: Path, elsewhere: Elsewhere | None = None) -> None:
        """`elsewhere` opens another way into the swarm once the peer is gone. Raises SwarmError if there is none."""
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
                hello = (await transport.ask("hello")).header
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
            frame = await self.ask("connect", {"address": address})
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

    async def ask(self, kind: str, header: Mapping[str, Any] | None = None) -> Frame:
        """What the running peer answers itself. Raises Gone, RemoteError."""
        stream = await self._dial(self.through, CONTROL.name)
        try:
            return await _exchange(stream, kind, header)
        finally:
            stream.abort()

    async def moved(self) -> tuple[Transport, Directory]:
        """What is used in the place of the peer that is gone."""
        if self._elsewhere is None:
            raise PeerUnreachable("the peer that ran with this home has stopped")
        if self._moved is None:
            self._moved = asyncio.ensure_future(self._elsewhere())
        moved = self._moved
        try:
            return await asyncio.shield(moved)
        except SwarmError as error:
            if self._moved is moved:
                self._moved = None  # the next one tries again
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


class ControlDirectory:
    """Implements `fusion.swarm.directory.api.Directory`, read only: what the running peer finds."""

    def __init__(self, transport: ControlTransport) -> None:
        self._transport = transport
        self._ahead = 0.0  # of our clock, the swarm's as the peer knows it

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        raise PeerUnreachable("a command publishes nothing through its peer")

    def sealed(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> bytes:
        raise PeerUnreachable("a command publishes nothing through its peer")

    def unsealed(self, data: bytes) -> Record:
        raise PeerUnreachable("a command is shown nothing")

    def sign(self, data: bytes) -> bytes:
        raise PeerUnreachable("a command signs nothing through its peer")

    def verify(self, peer: str, signature: bytes, data: bytes) -> bool:
        return verify(peer, signature, data)

    def now(self) -> float:
        return time.time() + self._ahead

    async def peers(self, *, max_age_seconds: float = 0.0) -> tuple[PeerRecord, ...]:
        return await self._read(
            PeerRecord, "peers", {}, lambda there: there.peers(max_age_seconds=max_age_seconds)
        )

    async def links(self) -> tuple[LinkRecord, ...]:
        return await self._read(LinkRecord, "links", {}, lambda there: there.links())

    async def jobs(self, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        return await self._read(
            JobRecord, "jobs", {}, lambda there: there.jobs(max_age_seconds=max_age_seconds)
        )

    async def job(self, job: JobId) -> JobRecord | None:
        async def there(directory: Directory) -> tuple[JobRecord, ...]:
            found = await directory.job(job)
            return () if found is None else (found,)

        return next(iter(await self._read(JobRecord, "job", {"job": job}, there)), None)

    async def words(self, job: JobId | None = None, *, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
        header = {} if job is None else {"job": job}
        return await self._read(JobRecord, "words", header, lambda there: there.words(job))

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        header = {"job": job, "stage": stage}
        return await self._read(ClaimRecord, "claims", header, lambda there: there.claims(job, stage))

    async def providers(self, digest: Digest) -> tuple[ProviderRecord, ...]:
        header = {"digest": digest}
        return await self._read(ProviderRecord, "providers", header, lambda there: there.providers(digest))

    async def aclose(self) -> None:
        pass

    async def _read(
        self,
        kind: type[R],
        question: str,
        header: Mapping[str, Any],
        elsewhere: Callable[[Directory], Awaitable[tuple[R, ...]]],
    ) -> tuple[R, ...]:
        try:
            answer = await self._transport.ask(question, header)
            found = [sealing.decode(body) for body in msgpack.unpackb(answer.payload)]
            self._ahead = float(answer.header.get("now", time.time())) - time.time()
            for at, end in enumerate(answer.header.get("ends", ())):
                claim = found[at]
                if isinstance(claim, ClaimRecord):
                    found[at] = replace(claim, expires_at=float(end))
        except Gone:
            return await elsewhere((await self._transport.moved())[1])
        except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
            raise FrameError(f"the running peer's answer makes no sense: {error}") from error
        return tuple(record for record in found if isinstance(record, kind))


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
