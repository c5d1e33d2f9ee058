from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.protocol import RING
from fusion.runtime.serving.ring.batches import BATCHES
from fusion.runtime.serving.ring.links import (
    ACKS,
    GATEWAY,
    IDLE_SECONDS,
    FullLinks,
    LinkEnds,
    RingLinks,
    accepts_acks,
)
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import PeerUnreachable, StreamClosed
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.streams.queued_stream import hello
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
        self.needed: set[LinkEnds] = set()  # by sessions
        self.now = 0.0

    def links(self) -> RingLinks:
        return RingLinks(
            self.here,
            on_frame=lambda ends, frame: self.frames.append(frame),
            on_end=lambda ends, reason: self.reasons.append(f"{ends.stage}: {reason}"),
            needed=lambda: self.needed,
            clock=lambda: self.now,
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
            said = await hello(await pair.arrived.get())
            assert LinkEnds.from_hello(said, THERE) == ENDS
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
            await first.room()
            second = await links.to(ENDS)
            assert second is not first
            await links.aclose()
            pair.network.kill(THERE)
            with pytest.raises(PeerUnreachable):
                await links.to(ENDS)

    asyncio.run(main())


def test_a_frame_that_the_owner_refuses_ends_the_link() -> None:
    async def main() -> None:
        async with two_peers() as pair:

            def refuse(ends: LinkEnds, frame: Frame) -> None:
                raise JobError(f"no {frame.kind} here")

            links = RingLinks(
                pair.here,
                on_frame=refuse,
                on_end=lambda ends, reason: pair.reasons.append(reason),
                needed=set,
                clock=lambda: pair.now,
            )
            link = await links.to(ENDS)
            await (await pair.arrived.get()).send("surprise")
            await link.ended.wait()
            assert pair.reasons == ["no surprise here"]

    asyncio.run(main())


def test_a_link_that_no_session_needs_is_closed_after_a_while_and_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusion.runtime.serving.ring.links.LOOK_SECONDS", 0.005)

    async def main() -> None:
        async with two_peers() as pair:
            links, other = pair.links(), replace(ENDS, stage=4)
            pair.needed = {ENDS, other}
            kept, closed = await links.to(ENDS), await links.to(other)
            arrived = [await pair.arrived.get() for _ in range(2)]
            pair.now += 2 * IDLE_SECONDS  # one answer may take as long
            await asyncio.sleep(0.05)
            assert not kept.ended.is_set() and not closed.ended.is_set()

            pair.needed = {ENDS}
            closed.post("last", {})
            pair.now += 0.9 * IDLE_SECONDS
            await asyncio.sleep(0.05)
            assert not closed.ended.is_set()
            assert await links.to(other) is closed  # which counts as a use
            pair.now += 0.9 * IDLE_SECONDS
            await asyncio.sleep(0.05)
            assert not closed.ended.is_set()
            pair.now += 0.2 * IDLE_SECONDS
            await closed.ended.wait()
            assert not kept.ended.is_set() and await links.to(ENDS) is kept
            assert await hello(arrived[1]) and (await arrived[1].receive()).kind == "last"
            with pytest.raises(StreamClosed):
                await arrived[1].receive()

            again = await links.to(other)
            assert again is not closed and not again.ended.is_set()
            await links.aclose()
            assert not pair.reasons  # no session lost anything

    asyncio.run(main())


def test_of_links_that_no_session_needs_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.runtime.serving.ring.links.MOST_IDLE", 3)

    async def main() -> None:
        async with two_peers() as pair:
            links, pair.needed = pair.links(), {ENDS}
            kept = await links.to(ENDS)
            others = []
            for stage in range(10, 20):  # a stranger's routes, each session's over before the next
                pair.now += 1.0
                ends = replace(ENDS, stage=stage)
                pair.needed = {ENDS, ends}
                others.append(await links.to(ends))
            await asyncio.gather(*(each.ended.wait() for each in others[:6]))
            assert not any(each.ended.is_set() for each in [kept, *others[6:]])
            await links.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("hello", [{}, {"job": "j", "to": "0"}, {"job": 1, "from": 0, "to": 0}])
def test_a_hello_that_names_no_ends_is_refused(hello: dict[str, object]) -> None:
    with pytest.raises(JobError):
        LinkEnds.from_hello(hello, HERE)


class Slow:
    """A link whose far end reads when it is told to."""

    def __init__(self, unsent_bytes: int) -> None:
        self.full, self.unsent_bytes, self.ended = True, unsent_bytes, ""
        self.stream = SimpleNamespace(remote="far")
        self.read = asyncio.Event()

    async def room(self) -> None:
        await self.read.wait()
        self.full = False

    def end(self, reason: str) -> None:
        self.ended = reason
        self.read.set()


def test_of_links_that_are_full_those_that_are_for_longest_end_where_too_much_waits() -> None:
    room: list[int] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            full = FullLinks(lambda: room.append(1), 100)
            full.start(tasks)
            stuck, reads, more = Slow(60), Slow(30), Slow(70)
            given: Any = (stuck, reads)
            full.look(given)
            reads.read.set()
            while not room:
                await asyncio.sleep(0)
            assert room == [1] and not stuck.ended and not reads.ended
            reads.full = True
            full.look([reads, more])  # type: ignore[list-item]
            assert stuck.ended and not reads.ended and not more.ended
            reads.end(""), more.end("")

    asyncio.run(main())


def test_whoever_asks_about_a_link_that_others_have_filled_is_called_once_it_has_room() -> None:
    """Frames of other kinds fill it as well."""
    room: list[int] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            full = FullLinks(lambda: room.append(1), 100)
            full.start(tasks)
            filled, free = Slow(0), Slow(0)
            free.full = False
            given: Any = (filled, free)
            assert (
                full.clear([]) and full.clear(given[1:]) and not full.clear(given) and not full.clear(given)
            )
            filled.read.set()
            while not room:
                await asyncio.sleep(0)
            assert room == [1] and full.clear(given)

    asyncio.run(main())


def test_what_went_out_before_the_far_end_said_that_it_acknowledges_is_counted_too() -> None:
    """It says so once it has our hello, and a prompt may go out right behind that."""

    async def main() -> None:
        async with two_peers() as pair:
            links, said = pair.links(), asyncio.Event()
            links._acked = said.set
            link = await links.to(replace(ENDS, sender=0))
            far = await pair.arrived.get()
            assert accepts_acks(await hello(far))
            links.count_sent(link, 70_000)
            assert links.in_window(link), "nobody has said yet that it acknowledges"
            await far.send(BATCHES, {ACKS: True})
            await far.send("ack", {"bytes": 3_000})
            await said.wait()
            assert not links.in_window(link)
            said.clear()
            await far.send("ack", {"bytes": 70_000})
            await said.wait()
            assert links.in_window(link) and not pair.reasons
            await far.send("ack", {"bytes": 70_001})
            await link.ended.wait()
            assert pair.reasons == ["3: ack of 70001 bytes, of 70000 that were sent"]
            assert links.in_window(link), "who waits for it is told of its end"

    asyncio.run(main())


def test_a_gateway_hears_no_acks() -> None:
    async def main() -> None:
        async with two_peers() as pair:
            links = pair.links()
            link = await links.to(ENDS)
            far = await pair.arrived.get()
            assert not accepts_acks(await hello(far))
            await far.send(BATCHES, {ACKS: True})
            await far.send("ack", {"bytes": 0})
            while not pair.frames:
                await asyncio.sleep(0)
            assert [frame.kind for frame in pair.frames] == ["ack"] and links.in_window(link)
            await links.aclose()

    asyncio.run(main())
