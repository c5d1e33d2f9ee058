"""What a stage tells the gateways when something is wrong, and how it leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.toy_ring import JOB, SHAPES, Refused, reference, ring_of

from fusion.runtime.job.protocol import RING
from fusion.runtime.serving.ring.links import LinkEnds
from fusion.swarm.errors import StreamBroken, SwarmError
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream


def test_a_stage_says_that_it_is_there_and_how_far_it_is() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["three"]) as ring:
            streams = await ring.connect()
            opening = ring.opening(
                list(range(9)), 3, session="s"
            )  # three chunks, then two tokens are fed back
            await ring.open(streams, opening)
            await streams[1].send("ping", {"session": "s"})
            frame = await streams[1].receive()
            assert (frame.kind, frame.header) == ("pong", {"session": "s", "ran": 0})
            await ring.prompt(streams, opening, list(range(9)))
            await ring.tokens(streams[2])
            await streams[1].send("ping", {"session": "s"})
            assert (await streams[1].receive()).header["ran"] == 5

    asyncio.run(main())


def test_a_stage_that_does_not_know_the_session_says_so() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["one"]) as ring:
            [stream] = await ring.connect()
            await stream.send("ping", {"session": "elsewhere"})
            frame = await stream.receive()
            assert frame.kind == "failed"
            assert (frame.header["session"], frame.header["reason"]) == ("elsewhere", "moved")

    asyncio.run(main())


@pytest.mark.parametrize("opened", [True, False])
def test_a_neighbour_that_vanished_is_named(opened: bool) -> None:
    async def main() -> None:
        async with ring_of(SHAPES["three"]) as ring:
            streams = await ring.connect()
            opening = ring.opening([1], 50, session="s")
            if opened:
                await ring.open(streams, opening)
            ring.network.kill(ring.route[1].peer)
            if not opened:
                await streams[0].send("open", opening.to_header())
            frame = await streams[0].receive()
            assert frame.kind == "failed" and "stage 1 of toy on" in frame.header["message"]
            assert (frame.header["reason"], frame.header["stage"]) == ("vanished", 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"route": [["p0", 4]]}, "moved"),
        ({"route": [["p9", 5]]}, "moved"),
        ({"max_tokens": 0}, "refused"),
        ({}, "full"),
    ],
)
def test_the_reason_of_a_refusal_says_whether_to_look_elsewhere(change: dict[str, Any], reason: str) -> None:
    async def main() -> None:
        async with ring_of(SHAPES["one"]) as ring:
            ring.planes[0].full = True
            [stream] = await ring.connect()
            await stream.send("open", {**ring.opening([1], 5, session="s").to_header(), **change})
            frame = await stream.receive()
            assert frame.kind == "failed" and frame.header["reason"] == reason
            assert frame.header["stage"] == 0 and not ring.rings[0].sessions

    asyncio.run(main())


def test_a_plane_that_fails_is_the_fault_of_its_own_stage() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            streams = await ring.connect()
            opening = ring.opening([1], 5, session="s")
            await ring.open(streams, opening)
            ring.planes[1].broken = True
            await ring.prompt(streams, opening, [1])
            frame = await streams[1].receive()
            assert frame.kind == "failed"
            assert (frame.header["reason"], frame.header["stage"]) == ("broken", 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    "told",
    [
        [{}, {"prompt_length": 1, "max_tokens": 1}, {}],
        [{}, {"route": [["liar", 5], ["p1", 6], ["p2", 7]]}, {}],
        [{"route": [["p0", 5], ["p1", 6], ["liar", 7]]}, {}, {}],
    ],
)
def test_a_gateway_that_tells_stages_otherwise_ends_its_own_session_alone(told: list[dict[str, Any]]) -> None:
    prompt = [1, 2, 3, 4] * 4

    async def swallow(stream: Stream) -> None:
        while True:
            await stream.receive()

    async def main() -> None:
        async with ring_of(SHAPES["three"]) as ring:
            ours, mine = await ring.connect(), ring.opening([1], 40, session="mine")
            await ring.open(ours, mine)
            liar = MemoryTransport(ring.network, PeerId("liar"))
            await liar.serve(RING.name, swallow)
            theirs, lied = await ring.connect(liar), ring.opening(prompt, 20, session="lied")
            for stream, lie in zip(theirs, told, strict=True):
                await stream.send("open", {**lied.to_header(), **lie})
                assert (await stream.receive()).kind == "opened"
            await ring.prompt(theirs, lied, prompt)
            async with asyncio.timeout(5):
                await asyncio.sleep(0.1)  # for what was lied about to be come upon
                await ring.prompt(ours, mine, [1])
                assert await ring.tokens(ours[-1]) == reference(SHAPES["three"], [1], 40)

    asyncio.run(main())


def test_a_last_stage_that_never_ends_an_answer_does_not_make_it_longer() -> None:
    async def endless(stream: Stream) -> None:
        while True:
            await stream.receive()

    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            liar = MemoryTransport(ring.network, PeerId("liar"))
            await liar.serve(RING.name, endless)
            [stream, _] = await ring.connect()
            opening = ring.opening([1], 3, session="s")
            route = [["p0", 5], ["liar", 6]]
            await stream.send("open", {**opening.to_header(), "route": route})
            assert (await stream.receive()).kind == "opened"
            await ring.prompt([stream], opening, [1])
            back = await liar.open(PeerId("p0"), RING.name)
            await back.send("hello", LinkEnds(JOB, 1, 0, PeerId("p0")).to_header())
            session = ring.rings[0]._schedule.sessions[opening.session]
            for position in range(1, 9):
                while session.reached < position and not session.closed:
                    await asyncio.sleep(0)
                ring.planes[0].capacity["s"] = (
                    10**9
                )  # a stage without attention has no cache that would refuse
                await back.send("token", {"session": "s", "id": 1, "position": position})
            frame = await stream.receive()
            assert (frame.kind, frame.header["reason"]) == ("failed", "broken")
            assert session.reached <= opening.capacity

    asyncio.run(main())


# --- leaving


def test_a_stage_that_leaves_serves_until_its_sessions_have_moved() -> None:
    prompt = [1, 2, 3]

    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            streams = await ring.connect()
            opening = ring.opening(prompt, 20, session="s")
            await ring.open(streams, opening)
            ring.rings[0].leave()
            ring.tasks[0].cancel()
            assert (await streams[0].receive()).kind == "leaving"
            await ring.prompt(streams, opening, prompt)
            assert await ring.tokens(streams[1]) == reference(SHAPES["two"], prompt, 20)
            await streams[0].send("open", ring.opening([1], 5, session="late").to_header())
            frame = await streams[0].receive()
            assert (frame.kind, frame.header["reason"]) == ("failed", "moved")
            assert not ring.tasks[0].done()
            await streams[0].send("close", {"session": "s"})
            await asyncio.wait([ring.tasks[0]], timeout=2.0)  # at once, long before its time is up
            assert ring.tasks[0].done()
            with pytest.raises(SwarmError):
                await streams[0].receive()

    asyncio.run(main())


def test_a_stage_that_leaves_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion.runtime.serving.ring.stage.DRAIN_SECONDS", 0.02)

    async def main() -> None:
        async with ring_of(SHAPES["one"]) as ring:
            [stream] = await ring.connect()
            await ring.open([stream], ring.opening([1], 5, session="s"))
            ring.rings[0].leave()
            ring.tasks[0].cancel()
            assert (await stream.receive()).kind == "leaving"
            frame = await stream.receive()
            assert (frame.kind, frame.header["reason"]) == ("failed", "moved")
            await asyncio.wait([ring.tasks[0]])

    asyncio.run(main())


def test_a_stage_without_sessions_leaves_at_once() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["one"]) as ring:
            [stream] = await ring.connect()
            await stream.send("ping", {"session": "s"})
            await stream.receive()
            ring.rings[0].leave()
            ring.tasks[0].cancel()
            await asyncio.wait([ring.tasks[0]], timeout=2.0)
            assert ring.tasks[0].done()

    asyncio.run(main())


@pytest.mark.parametrize("asked", [False, True])
def test_without_a_successor_sessions_end_with_the_host(asked: bool) -> None:
    """Also where somebody was `asked` to take the stage, and did not."""

    async def main() -> None:
        async with ring_of(SHAPES["one"]) as ring:
            streams = await ring.connect()
            await ring.open(streams, ring.opening([1], 5, session="s"))
            if asked:
                ring.rings[0].leave()
                ring.rings[0].stay()
            ring.tasks[0].cancel()
            with pytest.raises(Refused, match=r"failed: stage 0 of toy on .* is leaving"):
                await ring.tokens(streams[0])

    asyncio.run(main())


def test_a_next_stage_that_reads_nothing_holds_up_its_own_sessions_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fusion.swarm.streams.memory_stream.BUFFERED_BYTES", 1)
    prompt, kept = [1, 2, 3, 4] * 12, list[Stream]()

    async def deaf(stream: Stream) -> None:
        kept.append(stream)
        await asyncio.sleep(60)

    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            liar = MemoryTransport(ring.network, PeerId("liar"))
            await liar.serve(RING.name, deaf)
            [theirs, _] = await ring.connect(liar)
            lied = ring.opening(prompt, 5, session="lied")
            await theirs.send("open", {**lied.to_header(), "route": [["p0", 5], ["liar", 6]]})
            assert (await theirs.receive()).kind == "opened"
            await ring.prompt([theirs], lied, prompt)
            session = ring.rings[0]._schedule.sessions[lied.session]
            while session.ran < 3:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(5):
                assert await ring.generate([1], 20) == reference(SHAPES["two"], [1], 20)
            assert session.reached < len(prompt), "what cannot be sent is not run"

    asyncio.run(main())


def test_whoever_waits_for_room_goes_on_once_the_session_that_took_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its next stage is frozen, so that nothing of it runs, and its gateway gives it up: the link from the stage before has others'
    sessions."""
    monkeypatch.setattr("fusion.swarm.streams.memory_stream.BUFFERED_BYTES", 1)
    monkeypatch.setattr("fusion.runtime.serving.ring.schedule.WAITING_POSITIONS", 16)
    prompt, kept = [1, 2, 3, 4] * 14, list[Stream]()

    async def frozen(stream: Stream) -> None:
        kept.append(stream)
        await asyncio.sleep(60)

    async def main() -> None:
        async with ring_of(SHAPES["three"]) as ring:
            other = MemoryTransport(ring.network, PeerId("frozen"))
            await other.serve(RING.name, frozen)
            streams = (await ring.connect())[:2]
            opening = ring.opening(prompt, 5)
            route = [["p0", 5], ["p1", 6], ["frozen", 7]]
            for stream in streams:
                await stream.send("open", {**opening.to_header(), "route": route})
                assert (await stream.receive()).kind == "opened"
            await ring.prompt(streams, opening, prompt)
            while ring.rings[1]._schedule.has_room:
                await asyncio.sleep(0.001)
            others = asyncio.create_task(ring.generate([1], 20))
            while ring.rings[0].sessions < 2:
                await asyncio.sleep(0.001)
            for stream in streams:
                await stream.send("close", {"session": opening.session})
            async with asyncio.timeout(5):
                assert await others == reference(SHAPES["three"], [1], 20)

    asyncio.run(main())


@pytest.mark.parametrize("asked", [{"logits": True}, {"top_logprobs": 20}, {}])
def test_tokens_wait_in_bounds_for_a_gateway_that_reads_nothing(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusion.swarm.streams.memory_stream.BUFFERED_BYTES", 1)
    monkeypatch.setattr("fusion.runtime.serving.ring.stage.UNREAD_BYTES", 10_000)

    async def main() -> None:
        async with ring_of(SHAPES["two"]) as ring:
            deaf = await ring.connect(MemoryTransport(ring.network, PeerId("deaf")))
            opening = ring.opening([1], 55, session="s", **asked)
            await ring.open(deaf, opening)
            await ring.prompt(deaf, opening, [1])
            while ring.rings[1].sessions:
                await asyncio.sleep(0.001)
            with pytest.raises(StreamBroken):
                for _ in range(55):
                    await deaf[1].receive()
            assert await ring.generate([1], 5) == reference(SHAPES["two"], [1], 5)

    asyncio.run(main())
