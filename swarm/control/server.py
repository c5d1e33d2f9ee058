"""The control socket of a running peer, for commands of the same user on its machine: its streams, and its view of the directory.

A command that joined the swarm itself would load hivemind, start a p2pd, dial, and look up what the peer knows already.
The socket lies in a private directory that is removed with the peer, however it ends. Each connection begins with the name of
the protocol, both ways, in the form of p2pd's messages; then come frames, the first from the command:

/fusion/control/1
    hello                    -> hello {peer, addresses}
    connect {address}        -> connected {peer}
    peers, links, jobs, words          -> records {now}, the payload a msgpack list of encoded records
    job, words {job}, providers {digest}   -> records {now}, likewise
    claims {job, stage}      -> records {now, ends}, likewise; the unix seconds at which each ends
    open {peer, protocol}    -> opened, and from then on every frame is relayed, both ways

or `error` {message}. Timeouts are the command's: it hangs up.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgpack

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.directory import sealing
from fusion.swarm.directory.api import Directory
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, Record, is_digest
from fusion.swarm.errors import FrameError, StreamClosed, TransportError
from fusion.swarm.protocol import CONTROL
from fusion.swarm.streams.frame_parser import delimited
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.frames import FrameLimits
from fusion.swarm.streams.handlers import Handlers
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import UNASKED_BYTES, PeerId, Stream, Transport

assert CONTROL.payload_bytes is not None
LIMITS = FrameLimits(payload_bytes=CONTROL.payload_bytes)


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    connections: int = 64  # at once; one more is hung up on
    first_seconds: float = 5.0  # for the first frame of a connection

    def __post_init__(self) -> None:
        if self.connections < 1 or self.first_seconds <= 0:
            raise ValueError("connections and first_seconds must be positive")


class ControlServer:
    """`async with ControlServer(transport, directory, path)`: serves both to commands for the length of the block. Only this user
    may have access to `path`, which must fit into a socket's address."""

    def __init__(
        self, transport: Transport, directory: Directory, path: Path, config: ControlConfig | None = None
    ) -> None:
        self.path = path
        self._transport = transport
        self._directory = directory
        self._config = config or ControlConfig()
        # All connections count as one peer's.
        self._handlers = Handlers(
            per_peer=self._config.connections, idle_seconds={CONTROL.name: CONTROL.idle_seconds}
        )
        self._handlers.add(CONTROL.name, self._serve)
        self._counter = TrafficCounter()  # apart from the swarm's: these bytes stay on the machine
        self._server: asyncio.AbstractServer | None = None
        self._streams: dict[FrameStream, asyncio.TimerHandle] = {}  # and the timer of its first frame
        self._queries: dict[str, Callable[[Mapping[str, Any]], Awaitable[Sequence[Record]]]] = {
            "peers": lambda header: directory.peers(),
            "links": lambda header: directory.links(),
            "jobs": lambda header: directory.jobs(),
            "job": self._job,
            "words": self._job_records,
            "claims": lambda header: directory.claims(JobId(_digest(header, "job")), _stage(header)),
            "providers": lambda header: directory.providers(Digest(_digest(header, "digest"))),
        }

    async def __aenter__(self) -> Self:
        """Raises OSError where the socket cannot be made at `path`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._incoming, path=str(self.path))
        os.chmod(self.path, 0o600)  # besides its private folder
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
            self.path.unlink(missing_ok=True)
            self._server = None
        await self._handlers.aclose()
        for stream in list(self._streams):
            stream.abort()

    def _incoming(self) -> FrameStream:
        stream = FrameStream(LIMITS, self._counter, self._accept, allowed=UNASKED_BYTES)
        if len(self._streams) >= self._config.connections:  # silent ones count as well
            stream.abort()
            return stream
        late = asyncio.get_running_loop().call_later(self._config.first_seconds, stream.drop)
        self._streams[stream] = late
        stream.lost.add_done_callback(lambda _: self._streams.pop(stream).cancel())
        return stream

    def _accept(self, stream: FrameStream, hello: bytes | None) -> None:
        if hello is None or stream not in self._streams:
            return
        self._streams[stream].cancel()
        stream.protocol = hello.decode(errors="replace")
        self._handlers.accept(stream)  # it hangs up on other protocols

    async def _serve(self, stream: Stream) -> None:
        assert isinstance(stream, FrameStream)
        await stream.write_message(delimited(CONTROL.name.encode()))
        async with asyncio.timeout(self._config.first_seconds):
            frame = await stream.receive()
        header = frame.header
        match frame.kind:
            case "hello":
                here = self._transport
                await stream.send("hello", {"peer": here.peer_id, "addresses": list(here.addresses)})
            case "connect":
                await stream.send(
                    "connected", {"peer": await self._transport.connect(_text(header, "address"))}
                )
            case "open":
                far = await self._transport.open(PeerId(_text(header, "peer")), _text(header, "protocol"))
                try:
                    stream.allow(LIMITS.payload_bytes)
                    await stream.send("opened")
                    await splice(stream, far)
                finally:
                    far.abort()
            case kind if kind in self._queries:
                found = await self._queries[kind](header)
                ends = [each.expires_at for each in found if isinstance(each, ClaimRecord)]
                reply = {"now": self._directory.now(), **({"ends": ends} if ends else {})}
                await stream.send("records", reply, [msgpack.packb([sealing.encode(each) for each in found])])
            case kind:
                raise FrameError(f"{CONTROL.name} knows no {kind!r:.40}")

    async def _job(self, header: Mapping[str, Any]) -> Sequence[Record]:
        found = await self._directory.job(JobId(_digest(header, "job")))
        return () if found is None else (found,)

    async def _job_records(self, header: Mapping[str, Any]) -> Sequence[Record]:
        return await self._directory.job_records(JobId(_digest(header, "job")) if "job" in header else None)


async def splice(one: Stream, two: Stream) -> None:
    """Relay frames, both ways, until one side ends; the other is then ended in the same way. Backpressure: at most one frame each way
    is buffered here, beside the streams' own buffers."""
    ways = [asyncio.create_task(_relay(one, two)), asyncio.create_task(_relay(two, one))]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(ways)
    for way, left in zip(ways, (two, one), strict=True):
        if way in done:
            await left.aclose() if way.result() else left.abort()


async def _relay(source: Stream, sink: Stream) -> bool:
    """Relay until `source` ends; whether it ended cleanly."""
    open_sink = True
    while True:
        try:
            frame = await source.receive()
        except StreamClosed:
            return True
        except TransportError:
            return False
        if open_sink:
            try:
                await sink.send(frame.kind, frame.header, [frame.payload])
            except TransportError:
                open_sink = False  # go on reading: frames that the sink sent before its end are still relayed


def _text(header: Mapping[str, Any], name: str) -> str:
    value: Any = header.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise FrameError(f"{name} must be a short text")
    return value


def _digest(header: Mapping[str, Any], name: str) -> str:
    value = header.get(name)
    if not is_digest(value):
        raise FrameError(f"{name} must be a digest")
    return str(value)


def _stage(header: Mapping[str, Any]) -> int:
    value = header.get("stage")
    if type(value) is not int or value < 0:
        raise FrameError("stage must be a number")
    return value
