"""The frames of one turn over a link, joined into one: a frame costs about the same with one row of activations or one token as with
those of all sessions.

    hello {batches: true}      its dialler takes such frames; a stage that does too answers `batches` {}
    chunks {of}, tokens {of}   the headers of several `chunk` or `token` frames, and their payloads, concatenated
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from fusion.swarm.errors import FrameError
from fusion.swarm.streams.frames import MAX_CONTAINERS
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.transport import Buffer, Frame

BATCHES = "batches"
MAX_FRAMES = 1024  # in one
# Of payload in one frame: larger ones are better sent by themselves, as soon as possible.
MAX_BYTES = 32 << 10
BY_ITSELF = MAX_BYTES + 1
LISTS_AROUND = 3  # containers of a frame beside its headers: the frame, its header, and `of`

Header = Mapping[str, Any]


@dataclass
class _Waiting:
    headers: list[Header] = field(default_factory=list)
    payload: list[Buffer] = field(default_factory=list)
    size_bytes: int = 0
    lists: int = LISTS_AROUND  # and maps, in the header of the frame


class TurnFrames:
    """The frames of one kind of a turn; links in `taking` accept several in one. `post` sends them, in order for each link. Payloads of
    joined frames must have the size that `frames_of` computes; others are put with size BY_ITSELF."""

    def __init__(self, kind: str, taking: WeakSet[QueuedStream]) -> None:
        self._kind = kind
        self._taking = taking
        self._frames: dict[QueuedStream, list[_Waiting]] = {}

    def put(
        self, link: QueuedStream, header: Header, payload: Sequence[Buffer] = (), size_bytes: int = 0
    ) -> None:
        frames = self._frames.setdefault(link, [])
        joins = bool(frames) and link in self._taking
        lists = _lists(header)
        if (
            not joins
            or frames[-1].size_bytes + size_bytes > MAX_BYTES
            or frames[-1].lists + lists > MAX_CONTAINERS
            or len(frames[-1].headers) == MAX_FRAMES
        ):
            frames.append(_Waiting())
        last = frames[-1]
        last.lists += lists
        last.headers.append(header)
        last.payload += payload
        last.size_bytes += size_bytes

    @property
    def links(self) -> Collection[QueuedStream]:
        """The links that have frames."""
        return self._frames.keys()

    def post(self) -> None:
        for link, kind, header, payload in self._joined():
            link.post(kind, header, payload)

    def _joined(self) -> Iterator[tuple[QueuedStream, str, Header, Sequence[Buffer]]]:
        for link, frames in self._frames.items():
            for each in frames:
                if len(each.headers) == 1:
                    yield link, self._kind, each.headers[0], each.payload
                else:
                    yield link, f"{self._kind}s", {"of": each.headers}, each.payload


def _lists(header: Header) -> int:
    """How many lists and maps the header consists of: log-probabilities are a list for each token."""
    lists = [value for value in header.values() if isinstance(value, list)]
    return 1 + len(lists) + sum(isinstance(each, list) for value in lists for each in value)


def frames_of(frame: Frame, size_of: Callable[[Header], int] = lambda header: 0) -> Iterator[Frame]:
    """The frames that were joined into this one. `size_of`: payload bytes by header; raises for an invalid header. FrameError where
    the payload does not match."""
    headers = frame.header.get("of")
    if not isinstance(headers, list) or not 1 <= len(headers) <= MAX_FRAMES:
        raise FrameError(f"{frame.kind}: 1 to {MAX_FRAMES} in one frame")
    if not all(isinstance(header, dict) for header in headers):
        raise FrameError(f"{frame.kind}: a table for each")
    if len(frame.payload) > MAX_BYTES:  # a single row that waits keeps the whole payload in memory
        raise FrameError(f"{frame.kind}: at most {MAX_BYTES} bytes in one frame")
    kind, sizes = frame.kind[:-1], [size_of(header) for header in headers]
    if sum(sizes) != len(frame.payload):
        raise FrameError(f"{len(frame.payload)} bytes; {sum(sizes)} were to come")
    offset = 0
    for header, size in zip(headers, sizes, strict=True):
        yield Frame(kind, header, frame.payload[offset : offset + size])
        offset += size
