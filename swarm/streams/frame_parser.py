"""Cuts received bytes into frames. No I/O: a stream asks where to put bytes and reports how many it put there.

Small frames are cut from one buffer, so that one read may bring many; a large payload is read straight into the memory it will be
used from. A header stays encoded until its frame is taken: decoded it may need twenty times as much memory. Nothing is
allocated for a length over the caps, and the pages of a payload's memory are only used as its bytes arrive (numpy.empty
does not touch them), so a peer that announces 512 MiB and sends nothing costs nothing.
"""

from __future__ import annotations

from collections import deque

from fusion.swarm.errors import FrameError
from fusion.swarm.streams.frames import DEFAULT_LIMITS, HEAD_BYTES, FrameLimits, decode_head, decode_header
from fusion.swarm.transport import UNASKED_BYTES, Buffer, Frame

SCRATCH_BYTES = 64 * 1024
_MAX_PREAMBLE_BYTES = 64 * 1024 - 16  # p2pd's own messages are a few hundred bytes


def delimited(message: bytes) -> bytes:
    """A message in p2pd's framing: its length as a varint, then its bytes."""
    length, head = len(message), bytearray()
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + message


def delimited_length(data: Buffer, start: int = 0, end: int | None = None) -> tuple[int, int] | None:
    """The length of the message in p2pd's framing at `start`, and the offset of its bytes; None where the length is not complete.
    Raises FrameError for one of 2^28 bytes or more."""
    length = shift = 0
    for at in range(start, len(data) if end is None else end):
        byte = data[at]
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return length, at + 1
        if shift >= 28:
            raise FrameError("p2pd sent a message that is too long")
    return None


class FrameParser:
    """`room()` is where the next bytes go, `advance(n)` takes n of them in; `ready` frames wait to be taken.

    With `preamble` the first thing on the stream is one message of p2pd's (a varint length and that many bytes),
    which becomes `self.preamble` (see `delimited`).
    """

    def __init__(self, limits: FrameLimits = DEFAULT_LIMITS, *, preamble: bool = False) -> None:
        # Headers and payloads of frames not yet taken
        self._ready: deque[tuple[Buffer, memoryview]] = deque()
        self.ready_bytes = 0  # of these, as on the wire
        self.has_received = False  # whether a frame has arrived
        self.ended = False  # the end mark was received
        self.preamble: bytes | None = None
        self.allowed = limits.payload_bytes
        self.allowed_header = limits.header_bytes
        # The `announced` bytes of a frame over `allowed` or `allowed_header`. It is not read, and nothing behind it parsed.
        self.refused = 0
        self._limits = limits
        self._wants_preamble = preamble
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._start = 0  # of the unparsed bytes in the scratch buffer
        self._end = 0
        self._lengths: tuple[int, int] | None = None  # of the frame being read: header, payload
        self._header: Buffer | None = None  # of that frame
        self._piece: memoryview | None = None  # a header or payload that is read straight into its own memory
        self._filled = 0

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._piece is not None:
            return self._piece[self._filled :]
        return self._scratch[self._end :]

    def advance(self, count: int) -> None:
        """Take in `count` bytes that were put into `room()`. Raises FrameError for bytes that are no frame; the parser is unusable
        then."""
        if self._piece is None:
            self._end += count
        else:
            self._filled += count
            if self._filled < len(self._piece):
                return
            piece, self._piece = self._piece, None
            if self._header is None:
                self._header = piece
            else:
                self._emit(piece)
        while self._parse_one():
            pass
        if self._start:
            rest = self._end - self._start
            if rest:
                self._scratch[:rest] = bytes(self._scratch[self._start : self._end])
            self._start, self._end = 0, rest

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def filling(self) -> bool:
        """Whether a payload is being received that needs more reads."""
        return self._piece is not None and self._header is not None

    @property
    def announced(self) -> int:
        """Bytes of the payload of the next frame, also of a refused one; 0 where there is none. Where its header is refused, at least
        UNASKED_BYTES more than the header has."""
        return len(self._ready[0][1]) if self._ready else self.refused

    @property
    def refusal(self) -> str:
        """Why the next frame is refused."""
        header_bytes, payload_bytes = self._lengths or (0, 0)
        if header_bytes > self.allowed_header:
            return f"a header of {header_bytes} bytes; at most {self.allowed_header} are allowed now"
        return f"a payload of {payload_bytes} bytes; at most {self.allowed} are allowed now"

    def allow(self, payload_bytes: int) -> None:
        """Change the cap on payloads, never above the limits, and parse a frame that waited for it. Raises FrameError."""
        self.allowed = min(payload_bytes, self._limits.payload_bytes)
        self._parse_refused()

    def allow_headers(self, header_bytes: int) -> None:
        """As `allow`, for headers."""
        self.allowed_header = min(header_bytes, self._limits.header_bytes)
        self._parse_refused()

    def _parse_refused(self) -> None:
        if self.refused:
            self.refused = 0
            self.advance(0)

    def take(self) -> tuple[Frame, int]:
        """The oldest frame and its size on the wire in bytes; there must be one. Raises FrameError for an invalid header."""
        header, payload = self._ready.popleft()
        size = HEAD_BYTES + len(header) + len(payload)
        self.ready_bytes -= size
        return Frame(*decode_header(header), payload), size

    def forget(self) -> None:
        """Drop the frames that wait to be taken."""
        self._ready.clear()
        self.ready_bytes = 0

    def _parse_one(self) -> bool:
        """Parse one element (preamble, head or frame) of the scratch buffer; whether there may be another."""
        if self.ended:
            self._start = self._end  # bytes after the end mark are ignored
            return False
        if self._wants_preamble:
            return self._parse_preamble()
        if self._lengths is None:
            if self._end - self._start < HEAD_BYTES:
                return False
            self._lengths = decode_head(self._scratch, self._limits, self._start)
            self._start += HEAD_BYTES
            if self._lengths == (0, 0):
                self.ended = True
                return True
        header_bytes, payload_bytes = self._lengths
        if header_bytes > self.allowed_header:
            self.refused = max(payload_bytes, UNASKED_BYTES + header_bytes)
            return False
        if payload_bytes > self.allowed:
            self.refused = payload_bytes
            return False
        if self._header is None:
            if self._end - self._start < header_bytes:
                if header_bytes + HEAD_BYTES > SCRATCH_BYTES:
                    self._read_apart(memoryview(bytearray(header_bytes)))
                return False
            self._header = bytes(self._scratch[self._start : self._start + header_bytes])
            self._start += header_bytes
        if self._end - self._start < payload_bytes:
            self._read_apart(_empty(payload_bytes))
            return False
        payload = memoryview(bytearray(self._scratch[self._start : self._start + payload_bytes]))
        self._start += payload_bytes
        self._emit(payload)
        return True

    def _read_apart(self, piece: memoryview) -> None:
        """Read the rest of a header or payload straight into `piece`, behind its bytes that were received already."""
        self._filled = self._end - self._start
        piece[: self._filled] = self._scratch[self._start : self._end]
        self._start = self._end = 0
        self._piece = piece

    def _emit(self, payload: memoryview) -> None:
        assert self._header is not None and self._lengths is not None
        self._ready.append((self._header, payload))
        self.ready_bytes += HEAD_BYTES + sum(self._lengths)
        self.has_received = True
        self._header = self._lengths = None

    def _parse_preamble(self) -> bool:
        found = delimited_length(self._scratch, self._start, self._end)
        if found is None:
            return False
        length, start = found
        if length > _MAX_PREAMBLE_BYTES:
            raise FrameError("p2pd sent a message that is too long")
        if self._end < start + length:
            return False
        self.preamble = bytes(self._scratch[start : start + length])
        self._start = start + length
        self._wants_preamble = False
        return True


def _empty(size: int) -> memoryview:
    """Uninitialised memory."""
    try:
        import numpy  # slow to import, and not needed by a command that receives only small frames
    except ImportError:  # a thin client, which receives few large payloads
        return memoryview(bytearray(size))
    return numpy.empty(size, numpy.uint8).data
