"""Long-lived streams of the ring: who is at which end, what waits to go out, and one link for each neighbour.

/fusion/ring/1   first frame `hello` {job, from, to}; `from` is a stage, or GATEWAY. Then
    gateway -> stage   open, prompt (to the first stage), ping, slow, close
    stage -> gateway   opened, token, pong, failed {message, reason, stage}; for all sessions: loading, leaving
    stage -> later stage   chunk                                     last stage -> first stage   token
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.protocol import RING
from fusion.runtime.serving.request import whole
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import StreamBroken, StreamClosed, SwarmError
from fusion.swarm.printable import error_line
from fusion.swarm.transport import Buffer, Frame, PeerId, Stream, Transport, checked

log = logging.getLogger(__name__)

GATEWAY = -1  # in place of a stage index: the sender is the gateway of some sessions

MAX_UNSENT = 1 << 14  # small frames that may wait for a reader; more, and it is taken for dead
LINGER_SECONDS = 1.0  # how long the last words may take to go out

_Message = tuple[str, Mapping[str, Any], Sequence[Buffer]]


@dataclass(frozen=True)
class LinkEnds:
    """What a link joins, as its dialler sees it."""

    job: JobId
    sender: int  # a stage, or GATEWAY
    stage: int  # the stage at the far end
    peer: PeerId  # who runs it

    def to_header(self) -> dict[str, Any]:
        return {"job": self.job, "from": self.sender, "to": self.stage}

    @classmethod
    def from_hello(cls, frame: Frame, us: PeerId) -> LinkEnds:
        """The ends of an incoming stream, from its first frame. JobError where that is something else."""
        job = frame.header.get("job")
        if frame.kind != "hello" or not isinstance(job, str):
            raise JobError("hello: the first frame names a job, a sender and a stage")
        return cls(JobId(job), whole(frame.header, "from", -2), whole(frame.header, "to", -2), us)


@dataclass(frozen=True, kw_only=True)
class RingPosition:
    """Which stage of which job we hold, and under which term: the owner's, or a replica's own."""

    job: JobId
    name: str
    serve: ServeConfig
    peer: PeerId  # us
    term: int


class RingLink:
    """Sends in order what is put in, and hands what arrives to `on_frame`, until the stream ends or `aclose`.

    Whoever computes must not wait for the wire: sending has a task of its own, so the next chunk is computed while
    the last one is on its way. `on_end` is called once, with one line, when the stream ends otherwise than by
    `aclose`. Neither callback may block.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
        depth: int = 2,
    ) -> None:
        """`depth`: how many frames `send` lets wait before it waits itself."""
        self.stream = stream
        self.ended = asyncio.Event()
        self._on_frame = on_frame
        self._on_end = on_end
        self._depth = depth
        self._unsent: asyncio.Queue[_Message | None] = asyncio.Queue()  # None: say goodbye
        self._room = asyncio.Event()
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    def post(self, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Put a small frame out without waiting. After the end it is dropped: `on_end` has told."""
        if self.ended.is_set():
            return
        if self._unsent.qsize() >= MAX_UNSENT:
            self._end(f"{self.stream.remote} does not read what it is sent")
            return
        self._unsent.put_nowait((kind, header, payload))

    async def send(self, kind: str, header: Mapping[str, Any], payload: Sequence[Buffer]) -> None:
        """Put a frame out; waits while `depth` others have not gone. After the end it is dropped."""
        while self._unsent.qsize() >= self._depth and not self.ended.is_set():
            self._room.clear()
            await self._room.wait()
        self.post(kind, header, payload)

    async def aclose(self) -> None:
        """End the stream once what was put in has gone out, or has had its time. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self._room.set()
            self._reader.cancel()
            self._unsent.put_nowait(None)
            await asyncio.wait([self._writer], timeout=LINGER_SECONDS)
        self._writer.cancel()
        self.stream.abort()
        await asyncio.gather(self._writer, self._reader, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while (message := await self._unsent.get()) is not None:
                self._room.set()
                await self.stream.send(*message)
            await self.stream.aclose()
        except (SwarmError, ValueError) as error:
            self._end(str(error))

    async def _read(self) -> None:
        try:
            while True:
                self._on_frame(checked(await self.stream.receive()))
        except (StreamClosed, StreamBroken) as error:
            self._end(str(error))
        except (SwarmError, ValueError) as error:
            log.warning("%s from %s: %s", self.stream.protocol, self.stream.remote, error_line(error))
            self._end(str(error))

    def _end(self, reason: str) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._room.set()
        self.stream.abort()
        current = asyncio.current_task()
        for task in (self._writer, self._reader):
            if task is not current:
                task.cancel()
        self._on_end(reason)


class RingLinks:
    """The links that we dialled: one for each neighbour, shared by all sessions, made when first needed."""

    def __init__(
        self,
        transport: Transport,
        *,
        on_frame: Callable[[LinkEnds, Frame], None],
        on_end: Callable[[LinkEnds, str], None],
    ) -> None:
        self._transport = transport
        self._on_frame = on_frame
        self._on_end = on_end
        self._links: dict[LinkEnds, RingLink] = {}
        self._dialling: dict[LinkEnds, asyncio.Lock] = {}

    async def to(self, ends: LinkEnds) -> RingLink:
        """The link to that stage. Raises PeerUnreachable or another TransportError."""
        lock = self._dialling.setdefault(ends, asyncio.Lock())
        async with lock:
            known = self._links.get(ends)
            if known is not None and not known.ended.is_set():
                return known
            stream = await self._transport.open(ends.peer, RING.name)
            link = RingLink(
                stream,
                on_frame=lambda frame: self._on_frame(ends, frame),
                on_end=lambda reason: self._ended(ends, link, reason),
            )
            link.post("hello", ends.to_header())
            self._links[ends] = link
            return link

    def _ended(self, ends: LinkEnds, link: RingLink, reason: str) -> None:
        if self._links.get(ends) is link:
            del self._links[ends]
            self._dialling.pop(ends, None)
        self._on_end(ends, reason)

    async def aclose(self) -> None:
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.aclose() for link in links))
