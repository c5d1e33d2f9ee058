"""Frame streams on the two ends of a real socket, under both event loops."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest
import uvloop

from fusion.swarm.errors import FrameError, StreamBroken, StreamClosed
from fusion.swarm.streams.frame_parser import SCRATCH_BYTES
from fusion.swarm.streams.frame_stream import UNREAD_BYTES, FrameStream
from fusion.swarm.streams.frames import DEFAULT_LIMITS, FrameLimits
from fusion.swarm.streams.queued_stream import QueuedStream
from fusion.swarm.streams.traffic import TrafficCounter
from fusion.swarm.transport import UNASKED_BYTES, PeerId

SMALL = FrameLimits(header_bytes=200_000, payload_bytes=300_000)


async def pair(
    limits: FrameLimits = DEFAULT_LIMITS, *, opened_to_us: bool = False
) -> tuple[FrameStream, FrameStream, socket.socket]:
    """Two streams on the ends of one socket, past their preambles, and the first one's socket. `opened_to_us`: the second one
    is that of a stranger."""
    loop = asyncio.get_running_loop()
    sockets = socket.socketpair()
    streams = []
    for number, end in enumerate(sockets):
        stranger = opened_to_us and number == 1
        end.setblocking(False)
        opened = loop.create_future()
        _, stream = await loop.create_connection(
            lambda opened=opened, stranger=stranger: FrameStream(  # type: ignore[misc]
                limits,
                TrafficCounter(),
                lambda _, data: opened.set_result(data),
                PeerId("" if stranger else "them"),
                "/fusion/test/1",
                UNASKED_BYTES if stranger else None,
            ),
            sock=end,
        )
        streams.append(stream)
    for stream in streams:
        await stream.write_message(b"\x00")
    one, two = streams
    return one, two, sockets[0]


@pytest.fixture(params=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> Any:
    return uvloop.run if request.param == "uvloop" else asyncio.run


def test_frames_cross_in_both_directions(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        big = os.urandom(3_000_000)

        async def back() -> None:
            for _ in range(20):
                frame = await two.receive()
                await two.send(frame.kind, frame.header, (frame.payload,))

        async with asyncio.TaskGroup() as group:
            group.create_task(back())
            for number in range(20):
                body = big if number % 5 == 0 else b"small"
                await one.send("echo", {"number": number}, (body, b"!"))
                frame = await one.receive()
                assert frame.header == {"number": number} and frame.payload == body + b"!"
        one.abort()
        two.abort()

    runner(main())


def test_a_small_frame_goes_at_once_where_nothing_has_to_be_waited_for(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        assert one.send_now("now", {"number": 1}, (b"body",))
        frame = await two.receive()
        assert (frame.kind, frame.header, bytes(frame.payload)) == ("now", {"number": 1}, b"body")
        assert not one.send_now("large", {}, (bytes(70_000),)), "it would be copied"
        with pytest.raises(ValueError, match="header"):
            one.send_now("odd", {"what": object()}, ())
        async with one.turn:
            assert not one.send_now("later", {}, ()), "another frame is on its way"
        sending = asyncio.create_task(one.send("full", {}, (bytes(8 << 20),)))
        await asyncio.sleep(0)
        assert not one.send_now("behind", {}, ())
        assert (await two.receive()).kind == "full"
        await sending
        assert one.send_now("last", {}, ())
        assert (await two.receive()).kind == "last"
        one.abort()
        assert not one.send_now("gone", {}, ())
        two.abort()

    runner(main())


def test_queued_frames_keep_their_order_whether_they_wait_or_not(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        link = QueuedStream(one, on_frame=lambda frame: None)
        sizes = [10, 100_000, 10, 10, 3 << 20, 10, 10]
        for number, size in enumerate(sizes):
            link.post("each", {"number": number}, (bytes(size),))
        for number, size in enumerate(sizes):
            frame = await two.receive()
            assert (frame.header["number"], len(frame.payload)) == (number, size)
        assert link.sent_bytes == sum(sizes)
        link.post("odd", {"what": object()})
        ended = await link.wait()
        assert "header" in ended.reason, "what cannot be sent ends the stream, as before"
        two.abort()
        await link.aclose()

    runner(main())


def test_frames_of_several_tasks_never_interleave(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        seen = []

        async def sender(letter: str) -> None:
            for number in range(10):
                await one.send(
                    letter, {"number": number}, (letter.encode() * (200_000 if number % 2 else 10),)
                )

        async def receiver() -> None:
            for _ in range(40):
                frame = await two.receive()
                assert set(bytes(frame.payload)) == {ord(frame.kind)}
                seen.append((frame.kind, frame.header["number"]))

        async with asyncio.TaskGroup() as group:
            group.create_task(receiver())
            for letter in "abcd":
                group.create_task(sender(letter))
        for letter in "abcd":
            assert [number for kind, number in seen if kind == letter] == list(range(10))
        one.abort()
        two.abort()

    runner(main())


def test_a_clean_end_comes_after_everything_sent(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        for _ in range(3):
            await one.send("k", {}, (bytes(1000),))
        await one.aclose()
        await one.aclose()
        with pytest.raises(StreamClosed):
            await one.send("k")
        with pytest.raises(StreamClosed):
            await one.receive()
        for _ in range(3):
            assert len((await two.receive()).payload) == 1000
        for _ in range(2):
            with pytest.raises(StreamClosed, match="them closed"):
                await two.receive()
        with pytest.raises(StreamClosed):
            await two.send("k")
        two.abort()

    runner(main())


def test_an_end_without_a_mark_is_a_broken_stream(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        waiting = asyncio.create_task(two.receive())
        await asyncio.sleep(0)
        one.abort()
        one.abort()
        with pytest.raises(StreamBroken):
            await waiting
        with pytest.raises(StreamBroken):
            await two.send("k")
        two.abort()

    runner(main())


def test_bytes_that_are_no_frame_close_the_stream(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair(SMALL)
        await one.send("good")
        await one.write_message((7).to_bytes(4, "big") + b"\xff" * 8)
        assert (await two.receive()).kind == "good"
        with pytest.raises(FrameError, match="them on /fusion/test/1"):
            await two.receive()
        with pytest.raises(StreamBroken):
            await one.receive()

    runner(main())


def test_a_sender_waits_for_a_reader_that_does_not_read(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        sent = 0

        async def flood() -> None:
            nonlocal sent
            while True:
                await one.send("k", {}, (bytes(50_000),))
                sent += 1

        flooding = asyncio.create_task(flood())
        last = -1
        while sent != last:
            last = sent
            await asyncio.sleep(0.05)
        assert two._parser.ready_bytes < UNREAD_BYTES + 2 * SCRATCH_BYTES
        assert sent * 50_000 < UNREAD_BYTES + 2_000_000  # the rest is in the kernel
        for _ in range(sent + 5):  # and it goes on where it stopped
            await two.receive()
        flooding.cancel()
        one.abort()
        two.abort()

    runner(main())


def test_a_sender_blocked_on_a_dead_peer_is_freed(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        two.allow(0)  # it stops reading
        sending = asyncio.create_task(one.send("k", {}, (bytes(50_000_000),)))
        await asyncio.sleep(0.05)
        assert not sending.done()
        two.abort()
        with pytest.raises(StreamBroken):
            await sending

    runner(main())


def test_the_payload_may_be_changed_once_send_returns(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        payload = bytearray(b"a" * 3_000_000)

        async def sender() -> None:
            await one.send("k", {}, (payload,))
            payload[:] = b"b" * len(payload)

        sending = asyncio.create_task(sender())
        frame = await two.receive()
        await sending
        assert set(frame.payload.tobytes()) == {ord("a")}
        one.abort()
        two.abort()

    runner(main())


def test_a_large_frame_cut_short_breaks_the_stream(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        sending = asyncio.create_task(one.send("k", {}, (bytes(500_000_000),)))
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(StreamBroken):
            await two.receive()

    runner(main())


def test_a_close_ends_though_the_other_end_never_reads(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.swarm.streams.frame_stream._LINGER_SECONDS", 0.05)

    async def main() -> None:
        one, two, _ = await pair()
        two.allow(0)  # it stops reading
        sending = asyncio.create_task(one.send("k", {}, (bytes(50_000_000),)))
        await asyncio.sleep(0.02)
        await one.aclose()
        with pytest.raises(StreamClosed):
            await sending
        two.abort()

    runner(main())


def test_a_payload_over_what_is_allowed_waits_to_be_allowed_and_is_refused_where_it_is_not(
    runner: Any,
) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        two.allow(1000)
        await one.send("hello")
        sending = asyncio.create_task(one.send("large", {}, (b"x" * 3_000_000,)))
        await asyncio.sleep(0.01)  # it arrives before it is allowed
        assert (await two.receive()).kind == "hello"
        two.allow(3_000_000)
        assert bytes((await two.receive()).payload) == b"x" * 3_000_000
        await sending
        await one.send("after")
        assert (await two.receive()).kind == "after"
        two.allow(1000)
        await one.send("small", {}, (b"y" * 1000,))
        sending = asyncio.create_task(one.send("large", {}, (b"x" * 3_000_000,)))
        assert len((await two.receive()).payload) == 1000
        with pytest.raises(FrameError, match="3000000 bytes; at most 1000 are allowed now"):
            await two.receive()
        with pytest.raises((StreamBroken, StreamClosed)):
            await sending

    runner(main())


def test_a_stream_with_a_refused_payload_closes_at_once(runner: Any) -> None:
    async def main() -> None:
        for refused_first in (True, False):
            one, two, _ = await pair()
            two.allow(10)
            sending = asyncio.create_task(one.send("large", {}, (b"x" * 3_000_000,)))
            if refused_first:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(1.5):
                await two.aclose()
            with pytest.raises((StreamBroken, StreamClosed)):
                await sending

    runner(main())


def test_no_more_is_allowed_than_the_limits_say(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair(SMALL)
        two.allow(1 << 40)
        await one.write_message((8).to_bytes(4, "big") + (1 << 39).to_bytes(8, "big"))
        with pytest.raises(FrameError, match="are allowed"):
            await two.receive()

    runner(main())


def test_a_frame_is_announced_before_it_is_read_and_what_comes_of_it_is_counted(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        two.allow(1000)
        await one.send("small", {}, (b"y" * 10,))
        assert await two.announced() == 10 and len((await two.receive()).payload) == 10
        has_received = two.has_received
        sending = asyncio.create_task(one.send("large", {}, (b"x" * 3_000_000,)))
        assert has_received and await two.announced() == 3_000_000
        before = two.arrived_bytes
        assert before < 200_000, "it is not read"
        two.allow(3_000_000)
        assert await two.announced() == 3_000_000
        assert len((await two.receive()).payload) == 3_000_000
        assert two.arrived_bytes > 3_000_000
        await sending
        one.abort()
        with pytest.raises(StreamBroken):
            await two.announced()

    runner(main())


def test_who_was_not_answered_yet_has_little_to_say(runner: Any) -> None:
    large = {"ids": list(range(30_000))}

    async def main() -> None:
        for how in ("nothing", "answered", "allowed"):
            one, two, _ = await pair(opened_to_us=True)
            await one.send("hello")
            assert (await two.receive()).kind == "hello"
            sending = asyncio.create_task(one.send("large", large, (b"x",)))
            assert await two.announced() > UNASKED_BYTES
            if how == "nothing":
                with pytest.raises(FrameError, match=r"a header of .* at most 32768 are allowed now"):
                    await two.receive()
                await asyncio.gather(sending, return_exceptions=True)
                continue
            if how == "answered":
                await two.send("welcome")
            else:
                two.allow(UNASKED_BYTES)
            assert await two.announced() == 1
            frame = await two.receive()
            assert frame.header == large and bytes(frame.payload) == b"x"
            await sending

    runner(main())


def test_a_header_that_is_none_closes_the_stream(runner: Any) -> None:
    async def main() -> None:
        one, two, _ = await pair()
        await one.send("good")
        await one.write_message((3).to_bytes(4, "big") + bytes(8) + b"\x92\xa1k")
        await one.send("behind it")
        assert (await two.receive()).kind == "good"
        for _ in range(2):
            with pytest.raises(FrameError, match="them on /fusion/test/1: a header that is not msgpack"):
                await two.receive()
        with pytest.raises(StreamBroken):
            await one.receive()

    runner(main())
