"""What sessions that nobody uses, and gateways that open too many, cost the others of a stage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.toy_ring import SHAPES, Refused, reference, ring_of

from fusion.runtime.serving.ring import schedule, stage_sessions
from fusion.runtime.serving.ring.openings import BURST
from fusion.runtime.serving.ring.session import SessionId
from fusion.runtime.serving.ring.stage_session import StageRunner
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.shares import IDLE_SECONDS
from fusion.swarm.transport import PeerId


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_sessions, "LOOK_SECONDS", 0.001)


@pytest.mark.parametrize("squatters", [1, 16])
@pytest.mark.parametrize("short_of", ["memory", "places"])
def test_a_stage_full_of_silent_sessions_answers_an_honest_gateway(
    short_of: str, squatters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        clock = Clock()
        async with ring_of(SHAPES["two"], clock=clock) as ring:
            if short_of == "memory":
                for plane in ring.planes:
                    plane.most = 16 * 64
            else:
                monkeypatch.setattr(schedule, "MAX_SESSIONS", 16)
            for i in range(squatters):
                transport = MemoryTransport(ring.network, PeerId(f"stranger {i}"))
                streams = await ring.connect(transport)
                for _ in range(16 // squatters):
                    await ring.open(streams, ring.opening([1] * 32, 32))
            if squatters > 1:  # each holds no more than the honest gateway asks for
                with pytest.raises(Refused, match=r"ask again|no room"):
                    await ring.generate([1, 2, 3] * 10, 30)
                clock.now += IDLE_SECONDS
            assert await ring.generate([1, 2, 3] * 10, 30) == reference(SHAPES["two"], [1, 2, 3] * 10, 30)

    asyncio.run(main())


def test_whoever_holds_most_gives_a_session_to_who_holds_none_and_is_told() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["one"], clock=Clock()) as ring:
            ring.planes[0].most = 4 * 8
            [mine] = await ring.connect()
            for name in "abcd":
                await ring.open([mine], ring.opening([1] * 4, 4, session=name))
            [theirs] = await ring.connect(MemoryTransport(ring.network, PeerId("other")))
            await ring.open([theirs], ring.opening([1] * 4, 4, session="e"))
            frame = await mine.receive()
            assert frame.kind == "failed" and frame.header["session"] == "d"
            assert frame.header["reason"] == "full" and "ask again later" in frame.header["message"]
            assert ring.rings[0].sessions == 4 and set(ring.planes[0].seen) == set("abce")

    asyncio.run(main())


def test_a_session_whose_prompt_does_not_come_is_closed_unless_its_gateway_asks_for_it() -> None:
    async def main() -> None:
        clock = Clock()
        async with ring_of(SHAPES["two"], clock=clock) as ring:
            streams = await ring.connect()
            for name in ("silent", "asked", "prompted"):
                await ring.open(streams, ring.opening([1] * 4, 4, session=name))
            opening = replace(ring.opening([1] * 4, 4), session=SessionId("prompted"))
            await ring.prompt(streams, opening, [1] * 4)
            await ring.tokens(streams[1])
            clock.now += stage_sessions.PROMPT_SECONDS
            await streams[0].send("ping", {"session": "asked"})
            assert (await streams[0].receive()).kind == "pong"
            clock.now += 1
            frame = await streams[0].receive()
            assert (frame.kind, frame.header["session"]) == ("failed", "silent")
            assert ring.rings[0].sessions == 2 and ring.rings[1].sessions == 3
            clock.now += stage_sessions.QUIET_SECONDS
            await ring.freed()

    asyncio.run(main())


def test_a_gateway_that_opens_and_runs_nothing_is_told_to_ask_again_later() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["one"], clock=Clock()) as ring:
            [theirs] = await ring.connect(MemoryTransport(ring.network, PeerId("stranger")))
            for number in range(int(BURST) + 1):
                await theirs.send("open", ring.opening([1] * 4, 4, session=f"{number}").to_header())
            frames = [await theirs.receive() for _ in range(int(BURST) + 1)]
            refused = [frame.header for frame in frames if frame.kind == "failed"]
            assert len(refused) == 1 and refused[0]["reason"] == "full"
            assert "ask again later" in refused[0]["message"] and ring.rings[0].sessions == BURST
            for _ in range(2 * int(BURST)):  # whoever runs what it opens goes on
                assert await ring.generate([1, 2, 3], 2) == reference(SHAPES["one"], [1, 2, 3], 2)

    asyncio.run(main())


def test_the_memory_of_sessions_that_end_together_is_freed_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[int] = []
    free = StageRunner.free

    def counted(self: StageRunner, sessions: Sequence[SessionId]) -> None:
        freed.append(len(sessions))
        free(self, sessions)

    async def main() -> None:
        async with ring_of(SHAPES["one"], clock=Clock()) as ring:
            [theirs] = await ring.connect(MemoryTransport(ring.network, PeerId("stranger")))
            for number in range(40):
                await ring.open([theirs], ring.opening([1] * 4, 4, session=f"{number}"))
            theirs.abort()
            await ring.freed()
            assert freed == [40]

    monkeypatch.setattr(StageRunner, "free", counted)
    asyncio.run(main())
