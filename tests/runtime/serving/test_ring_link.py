from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.protocol import RING
from fusion.runtime.serving.ring_link import GATEWAY, LinkEnds, RingLink, RingLinks
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import PeerUnreachable, StreamClosed
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import Frame, PeerId, Stream

HERE, THERE = PeerId("here"), PeerId("there")
ENDS = LinkEnds(JobId("job"), GATEWAY, 3, THERE)


class Pair:
    """Two peers; `arrived` has the streams that reached the second."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.here = MemoryTransport(self.network, HERE)
        self.there = MemoryTransport(self.network, THERE)
        self.arrived: asyncio.Queue[Stream] = asyncio.Queue()
        self.frames: list[Frame] = []
        self.reasons: list[str] = []

    def links(self) -> RingLinks:
        return RingLinks(
            self.here,
            on_frame=lambda ends, frame: self.frames.append(frame),
            on_end=lambda ends, reason: self.reasons.append(f"{ends.stage}: {reason}"),
        )


@asynccontextmanager
async def two_peers() -> AsyncIterator[Pair]:
    pair = Pair()

    async def handler(stream: Stream) -> None:
        stream.allow(1 << 20)
        pair.arrived.put_nowait(stream)
        await asyncio.Event().wait()

    await pair.there.serve(RING.name, handler)
    async with asyncio.timeout(20):
        yield pair
    await pair.there.aclose()


def test_one_link_for_each_neighbour_however_many_ask_at_once() -> None:
    async def main() -> None:
        async with two_peers() as pair:
            links = pair.links()
            found = await asyncio.gather(*(links.to(ENDS) for _ in range(5)))
            assert len(set(found)) == 1
            hello = await (await pair.arrived.get()).receive()
            assert LinkEnds.from_hello(hello, THERE) == ENDS
            assert pair.arrived.empty()
            await links.aclose()
            assert not pair.reasons

    asyncio.run(main())


def test_a_link_that_broke_is_told_once_and_made_anew() -> None:
    async def main() -> None:
        async with two_peers() as pair:
            links = pair.links()
            first = await links.to(ENDS)
            (await pair.arrived.get()).abort()
            await first.ended.wait()
            assert len(pair.reasons) == 1 and pair.reasons[0].startswith("3: ")
            first.post("late", {})  # dropped, not an error
            await first.send("late", {}, [])
            second = await links.to(ENDS)
            assert second is not first
            await links.aclose()
            pair.network.kill(THERE)
            with pytest.raises(PeerUnreachable):
                await links.to(ENDS)

    asyncio.run(main())


def test_sending_waits_for_the_wire_and_posting_does_not() -> None:
    async def main() -> None:
        async with two_peers() as pair:
            link = await pair.links().to(ENDS)
            far = await pair.arrived.get()
            large = [bytes(1 << 20)]
            sends = asyncio.create_task(_send_many(link, large, 8))
            for _ in range(50):
                await asyncio.sleep(0)
            assert not sends.done(), "eight frames of 1 MiB went into the void"
            link.post("small", {})
            kinds = [(await far.receive()).kind for _ in range(10)]
            await sends
            assert kinds[0] == "hello" and sorted(kinds[1:]) == ["large"] * 8 + ["small"]
            await link.aclose()

    asyncio.run(main())


async def _send_many(link: RingLink, payload: list[bytes], count: int) -> None:
    for _ in range(count):
        await link.send("large", {}, payload)


def test_whoever_waits_to_send_is_woken_when_the_link_breaks() -> None:
    async def main() -> None:
        async with two_peers() as pair:
            link = await pair.links().to(ENDS)
            far = await pair.arrived.get()
            sends = asyncio.create_task(_send_many(link, [bytes(1 << 20)], 8))
            await asyncio.sleep(0.01)
            far.abort()
            await sends
            assert link.ended.is_set()

    asyncio.run(main())


def test_last_words_go_out_before_the_end() -> None:
    async def main() -> None:
        async with two_peers() as pair:
            link = await pair.links().to(ENDS)
            link.post("failed", {"message": "leaving"})
            await link.aclose()
            far = await pair.arrived.get()
            assert [(await far.receive()).kind for _ in range(2)] == ["hello", "failed"]
            with pytest.raises(StreamClosed):
                await far.receive()
            await link.aclose()

    asyncio.run(main())


def test_a_frame_that_the_owner_refuses_ends_the_link() -> None:
    async def main() -> None:
        async with two_peers() as pair:

            def refuse(ends: LinkEnds, frame: Frame) -> None:
                raise JobError(f"no {frame.kind} here")

            links = RingLinks(
                pair.here, on_frame=refuse, on_end=lambda ends, reason: pair.reasons.append(reason)
            )
            link = await links.to(ENDS)
            await (await pair.arrived.get()).send("surprise")
            await link.ended.wait()
            assert pair.reasons == ["no surprise here"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "frame",
    [
        Frame("open", {"job": "j", "from": 0, "to": 0}),
        Frame("hello", {}),
        Frame("hello", {"job": "j", "to": "0"}),
    ],
)
def test_a_first_frame_that_is_no_hello_is_refused(frame: Frame) -> None:
    with pytest.raises(JobError):
        LinkEnds.from_hello(frame, HERE)
