"""One stream over several, between two real p2pd daemons on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from support import instant_loop
from support.p2p_pair import Ends, two

from fusion.swarm.errors import FrameError, PeerUnreachable, StreamBroken, StreamClosed, UnknownProtocol
from fusion.swarm.streams import striping
from fusion.swarm.streams.frame_stream import FrameStream
from fusion.swarm.streams.frames import DEFAULT_LIMITS
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import Frame, Handler, Stream

pytestmark = pytest.mark.process

PROTOCOL = "/fusion/lanes-test/1"


@asynccontextmanager
async def pair(handler: Handler) -> AsyncIterator[tuple[P2PTransport, P2PTransport]]:
    """Two of its own, for a test that ends one."""
    with tempfile.TemporaryDirectory(prefix="p2p-") as place:
        async with two(Path(place), PROTOCOL, handler) as both:
            yield both


async def echo(stream: Stream) -> None:
    stream.allow(1 << 30)
    while True:
        frame = await stream.receive()
        if frame.kind == "fail":
            raise ValueError("no good")
        if frame.kind == "bye":
            return
        await stream.send(frame.kind, frame.header, (frame.payload,))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_frames_keep_their_order_both_ways(ends: Ends, count: int) -> None:
    rng = random.Random(count)
    sizes = [rng.choice((0, 10, 70_000, 400_000)) for _ in range(150)]

    async def work(stream: Stream) -> None:
        async def send() -> None:
            await asyncio.gather(
                *(stream.send("x", {"n": n}, (n.to_bytes(4, "big") * (size // 4),)) for n, size in enumerate(sizes))
            )  # fmt: skip

        sending = asyncio.create_task(send())
        for n, size in enumerate(sizes):
            frame = await stream.receive()
            assert frame.header == {"n": n} and len(frame.payload) == size // 4 * 4
            assert not size or bytes(frame.payload[:4]) == n.to_bytes(4, "big")
        await sending

    ends.over(echo, work, count)


def test_what_was_sent_before_the_end_arrives(ends: Ends) -> None:
    got: list[int] = []
    ended = asyncio.Event()

    async def take(stream: Stream) -> None:
        stream.allow(1 << 30)
        try:
            while True:
                frame = await stream.receive()
                got.append(frame.header["n"])
                await asyncio.sleep(0.01)
        except StreamClosed:
            ended.set()

    async def work(stream: Stream) -> None:
        for n in range(10):
            await stream.send("x", {"n": n}, (bytes(100_000),))
        await stream.aclose()
        with pytest.raises(StreamClosed):
            await stream.receive()
        await ended.wait()
        assert got == list(range(10))

    ends.over(take, work)


def test_the_other_end_closes_or_fails(ends: Ends) -> None:
    async def close(stream: Stream) -> None:
        await stream.send("bye")
        with pytest.raises(StreamClosed):
            await stream.receive()

    async def fail(stream: Stream) -> None:
        for n in range(5):
            await stream.send("x", {"n": n})
        await stream.send("fail")
        for n in range(5):
            assert (await stream.receive()).header == {"n": n}
        frame = await stream.receive()
        assert (frame.kind, frame.header) == ("error", {"message": "no good"})

    ends.over(echo, close)
    ends.over(echo, fail)


def test_a_stream_breaks_with_one_of_its_lanes(ends: Ends) -> None:
    waits = asyncio.Event()

    async def hold(stream: Stream) -> None:
        assert isinstance(stream, striping.StripedStream)
        stream._stripes[2].drop()
        with pytest.raises(StreamBroken):
            await stream.receive()
        waits.set()

    async def work(stream: Stream) -> None:
        with pytest.raises(StreamBroken):
            await stream.receive()
        with pytest.raises(StreamBroken):
            for _ in range(8):
                await stream.send("x")
        await waits.wait()

    ends.over(hold, work)


def test_a_send_that_is_cancelled_before_its_turn_leaves_no_gap(ends: Ends) -> None:
    go_on = asyncio.Event()
    got: list[int] = []

    async def late(stream: Stream) -> None:
        stream.allow(1 << 30)
        await go_on.wait()
        while True:
            got.append((await stream.receive()).header["n"])
            if got[-1] == 99:
                return

    async def work(stream: Stream) -> None:
        big = bytes(16_000_000)  # more than the lanes read before they are asked, p2pd and the kernel take
        first = [asyncio.create_task(stream.send("x", {"n": n}, (big,))) for n in range(8)]
        await asyncio.sleep(0.5)
        waiting = [asyncio.create_task(stream.send("x", {"n": n})) for n in range(8, 12)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in (*first, *waiting))
        for task in waiting[1:]:
            task.cancel()
        last = asyncio.create_task(stream.send("x", {"n": 99}))
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(StreamClosed):
            await stream.receive()
        await asyncio.gather(*first, waiting[0], last)
        assert got == [*range(9), 99]

    ends.over(late, work)


@pytest.mark.parametrize("size", [64 * 1024 + 1, 300_001, 1 << 20, 3_000_003])
def test_a_large_frame_goes_in_pieces_over_all_lanes(ends: Ends, size: int) -> None:
    payload = random.Random(size).randbytes(size)

    async def work(stream: Stream) -> None:
        assert isinstance(stream, striping.StripedStream)
        # In parts that are no pieces, and without a copy.
        await stream.send(
            "x", {"n": 1}, (payload[:7], memoryview(payload)[7 : size // 2], payload[size // 2 :])
        )
        assert stream._sent == max(
            -(-size // striping.MOST_PIECE_BYTES), min(-(-size // striping.LEAST_PIECE_BYTES), 4)
        )
        frame = await stream.receive()
        assert (frame.kind, frame.header, bytes(frame.payload)) == ("x", {"n": 1}, payload)

    ends.over(echo, work)


def test_a_receiver_that_is_cancelled_between_pieces_loses_none(ends: Ends) -> None:
    payload = random.Random(1).randbytes(4_000_000)

    async def work(stream: Stream) -> None:
        sending = asyncio.create_task(stream.send("x", {}, (payload,)))
        frame = None
        while frame is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.002):
                    frame = await stream.receive()
        assert bytes(frame.payload) == payload
        await sending

    ends.over(echo, work)


def test_a_send_that_is_cancelled_between_pieces_breaks_the_stream(ends: Ends) -> None:
    async def hold(stream: Stream) -> None:
        stream.allow(
            64_000_000
        )  # or it would break at the first piece, which may come before the cancellation
        with pytest.raises((StreamBroken, StreamClosed)):
            while True:
                await stream.receive()

    async def work(stream: Stream) -> None:
        sending = asyncio.create_task(stream.send("x", {}, (bytes(64_000_000),)))
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(StreamClosed):
            await stream.send("x")

    ends.over(hold, work)


def test_a_send_that_is_cancelled_at_once_leaves_no_other_waiting(ends: Ends) -> None:
    async def work(stream: Stream) -> None:
        first = asyncio.create_task(stream.send("x", {}, (bytes(400_000),)))
        other = asyncio.create_task(stream.send("x"))
        await asyncio.sleep(0)  # all lanes are the first one's, and nothing has left
        first.cancel()
        async with asyncio.timeout(5):
            with pytest.raises(asyncio.CancelledError):
                await first
            with pytest.raises(StreamClosed):
                await other

    ends.over(echo, work)


Hostile = Sequence[tuple[str, dict[str, object], int]]


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ([("x", {"": 1 << 40}, 10)], "at most 1000000 are allowed"),
        ([("x", {"": "many"}, 10)], "'many'"),
        ([("x", {"": -1}, 10)], "-1"),
        ([("x", {"": True}, 0)], "True"),
        ([("x", {"": 10}, 10)], "first piece of a payload of 10 bytes"),
        ([("x", {"": 100}, 10), ("x", {}, 10)], "'x' frame among the pieces"),
        ([("x", {"": 100}, 10), ("piece", {}, 91)], "91 bytes that does not fit"),
        ([("x", {"": 100}, 10), ("piece", {}, 0)], "0 bytes that does not fit"),
    ],
)
def test_pieces_that_make_no_frame_are_refused(ends: Ends, sent: Hostile, error: str) -> None:
    seen = asyncio.Event()

    async def strict(stream: Stream) -> None:
        stream.allow(1_000_000)
        with pytest.raises(FrameError, match=error):
            await stream.receive()
        seen.set()

    async def work(stream: Stream) -> None:
        assert isinstance(stream, striping.StripedStream)
        for lane, (kind, header, size) in zip(stream._stripes, sent, strict=False):
            await lane.send(kind, header, (bytes(size),))
        await seen.wait()

    ends.over(strict, work)


def test_pieces_make_no_frame_beyond_the_limits_whatever_is_allowed(ends: Ends) -> None:
    seen = asyncio.Event()

    async def generous(stream: Stream) -> None:
        stream.allow(1 << 50)
        with pytest.raises(FrameError, match=f"at most {DEFAULT_LIMITS.payload_bytes} are allowed"):
            await stream.receive()
        seen.set()

    async def work(stream: Stream) -> None:
        assert isinstance(stream, striping.StripedStream)
        await stream._stripes[0].send("x", {"": DEFAULT_LIMITS.payload_bytes + 1}, (bytes(10),))
        await seen.wait()

    ends.over(generous, work)


def test_a_frame_that_is_too_large_to_be_sent_leaves_no_gap(ends: Ends) -> None:
    async def work(stream: Stream) -> None:
        with pytest.raises((FrameError, ValueError)):
            await stream.send("x", {"object": object()})
        await stream.send("x", {"n": 1})
        assert (await stream.receive()).header == {"n": 1}

    ends.over(echo, work)


def test_a_payload_beyond_what_is_allowed_is_refused_on_every_lane(ends: Ends) -> None:
    async def strict(stream: Stream) -> None:
        for _ in range(3):
            await stream.receive()
        with pytest.raises(FrameError, match="at most 65536"):
            await stream.receive()
        raise ValueError("too large")

    async def work(stream: Stream) -> None:
        for _ in range(3):
            await stream.send("x", {}, (bytes(1000),))
        await stream.send("x", {}, (bytes(65537),))
        with pytest.raises((StreamBroken, StreamClosed)):
            assert (await stream.receive()).kind == "error"  # where the handler was faster
            await stream.receive()

    ends.over(strict, work)


@pytest.mark.parametrize(
    "first",
    [
        ("x", {}),
        ("lane", {"key": "k", "lane": 3, "of": 3}),
        ("lane", {"key": "k", "lane": -1, "of": 3}),
        ("lane", {"key": "k", "lane": 0, "of": 1 << 40}),
        ("lane", {"key": 1, "lane": 0, "of": 2}),
        ("lane", {"key": "alone", "lane": 0, "of": 2}),
    ],
)
def test_lanes_that_make_no_stream_are_refused(
    ends: Ends, first: tuple[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(striping, "GATHER_SECONDS", 0.3)

    async def main(protocol: str) -> None:
        lane = await ends.one._open(ends.other.peer_id, protocol + striping.SUFFIX)
        await lane.send(*first)
        frame = await lane.receive()
        assert frame.kind == "error" and "lane" in frame.header["message"]
        good = await ends.one.open(ends.other.peer_id, protocol, stripes=2)
        await good.send("x", {"n": 1}, (os.urandom(10),))
        assert (await good.receive()).header == {"n": 1}

    ends.with_handler(echo, main)


def test_a_lane_that_comes_as_the_first_one_gives_up_waits_for_no_stream() -> None:
    class Lane(FrameStream):
        def __init__(self, number: int, comes: asyncio.Event) -> None:
            super().__init__(DEFAULT_LIMITS, TrafficCounter(), lambda *_: None)
            self.number, self.comes = number, comes

        async def receive(self) -> Frame:
            await self.comes.wait()
            return Frame("lane", {"key": "k", "lane": self.number, "of": 2})

    async def scenario() -> None:
        first, last = asyncio.Event(), asyncio.Event()
        first.set()
        asyncio.get_running_loop().call_later(striping.GATHER_SECONDS, last.set)
        gathering = striping.Gathering(echo)
        attending = [asyncio.create_task(gathering.handle_lane(Lane(0, first)))]
        await asyncio.sleep(striping.GATHER_SECONDS / 2)
        attending.append(asyncio.create_task(gathering.handle_lane(Lane(1, last))))
        given_up, other = await asyncio.gather(*attending, return_exceptions=True)
        assert isinstance(given_up, ValueError) and other is None
        assert not gathering._groups

    instant_loop.run(scenario())


def test_one_lane_twice_and_other_counts_do_not_mix(ends: Ends) -> None:
    async def main(protocol: str) -> None:
        one, other, lanes = ends.one, ends.other, protocol + striping.SUFFIX
        first = await one._open(other.peer_id, lanes)
        await first.send("lane", {"key": "k", "lane": 0, "of": 2})
        gathering = other._handlers._handlers[lanes].__self__  # type: ignore[attr-defined]
        while not gathering._groups:
            await asyncio.sleep(0.01)
        for number, count in ((0, 2), (1, 3)):
            again = await one._open(other.peer_id, lanes)
            await again.send("lane", {"key": "k", "lane": number, "of": count})
            assert "does not fit" in (await again.receive()).header["message"]
        second = await one._open(other.peer_id, lanes)
        await second.send("lane", {"key": "k", "lane": 1, "of": 2})
        stream = striping.StripedStream([first, second])
        await stream.send("x", {"n": 1})
        assert (await stream.receive()).header == {"n": 1}

    ends.with_handler(echo, main)


def test_a_peer_that_does_not_speak_it_or_is_gone() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), pair(echo) as (one, other):
            with pytest.raises(UnknownProtocol):
                await one.open(other.peer_id, "/fusion/no-such/1", stripes=3)
            here = await other.open(other.peer_id, PROTOCOL, stripes=3)
            await here.send("x", {"n": 1})
            assert (await here.receive()).header == {"n": 1}
            await other.aclose()
            with pytest.raises(PeerUnreachable):
                await one.open(other.peer_id, PROTOCOL, stripes=3)
            assert not [stream for stream in one._streams if not stream.lost.done()]

    uvloop.run(main())
