"""Prompts that come while stages still open the session, and chunks that come before the word to open it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.toy_ring import SHAPES, Ring, reference, ring_of

from fusion.runtime.serving.requests.header_fields import pack_tokens
from fusion.runtime.serving.ring.openings import (
    EARLY_BYTES,
    EARLY_SECONDS,
    EARLY_SESSION_BYTES,
    REMEMBERED_SESSIONS,
    EarlyFrames,
    kept,
)
from fusion.runtime.serving.ring.session import Opening, SessionId
from fusion.swarm.transport import Frame, PeerId, Stream

A, B = SessionId("a"), SessionId("b")
P, Q = PeerId("p"), PeerId("q")
LONG = list(range(17))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_early_waits_in_order_and_goes_once() -> None:
    early: EarlyFrames[str] = EarlyFrames(Clock())
    assert early.add(A, P, "one", 3) and early.add(B, P, "other", 3) and early.add(A, Q, "two", 3)
    assert early.take(A) == ["one", "two"]
    assert early.take(A) == [] and not early.gave_up(A)
    assert early.take(B) == ["other"]


def test_what_is_early_for_too_long_is_given_up_with_all_that_follows() -> None:
    clock = Clock()
    early: EarlyFrames[str] = EarlyFrames(clock)
    early.add(A, P, "one", 3)
    clock.now += EARLY_SECONDS
    early.expire()
    assert early.add(A, P, "two", 3) and not early.gave_up(A)
    clock.now += 1.0
    early.expire()
    assert early.gave_up(A) and not early.add(A, P, "three", 3)
    assert early.take(A) == []


def test_of_too_much_the_most_is_given_up() -> None:
    early: EarlyFrames[str] = EarlyFrames(Clock())
    assert early.add(A, P, "large", EARLY_BYTES - 2 * EARLY_SESSION_BYTES - 5)
    assert early.add(B, P, "small", 5)
    assert early.add(B, P, "one more", 1)
    assert early.gave_up(A) and not early.gave_up(B)
    assert not early.add(A, P, "behind", 1)
    assert early.take(B) == ["small", "one more"]
    assert not early.add(B, P, "whole", EARLY_BYTES) and early.gave_up(B)
    assert not early.add(SessionId("c" * 65), P, "no session has such a name", 1)


def test_whoever_sends_most_pushes_out_nothing_of_others() -> None:
    early: EarlyFrames[str] = EarlyFrames(Clock())
    assert early.add(A, P, "one large", EARLY_BYTES // 4)
    for number in range(4 * EARLY_BYTES // EARLY_SESSION_BYTES):
        early.add(SessionId(f"small {number}"), Q, "nobody opens it", 1)
    assert early.take(A) == ["one large"] and not early.gave_up(A)
    assert len(early._waiting) < EARLY_BYTES // EARLY_SESSION_BYTES
    for session in list(early._waiting):
        early.end(session)
    assert not early._size_bytes, "nobody is remembered of whom nothing waits"


def test_what_waits_keeps_nothing_that_is_not_counted() -> None:
    large = memoryview(bytes(1 << 20))
    frame, size_bytes = kept(Frame("chunk", {"session": "a"}, large[:5]))
    assert len(frame.payload) == 5 and frame.payload.nbytes == len(frame.payload.obj)
    assert 5 < size_bytes < 2048
    _, of_junk = kept(Frame("chunk", {"session": "a", "junk": [[]] * 10_000}, large[:5]))
    assert of_junk > 64 * 10_000


def test_what_comes_for_a_session_that_has_ended_is_not_kept() -> None:
    early: EarlyFrames[str] = EarlyFrames(Clock())
    early.add(A, P, "one", 3)
    early.end(A)
    assert not early.add(A, P, "two", 3) and not early.gave_up(A)
    for number in range(2 * REMEMBERED_SESSIONS):
        early.end(SessionId(str(number)))
    assert early.add(A, P, "forgotten by now", 3), "ids are remembered for a while only"


async def say_open(streams: list[Stream], opening: Opening, *stages: int) -> None:
    for stage in stages:
        await streams[stage].send("open", opening.to_header())


async def answer(stream: Stream) -> list[int]:
    """Of the last stage, whatever it says before it."""
    found: list[int] = []
    while True:
        frame = await stream.receive()
        if frame.kind == "failed":
            raise AssertionError(frame.header["message"])
        if frame.kind == "token":
            found.append(frame.header["id"])
            if frame.header["finish"]:
                return found


async def until(ring: Ring, stage: int) -> None:
    """The stage has been sent a chunk of a session that it does not know."""
    while not ring.rings[stage]._sessions._early._waiting:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_behind_the_word_to_open_is_answered_as_ever(shape: str) -> None:
    async def main() -> None:
        stages = SHAPES[shape]
        async with ring_of(stages) as ring:
            streams = await ring.connect()
            for prompt in ([3], LONG):
                opening = ring.opening(prompt, 9)
                await say_open(streams, opening, *range(len(stages)))
                await ring.prompt(streams, opening, prompt)
                assert await answer(streams[-1]) == reference(stages, prompt, 9)
                for stream in streams:
                    await stream.send("close", {"session": opening.session})
            await ring.freed()

    asyncio.run(main())


@pytest.mark.parametrize("shape", ["two", "skip", "late-ids"])
def test_chunks_wait_for_the_word_to_open_their_session(shape: str) -> None:
    async def main() -> None:
        stages = SHAPES[shape]
        async with ring_of(stages) as ring:
            streams = await ring.connect()
            opening = ring.opening(LONG, 9)
            await say_open(streams, opening, 0)
            await ring.prompt(streams, opening, LONG)
            for stage in range(1, len(stages)):
                await until(ring, stage)
                await say_open(streams, opening, stage)
            assert await answer(streams[-1]) == reference(stages, LONG, 9)
            for stream in streams:
                await stream.send("close", {"session": opening.session})
            await ring.freed()

    asyncio.run(main())


def test_a_session_of_which_a_part_was_given_up_is_refused_at_once() -> None:
    async def main() -> None:
        clock = Clock()
        async with ring_of(SHAPES["two"], clock=clock) as ring:
            streams = await ring.connect()
            opening = ring.opening(LONG, 9)
            await say_open(streams, opening, 0)
            await ring.prompt(streams, opening, LONG)
            await until(ring, 1)
            clock.now += EARLY_SECONDS + 1
            ring.rings[1]._sessions._early.expire()
            await say_open(streams, opening, 1)
            frame = await streams[1].receive()
            assert (frame.kind, frame.header["reason"], frame.header["stage"]) == ("failed", "broken", 1)
            assert await ring.generate(LONG, 9) == reference(SHAPES["two"], LONG, 9)

    asyncio.run(main())


def test_an_early_prompt_that_is_wrong_is_refused_and_one_is_enough() -> None:
    async def main(*prompts: list[int]) -> Any:
        async with ring_of(SHAPES["two"]) as ring:
            streams = await ring.connect()
            opening = ring.opening(LONG, 9)
            await say_open(streams, opening, 0)
            for prompt in prompts:
                await streams[0].send("prompt", {"session": opening.session}, [pack_tokens(prompt)])
            # The gateway hears first what is held: it may have expected more.
            opened, frame = [await streams[0].receive() for _ in range(2)]
            assert opened.kind == "opened"
            return frame.kind, frame.header.get("reason")

    assert asyncio.run(main([1, 2])) == ("failed", "refused")
    assert asyncio.run(main(LONG, LONG)) == ("failed", "refused")
