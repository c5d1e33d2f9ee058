"""Large frames on their way to a peer, and places there: who waits, and who gives way."""

from __future__ import annotations

import asyncio

import pytest
from support.instant_loop import run
from support.uploads import Upload

from fusion.runtime.serving.answers.clients import UNREAD_SECONDS, Arrivals, send
from fusion.swarm.errors import StreamBroken
from fusion.swarm.transport import Frame, PeerId
from fusion.swarm.turns import Turns

Arriving = list[asyncio.Task[Frame | None]]


def arrivals() -> Arrivals:
    return Arrivals(asyncio.get_running_loop().time, 4)


async def begun(made: Arrivals, *uploads: Upload) -> Arriving:
    """All of them, two seconds apart."""
    tasks = []
    for upload in uploads:
        tasks.append(asyncio.create_task(made.first(upload)))
        await asyncio.sleep(2.0)
    return tasks


def test_what_comes_ends_nothing_else_that_comes() -> None:
    async def main() -> None:
        uploads = [Upload(peer, 100.0) for peer in ("a", "a", "a", "a", "b", "b")]
        found = await asyncio.gather(*await begun(arrivals(), *uploads))
        assert [frame is not None for frame in found] == [True] * 4 + [False] * 2
        assert not any(upload.aborted for upload in uploads)

    run(main())


@pytest.mark.parametrize("seconds", [100.0, 1e9], ids=["stopped", "trickles"])
def test_what_hardly_comes_any_more_gives_way(seconds: float) -> None:
    async def main() -> None:
        made = arrivals()
        slow = Upload("a", seconds, stops=5.0)
        uploads = [slow, *(Upload("a", 100.0) for _ in range(3))]
        tasks = await begun(made, *uploads)
        await asyncio.sleep(5.0)
        assert (
            await made.first(Upload("b", 1.0)) is None or slow.aborted
        )  # it came, when somebody last looked
        await asyncio.sleep(2.0)
        assert await made.first(Upload("b", 1.0)) is not None
        assert [upload.aborted for upload in uploads] == [True, False, False, False]
        with pytest.raises(StreamBroken):
            await tasks[0]
        assert all(await asyncio.gather(*tasks[1:]))

    run(main())


def test_newcomers_hold_half_where_one_asks_whose_frames_came_whole() -> None:
    async def main() -> None:
        made = arrivals()
        assert await made.first(Upload("known", 1.0)) is not None
        uploads = [Upload("stranger", 100.0) for _ in range(4)]
        tasks = await begun(made, *uploads)
        assert await made.first(Upload("another stranger", 1.0)) is None
        known = await begun(made, *(Upload("known", 50.0) for _ in range(3)))
        assert [frame is not None for frame in await asyncio.gather(*known)] == [True, True, False]
        assert [upload.aborted for upload in uploads] == [False, False, True, True]
        await asyncio.gather(*tasks, return_exceptions=True)

    run(main())


def test_a_place_that_there_never_is_ends_nobodys() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        shares = Turns(clock, 10, idle_seconds=1.0)
        held = [shares.turn(PeerId("a"), 5) for _ in range(2)]
        await asyncio.sleep(2.0)
        assert shares.turn(PeerId("b"), 11) is None
        assert not any(place is None or place.done() for place in held)
        assert shares.turn(PeerId("b"), 10) is not None
        assert all(place is not None and place.done() for place in held)

    run(main())


def test_a_large_part_of_an_answer_has_the_time_that_a_slow_line_takes() -> None:
    async def main() -> None:
        clock, part = asyncio.get_running_loop().time, bytes(8 << 20)
        for payload, least in (((), UNREAD_SECONDS), ((part,), UNREAD_SECONDS + 60.0)):
            client, began = Upload("a", 1.0), clock()
            client.reads = False
            with pytest.raises(StreamBroken, match="does not read its answer"):
                await send(client, "made", {}, payload)
            assert client.aborted and clock() - began >= least

    run(main())
