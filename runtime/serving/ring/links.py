"""Long-lived streams of the ring: their ends, and one link to each neighbour, shared by all sessions.

The frames of /fusion/ring/1: docs/protocols.md. The first is a `hello` that names the stage, or GATEWAY, at the dialler's end, and the
stage at the other; frames of several sessions may be joined (`fusion.runtime.serving.ring.batches`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.protocol import RING
from fusion.runtime.serving.requests.header_fields import whole
from fusion.runtime.serving.ring.batches import BATCHES
from fusion.swarm.authority.access import Access, chain_of
from fusion.swarm.delay_window import DelayWindow
from fusion.swarm.directory.records import JobId
from fusion.swarm.identity import friendly_name
from fusion.swarm.streams.queued_stream import QueuedStream, dial
from fusion.swarm.transport import Frame, PeerId, Transport, checked

GATEWAY = -1  # in place of a stage index: the sender is the gateway of some sessions
ACKS = "acks"  # in a hello: its dialler accepts acknowledgements of prompt bytes; in `batches`: the far end sends them
# Idle links are kept for the next session, as long as retained prefixes; dialling again takes a round trip or two. Strangers may
# choose the far end, so their number is bounded.
IDLE_SECONDS = 600.0
MOST_IDLE = 256
LOOK_SECONDS = 15.0  # between two checks for idle links


@dataclass(frozen=True)
class LinkEnds:
    """The ends of a link, from its dialler's side."""

    job: JobId
    sender: int  # a stage, or GATEWAY
    stage: int  # the stage at the far end
    peer: PeerId  # that runs it

    def to_header(self) -> dict[str, Any]:
        return {"job": self.job, "from": self.sender, "to": self.stage}

    @classmethod
    def from_hello(cls, hello: Mapping[str, Any], own_id: PeerId) -> LinkEnds:
        """The ends of an incoming stream. JobError for an invalid hello."""
        job = hello.get("job")
        if not isinstance(job, str):
            raise JobError("hello: it names a job, a sender and a stage")
        return cls(JobId(job), whole(hello, "from", -2), whole(hello, "to", -2), own_id)


GrantsOf = Callable[[JobId], tuple[bytes, ...]]


def no_grants(job: JobId) -> tuple[bytes, ...]:
    """The grants for jobs that are open to all: none."""
    return ()


def grants_of(hello: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The grants in a hello. Raises RecordError."""
    return chain_of(hello.get("grants"))


def accepts_batches(hello: Mapping[str, Any]) -> bool:
    """Whether its dialler accepts joined frames."""
    return hello.get(BATCHES) is True


def accepts_acks(hello: Mapping[str, Any]) -> bool:
    """Whether its dialler, a stage, accepts acknowledgements."""
    return hello.get(ACKS) is True


def prompt_bytes(frame: Frame) -> int:
    """Bytes of a `chunk` that acknowledgements count: payload of a prompt, except its last chunk, after which a token is sampled."""
    return 0 if frame.header.get("sample") is True else len(frame.payload)


def refusal(access: Access, peer: PeerId, ends: LinkEnds, grants: tuple[bytes, ...]) -> str | None:
    """Why the peer may not prompt the model, or run a stage of it; None where it may."""
    if ends.sender == GATEWAY:
        return access.refusal(ends.job, peer, "ask", None, grants)
    reason = access.refusal(ends.job, peer, "own", ends.sender, grants)
    return None if reason is None else access.refusal(ends.job, peer, "stand-by", ends.sender, grants)


@dataclass(frozen=True, kw_only=True)
class RingPosition:
    """The job that this peer serves a stage of, and the term of its claim: the owner's, or a replica's own."""

    job: JobId
    name: str
    serve: ServeConfig
    peer: PeerId  # this one
    term: int

    def where(self, stage: int, peer: PeerId | None = None) -> str:
        """Display name of a stage of the job, by default on this peer."""
        return f"stage {stage} of {self.name} on {friendly_name(peer or self.peer)}"


@dataclass(eq=False)
class _Dialled:
    stream: QueuedStream
    used_at: float  # when a session last needed it


def too_idle(used_at: Mapping[LinkEnds, float], now: float) -> list[LinkEnds]:
    """The idle links to close. `used_at`: when a session last needed each."""
    late_first = sorted(used_at, key=lambda ends: used_at[ends], reverse=True)
    return [
        ends
        for place, ends in enumerate(late_first)
        if place >= MOST_IDLE or now - used_at[ends] >= IDLE_SECONDS
    ]


class RingLinks:
    """The links that this peer dialled: one to each neighbour, shared by all sessions, dialled when first needed, and closed when no
    session has needed them for long."""

    def __init__(
        self,
        transport: Transport,
        *,
        on_frame: Callable[[LinkEnds, Frame], None],
        on_end: Callable[[LinkEnds, str], None],
        needed: Callable[[], Collection[LinkEnds]],
        clock: Callable[[], float],
        chain: GrantsOf = no_grants,
        acked: Callable[[], None] = lambda: None,
    ) -> None:
        """`needed`: the ends of the links that open sessions have or are about to request; `chain`: our grants in a job; `acked` is
        called when a far end has acknowledged prompt bytes."""
        self.taking = WeakSet[QueuedStream]()  # links whose far ends accept joined frames
        # Of links between stages, from the first byte on; the far ends of `_acking` acknowledge.
        self._windows = WeakKeyDictionary[QueuedStream, DelayWindow]()
        self._acking = WeakSet[QueuedStream]()
        self._acked = acked
        self._transport = transport
        self._chain = chain
        self._on_frame = on_frame
        self._on_end = on_end
        self._needed = needed
        self._clock = clock
        self._links: dict[LinkEnds, _Dialled] = {}
        self._timer: asyncio.TimerHandle | None = None  # of the next check, while there are links
        self._closing: set[asyncio.Task[None]] = set()
        # Of links that are being dialled; kept alive by those that wait for them.
        self._dialling: WeakValueDictionary[LinkEnds, asyncio.Lock] = WeakValueDictionary()

    async def to(self, ends: LinkEnds) -> QueuedStream:
        """The link to that stage. Raises PeerUnreachable or another TransportError."""
        lock = self._dialling.setdefault(ends, asyncio.Lock())
        async with lock:
            known = self._links.get(ends)
            if known is not None and not known.stream.ended.is_set():
                known.used_at = self._clock()
                return known.stream
            link = QueuedStream(
                await dial(self._transport, ends.peer, RING, self._hello(ends)),
                on_frame=lambda frame: self._received(ends, link, checked(frame)),
                on_end=lambda ended: self._ended(ends, link, ended.reason),
            )
            self._links[ends] = _Dialled(link, self._clock())
            if ends.sender != GATEWAY:
                self._windows[link] = DelayWindow()
            self._close_idle()
            return link

    def in_window(self, link: QueuedStream) -> bool:
        """Whether more of a prompt may be sent over it, although tokens would queue behind that."""
        return link not in self._acking or self._windows[link].open or link.ended.is_set()

    def round_trip_seconds(self, link: QueuedStream) -> float:
        """The shortest time to an acknowledgement over a link between stages; infinite before the first."""
        return self._windows[link].round_trip_seconds

    def count_sent(self, link: QueuedStream, size_bytes: int) -> None:
        """Count bytes of a prompt that were sent over it."""
        if (window := self._windows.get(link)) is not None:
            window.send(size_bytes, self._clock())

    def _close_idle(self) -> None:
        """Close links that have been idle for long or are too many, and schedule the next check."""
        now, needed, used_at = self._clock(), {*self._needed()}, dict[LinkEnds, float]()
        for ends, link in self._links.items():
            if ends in needed:
                link.used_at = now
            else:
                used_at[ends] = link.used_at
        for ends in too_idle(used_at, now):
            # A session that needs it from now on dials another.
            closing = asyncio.create_task(self._links.pop(ends).stream.aclose())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_SECONDS, self._close_idle) if self._links else None

    def _hello(self, ends: LinkEnds) -> dict[str, object]:
        chain = self._chain(ends.job)
        acks = {} if ends.sender == GATEWAY else {ACKS: True}
        return {**ends.to_header(), BATCHES: True, **acks, **({"grants": list(chain)} if chain else {})}

    def _received(self, ends: LinkEnds, link: QueuedStream, frame: Frame) -> None:
        if frame.kind == BATCHES:
            self.taking.add(link)
            if frame.header.get(ACKS) is True and link in self._windows:
                self._acking.add(link)
        elif frame.kind == "ack" and link in self._acking:
            self._windows[link].ack(whole(frame.header, "bytes", -1), self._clock())
            self._acked()
        else:
            self._on_frame(ends, frame)

    def _ended(self, ends: LinkEnds, link: QueuedStream, reason: str) -> None:
        known = self._links.get(ends)
        if known is not None and known.stream is link:
            del self._links[ends]
        self._on_end(ends, reason)

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.stream.aclose() for link in links), *self._closing)


class FullLinks:
    """Backpressure of links: chunks that must be sent over a full link do not run. `room` is called when one has room again;
    `most_bytes`: limit of unsent bytes over all links."""

    def __init__(self, room: Callable[[], None], most_bytes: int) -> None:
        self._room = room
        self._most_bytes = most_bytes
        # Full links, longest first.
        self._waiting: dict[QueuedStream, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Waits run in `tasks`."""
        self._tasks = tasks

    def clear(self, links: Iterable[QueuedStream]) -> bool:
        """Whether a chunk could be sent over all of these now; if not, `room` will be called."""
        full = [link for link in links if link.full]
        for link in full:
            self._wait_for_room(link)
        return not full

    def look(self, links: Iterable[QueuedStream]) -> None:
        """Frames were posted to these links. If too many bytes are unsent in all, end the links that have been full for longest."""
        self.clear(links)
        unsent = {link: link.unsent_bytes for link in self._waiting}
        for link in self._waiting:
            if sum(unsent.values()) <= self._most_bytes:
                break
            unsent[link] = 0
            link.end(f"{link.stream.remote} does not read what it is sent")

    def _wait_for_room(self, link: QueuedStream) -> None:
        assert self._tasks is not None
        if link not in self._waiting:
            self._waiting[link] = self._tasks.create_task(self._until_room(link))

    async def _until_room(self, link: QueuedStream) -> None:
        await link.room()
        del self._waiting[link]
        self._room()
