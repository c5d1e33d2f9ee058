"""Short probes between two peers, and how many a peer accepts from others.

/fusion/probe/1   one stream, opened by the measuring peer
    ping {}                                    -> pong {coordinate: [ms, ..., height], error}
    want {bytes, pressed}                      -> go {}, or busy {}: another train is under way, or traffic is and
                                                  it is not pressed
    train {} + as many bytes as were granted   -> rate {bytes_per_second}, by their spacing; 0: too short to tell
    report {bytes, seconds, bytes_per_second, sure, sharers, together}: how the receiver's payloads arrive at the sender; no answer

Everything is charged to an allowance per peer and one for all peers together: a peer that exceeds it gets an error in one line,
and the stream ends.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cachetools import FIFOCache, TTLCache

from fusion.swarm.coordinates import Coordinate
from fusion.swarm.errors import FrameError
from fusion.swarm.links.packet_trains import MOST_BYTES, Train, train
from fusion.swarm.protocol import PROBE
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.link_estimate import Sample
from fusion.swarm.streams.receive_log import ReceiveLog
from fusion.swarm.transport import UNASKED_BYTES, PeerId, Stream, Transport, checked

STREAMS_PER_PEER = 2
MAX_PEERS = 1024  # whose allowances are remembered
GRANT_SECONDS = 10.0  # for a granted train to arrive
FIRST_BYTES_SECONDS = 1.0  # for its first bytes, where another waits
UNUSED_SECONDS = 60.0  # for which a peer that did not use its grant, and its public network, get no other
BUSY_SECONDS = 0.3  # after another peer's payload, during which we count as busy
_MESSAGE_BYTES = 512  # charged for a frame without a payload
_FRAME_BYTES = 80  # the approximate size of one
_MAX_RATE = 1e12


class Allowance:
    """`burst` at once, `per_second` in the long run."""

    def __init__(self, burst: float, per_second: float, clock: Callable[[], float]) -> None:
        self._burst, self._per_second, self._clock = burst, per_second, clock
        self._left, self._at = burst, clock()

    def earn(self, per_second: float) -> None:
        """Change the rate."""
        self.take(0)
        self._per_second = per_second

    def clear(self) -> None:
        """Empty it."""
        self._left, self._at = 0.0, self._clock()

    def take(self, amount: float) -> bool:
        """Take so much if it is left; whether it was."""
        if not self.has(amount):
            return False
        self._left -= amount
        return True

    def has(self, amount: float) -> bool:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        return amount <= self._left


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """How our payloads arrive at a peer."""

    size: int
    seconds: float  # for which payloads were under way, of about one second
    bytes_per_second: float
    sure: bool  # as in `link_estimate.Sample`
    sharers: int  # peers whose payloads arrived there at that time, including us
    together: float  # bytes per second of all of them

    @classmethod
    def of(cls, sample: Sample, sharers: int, together: float) -> ProbeReport:
        return cls(
            size=sample.size,
            seconds=sample.busy_seconds,
            bytes_per_second=sample.bytes_per_second,
            sure=sample.sure,
            sharers=sharers,
            together=together,
        )

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> ProbeReport:
        """Raises FrameError for anything that is not a report."""
        size, sharers = header.get("bytes"), header.get("sharers")
        if type(size) is not int or type(sharers) is not int or not (size >= 0 and 1 <= sharers <= MAX_PEERS):
            raise FrameError("report: bytes and sharers are whole numbers")
        return cls(
            size=min(size, 1 << 40),
            seconds=min(_number(header, "seconds"), 2.0),
            bytes_per_second=_number(header, "bytes_per_second"),
            sure=header.get("sure") is True,
            sharers=sharers,
            together=_number(header, "together"),
        )

    def to_header(self) -> dict[str, Any]:
        return {
            "bytes": self.size,
            "seconds": self.seconds,
            "bytes_per_second": self.bytes_per_second,
            "sure": self.sure,
            "sharers": self.sharers,
            "together": self.together,
        }


@dataclass(frozen=True, kw_only=True)
class ProbeLimits:
    """How much others may use of us, in bytes."""

    peer_burst: float = 24e6
    peer_per_second: float = 32e3
    all_burst: float = 96e6
    all_per_second: float = 256e3


class ProbeHost:
    """The answering side. `here`: our coordinate, for pongs; `on_report` is called with a peer's report on our payloads, `on_train`
    with the sample of a received train."""

    def __init__(
        self,
        receive_log: ReceiveLog,
        here: Callable[[], Coordinate],
        on_report: Callable[[PeerId, ProbeReport], None],
        on_train: Callable[[PeerId, Sample], None],
        limits: ProbeLimits = ProbeLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receive_log = receive_log
        self._here = here
        self._on_report = on_report
        self._on_train = on_train
        self._limits = limits
        self._clock = clock
        self._all = Allowance(limits.all_burst, limits.all_per_second, clock)
        self._each: FIFOCache[PeerId, Allowance] = FIFOCache(MAX_PEERS)
        self._open: Counter[PeerId] = Counter()
        self._testing: tuple[Stream, float] | None = None  # the stream with the grant, and since when
        self._unused: TTLCache[str, None] = TTLCache(MAX_PEERS, UNUSED_SECONDS, timer=clock)

    def testing(self, peer: PeerId) -> bool:
        """Whether bytes from `peer` are a train's now."""
        return self._testing is not None and self._testing[0].remote == peer

    async def serve_stream(self, stream: Stream) -> None:
        """Answer one peer's stream until it ends. Raises FrameError, in one line, for other frames or too many."""
        if self._open[stream.remote] >= STREAMS_PER_PEER:
            raise FrameError(f"probes: at most {STREAMS_PER_PEER} streams for each peer")
        self._open[stream.remote] += 1
        granted, began = 0, 0.0
        try:
            while True:
                frame = await stream.receive()
                self._charge(stream.remote, _MESSAGE_BYTES)
                if frame.payload and (frame.kind != "train" or len(frame.payload) != granted):
                    raise FrameError(
                        f"probes: a {frame.kind[:20]} with {len(frame.payload)} bytes was not granted"
                    )
                match frame.kind:
                    case "ping":
                        here = self._here()
                        await stream.send("pong", {"coordinate": list(here.parts), "error": here.error})
                    case "want":
                        granted = self._grant(stream, frame.header)
                        # Large payloads are read only with a grant: there may be thousands of streams.
                        stream.allow(max(granted, UNASKED_BYTES))
                        began = self._clock()
                        await stream.send("go" if granted else "busy")
                    case "train" if granted:
                        granted = 0
                        await stream.send("rate", {"bytes_per_second": self._timed(stream, began)})
                    case "report":
                        self._on_report(stream.remote, ProbeReport.from_header(frame.header))
                    case _:
                        raise FrameError(f"probes are ping, want, train and report, not {frame.kind!r:.40}")
        finally:
            self._end_grant(stream, used=False)
            self._open[stream.remote] -= 1
            if not self._open[stream.remote]:
                del self._open[stream.remote]

    def _timed(self, stream: Stream, began: float) -> float:
        """Bytes per second of a complete train, granted at `began`; 0 where it was too short."""
        stream.allow(UNASKED_BYTES)
        self._end_grant(stream, used=True)
        sample = self._receive_log.sample(stream.remote, began, None)
        self._receive_log.forget(stream.remote)
        if sample is None:
            return 0.0
        self._on_train(stream.remote, sample)
        return sample.bytes_per_second

    def _grant(self, stream: Stream, header: Mapping[str, Any]) -> int:
        """How many bytes the peer may send now; 0: busy."""
        wanted = header.get("bytes")
        if type(wanted) is not int or not 0 < wanted <= MOST_BYTES:
            raise FrameError(f"want: 1 to {MOST_BYTES} bytes")
        now = self._clock()
        if self._testing is not None:
            holder, since = self._testing
            if holder is not stream and not self._overdue(holder, since, now):
                return 0
            self._end_grant(holder, used=False)
        if any(each in self._unused for each in _names(stream)):
            self._charge(stream.remote, wanted)
            return 0
        others = [peer for peer in self._receive_log.peers(now - BUSY_SECONDS) if peer != stream.remote]
        if others and header.get("pressed") is not True:
            return 0
        if not self._all.has(wanted):
            return 0
        self._charge(stream.remote, wanted)
        self._all.take(wanted)
        self._testing = (stream, now)
        return wanted

    def _overdue(self, holder: Stream, since: float, now: float) -> bool:
        """Whether a grant made at `since` has expired."""
        begun = holder.remote in self._receive_log.peers(since)
        return now - since >= (GRANT_SECONDS if begun else FIRST_BYTES_SECONDS)

    def _end_grant(self, stream: Stream, *, used: bool) -> None:
        """End the stream's grant, if it has one."""
        if self._testing is None or self._testing[0] is not stream:
            return
        self._testing = None
        if not used:
            self._unused.update(dict.fromkeys(_names(stream)))

    def _charge(self, peer: PeerId, amount: int) -> None:
        allowance = self._each.get(peer)
        if allowance is None:
            allowance = self._each[peer] = Allowance(
                self._limits.peer_burst, self._limits.peer_per_second, self._clock
            )
        if not allowance.take(amount):
            raise FrameError("probes: too many or too large for one peer; ask less")


def _names(stream: Stream) -> tuple[str, ...]:
    """The remote peer, and its public network where that is known."""
    subnet = stream.subnet if isinstance(stream, FrameStream) else None
    return (stream.remote,) if subnet is None else (stream.remote, subnet)


class ProbeLine:
    """The measuring side: one stream to one peer, reopened when it breaks."""

    def __init__(self, transport: Transport, peer: PeerId, clock: Callable[[], float]) -> None:
        self.peer = peer
        self.sent_bytes = 0  # approximate
        self._transport = transport
        self._clock = clock
        self._stream: Stream | None = None
        self._turn = asyncio.Lock()

    @property
    def busy(self) -> bool:
        return self._turn.locked()

    async def ping(self, timeout_seconds: float) -> tuple[float, Coordinate]:
        """The round trip in seconds, and the peer's coordinate. Raises SwarmError, TimeoutError."""
        async with self._turn, asyncio.timeout(timeout_seconds):
            stream = await self._opened()
            began = self._clock()
            await self._send(stream, "ping")
            frame = await self._answer(stream, "pong")
            took = max(self._clock() - began, 1e-6)
            coordinate, error = frame.get("coordinate"), frame.get("error")
            if not isinstance(coordinate, list) or not isinstance(error, (int, float)):
                raise FrameError("pong: a coordinate and an error")
            try:
                return took, Coordinate.from_parts(coordinate, error)
            except ValueError as wrong:
                raise FrameError(f"pong: {wrong}") from None

    async def train(
        self, size: int, rtt_seconds: float, timeout_seconds: float, *, pressed: bool = False
    ) -> Train | None:
        """Send `size` bytes at once over a link with an idle round trip of `rtt_seconds`; returns the evaluated train, None where the peer
        is busy: with another's train or traffic, if `pressed` only with a train. Raises SwarmError, TimeoutError."""
        payload = os.urandom(size)
        async with self._turn, asyncio.timeout(timeout_seconds):
            stream = await self._opened()
            wanted_at = self._clock()
            await self._send(stream, "want", {"bytes": size, "pressed": pressed})
            frame = checked(await stream.receive())
            if frame.kind == "busy":
                return None
            if frame.kind != "go":
                raise FrameError(f"want: go or busy, not {frame.kind!r:.40}")
            began = self._clock()
            await self._send(stream, "train", {}, payload)
            spacing = _number(await self._answer(stream, "rate"), "bytes_per_second")
            return train(size, self._clock() - began, rtt_seconds, began - wanted_at, spacing)

    async def report(self, report: ProbeReport, timeout_seconds: float) -> None:
        """Report to the peer how its payloads arrive here. Raises SwarmError, TimeoutError."""
        async with asyncio.timeout(timeout_seconds):
            if self._stream is None:
                async with self._turn:
                    await self._opened()
            if self._stream is not None:
                await self._send(self._stream, "report", report.to_header())

    def drop(self) -> None:
        """Abort the stream; the next request opens another."""
        if self._stream is not None:
            self._stream.abort()
            self._stream = None

    async def _opened(self) -> Stream:
        if self._stream is None:
            stream = await self._transport.open(self.peer, PROBE.name)
            try:
                # The first exchange on a stream also settles its protocol, which takes a round trip of its own.
                await self._send(stream, "ping")
                checked(await stream.receive())
            except BaseException:
                stream.abort()
                raise
            self._stream = stream
        return self._stream

    async def _send(
        self, stream: Stream, kind: str, header: Mapping[str, Any] | None = None, payload: bytes = b""
    ) -> None:
        self.sent_bytes += _FRAME_BYTES + len(payload)  # before the send, so that it never counts as traffic
        await stream.send(kind, header, [payload])

    @staticmethod
    async def _answer(stream: Stream, kind: str) -> Mapping[str, Any]:
        frame = checked(await stream.receive())
        if frame.kind != kind:
            raise FrameError(f"probes: {kind}, not {frame.kind!r:.40}")
        return frame.header


def _number(header: Mapping[str, Any], name: str) -> float:
    match header.get(name):
        case bool():
            pass
        case (int() | float()) as value if math.isfinite(value) and 0 <= value <= _MAX_RATE:
            return float(value)
    raise FrameError(f"{name}: a number that is not negative")
