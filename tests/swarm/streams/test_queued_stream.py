from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fusion.swarm.errors import FrameError, StreamClosed
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.protocol import WireProtocol
from fusion.swarm.streams.queued_stream import Ended, QueuedStream, dial, hello
from fusion.swarm.transport import Frame, PeerId, Stream

TALK = WireProtocol(name="/test/talk/1", about="a test", payload_bytes=1 << 20, idle_seconds=60.0)
LARGE = [bytes(1 << 20)]


class Ends:
    """A queued stream, its far end, and the ends that it reported."""

    def __init__(self, near: Stream, far: Stream) -> None:
        self.frames: list[Frame] = []
        self.reported: list[Ended] = []
        self.near = QueuedStream(near, on_frame=self.take, on_end=self.reported.append)
        self.far = far

    def take(self, frame: Frame) -> None:
        if frame.kind == "surprise":
            raise FrameError("no surprise here")
        if frame.kind == "fault":
            raise TypeError("a fault of ours")
        self.frames.append(frame)


def run(test: Callable[[Ends], Awaitable[None]]) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        here, there = (MemoryTransport(network, PeerId(name)) for name in ("here", "there"))
        arrived: asyncio.Queue[Stream] = asyncio.Queue()

        async def handler(stream: Stream) -> None:
            stream.allow(1 << 20)
            arrived.put_nowait(stream)
            await asyncio.Event().wait()

        await there.serve(TALK.name, handler)
        async with asyncio.timeout(20):
            ends = Ends(await dial(here, there.peer_id, TALK, {"who": "here"}), await arrived.get())
            assert await hello(ends.far) == {"who": "here"}
            await test(ends)
            await ends.near.aclose()
        await there.aclose()

    asyncio.run(main())


async def send_many(link: QueuedStream, count: int) -> None:
    for _ in range(count):
        await link.room()
        link.post("large", {}, LARGE)


def test_whoever_waits_for_room_waits_for_the_wire_and_posting_does_not() -> None:
    async def test(ends: Ends) -> None:
        sends = asyncio.create_task(send_many(ends.near, 8))
        for _ in range(50):
            await asyncio.sleep(0)
        assert not sends.done(), "eight frames of 1 MiB went into the void"
        ends.near.post("small", {})
        kinds = [(await ends.far.receive()).kind for _ in range(9)]
        await sends
        assert sorted(kinds) == ["large"] * 8 + ["small"]
        assert ends.near.sent_bytes == 8 << 20

    run(test)


def test_flushing_waits_until_all_is_handed_over() -> None:
    async def test(ends: Ends) -> None:
        for _ in range(4):
            ends.near.post("large", {}, LARGE)
        flushed = asyncio.create_task(ends.near.flush())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not flushed.done()
        for _ in range(4):
            await ends.far.receive()
        await flushed

    run(test)


def test_whoever_waits_is_woken_when_the_stream_breaks() -> None:
    async def test(ends: Ends) -> None:
        waiting = [asyncio.create_task(send_many(ends.near, 8)), asyncio.create_task(ends.near.flush())]
        await asyncio.sleep(0.01)
        ends.far.abort()
        await asyncio.gather(*waiting)
        assert (await ends.near.wait()).vanished and len(ends.reported) == 1
        ends.near.post("late", {})  # dropped, not an error
        await ends.near.room()

    run(test)


def test_what_waits_goes_out_before_the_end() -> None:
    async def test(ends: Ends) -> None:
        ends.near.post("failed", {"message": "leaving"})
        await ends.near.aclose()
        assert (await ends.far.receive()).kind == "failed"
        with pytest.raises(StreamClosed):
            await ends.far.receive()
        assert not ends.reported, "we closed it ourselves"

    run(test)


def test_a_frame_that_is_refused_ends_the_stream_and_says_why() -> None:
    async def test(ends: Ends) -> None:
        await ends.far.send("fine")
        await ends.far.send("surprise")
        assert await ends.near.wait() == Ended("no surprise here")
        assert [frame.kind for frame in ends.frames] == ["fine"] and ends.reported == [
            Ended("no surprise here")
        ]

    run(test)


def test_a_frame_that_runs_into_a_fault_of_ours_ends_the_stream_as_well() -> None:
    async def test(ends: Ends) -> None:
        await ends.far.send("fault")
        ended = await ends.near.wait()
        assert "a fault of ours" in ended.reason and ends.reported == [ended]

    run(test)


def test_a_frame_that_cannot_be_written_ends_the_stream_as_well() -> None:
    async def test(ends: Ends) -> None:
        async def fault(*frame: object) -> None:
            raise TypeError("a fault of ours")

        ends.near.stream.send = fault  # type: ignore[method-assign]
        ends.near.post("odd", {})
        ended = await ends.near.wait()
        assert "a fault of ours" in ended.reason and ends.reported == [ended]

    run(test)


def test_what_the_other_end_said_last_tells_more_than_that_we_cannot_send() -> None:
    async def test(ends: Ends) -> None:
        await ends.far.send("surprise")
        await ends.far.aclose()
        ends.near.post("late", {})
        assert await ends.near.wait() == Ended("no surprise here")

    run(test)


def test_a_stream_that_does_not_begin_with_hello_is_refused() -> None:
    async def test(ends: Ends) -> None:
        ends.near.post("open", {})
        with pytest.raises(FrameError, match="begins with hello, not 'open'"):
            await hello(ends.far)

    run(test)
