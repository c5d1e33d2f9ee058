"""What the stages of a ring keep of sessions that have ended, and who gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.toy_ring import SHAPES, Refused, Ring, reference, ring_of

from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.serving.requests.header_fields import pack_tokens
from fusion.runtime.serving.ring import stage_sessions
from fusion.runtime.serving.ring.prefix import BLOCK_POSITIONS, PrefixHash
from fusion.runtime.serving.ring.retained import IDLE_SECONDS
from fusion.swarm.directory.records import JobId
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId, Stream

HASH = PrefixHash(b"k", "")
BIG = {"max_sequence": 600, "prefill_chunk": 50}
HISTORY = [(7 * i) % 30 for i in range(160)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def turn(
    ring: Ring, streams: Sequence[Stream], prompt: list[int], count: int = 40, start: int | None = None
) -> tuple[list[int], list[int]]:
    """One answer as a gateway has it given, and what each stage said it held. `start`: after what, if not after what all of
    them hold."""
    opening = ring.opening(prompt, count, prefix=HASH.chain(prompt))
    held = []
    for stream in streams:
        await stream.send("open", opening.to_header())
    for stream in streams:
        frame = await stream.receive()
        if frame.kind != "opened":
            raise Refused(frame)
        held.append(frame.header["held"])
    after = min(*held, len(prompt) - 1) if start is None else start
    await streams[0].send("prompt", {"session": opening.session, "from": after}, [pack_tokens(prompt)])
    tokens = await ring.tokens(streams[-1])
    chain = HASH.chain([*prompt, *tokens][:-1])
    for stream in streams:
        await stream.send("close", {"session": opening.session, "prefix": chain})
    return tokens, held


async def retained(ring: Ring, positions: int) -> None:
    """Until every stage keeps so many; the test's deadline is the limit."""
    while any(plane.retained_bytes() != positions for plane in ring.planes):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("shape", ["one", "three", "skip", "late-ids"])
def test_the_second_turn_skips_what_every_stage_holds_and_copies_nothing(shape: str) -> None:
    runs: list[tuple[int, int]] = []

    async def main() -> None:
        stages = SHAPES[shape]
        async with ring_of(stages, on_run=lambda i, _, start, __: runs.append((i, start)), **BIG) as ring:
            for plane in ring.planes:
                plane.copy = lambda *_: pytest.fail("moved, not copied")  # type: ignore[method-assign]
            streams = await ring.connect()
            first, held = await turn(ring, streams, HISTORY)
            assert first == reference(stages, HISTORY, 40) and not any(held)
            runs.clear()
            prompt = [*HISTORY, *first, 5, 6, 7]
            second, held = await turn(ring, streams, prompt)
            assert second == reference(stages, prompt, 40)
            assert set(held) == {3 * BLOCK_POSITIONS}
            assert all(min(at for stage, at in runs if stage == i) == 192 for i in range(len(stages)))
            await ring.freed()

    asyncio.run(main())


def test_nothing_is_kept_where_keys_depend_on_how_the_prompt_was_cut() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"], **BIG) as ring:
            for plane in ring.planes:
                plane.chunk_invariant = False
            streams = await ring.connect()
            for _ in range(2):
                tokens, held = await turn(ring, streams, HISTORY)
                assert tokens == reference(SHAPES["two"], HISTORY, 40) and held == [0, 0]
            await ring.freed()
            assert not any(plane.retained_bytes() for plane in ring.planes)

    asyncio.run(main())


def test_a_gateway_never_gets_what_another_has_retained() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"], **BIG) as ring:
            mine = await ring.connect()
            theirs = await ring.connect(MemoryTransport(ring.network, PeerId("stranger")))
            # A stranger fills the stages with another sequence under my chain.
            opening = ring.opening([3] * 160, 2, prefix=HASH.chain(HISTORY))
            await ring.open(theirs, opening)
            await ring.prompt(theirs, opening, [3] * 160)
            await ring.tokens(theirs[-1])
            for stream in theirs:
                await stream.send("close", {"session": opening.session, "prefix": opening.prefix})
            for _ in range(2):
                tokens, held = await turn(ring, mine, HISTORY)
                assert tokens == reference(SHAPES["two"], HISTORY, 40)
            assert held == [128, 128]
            strange = ring.opening(HISTORY, 2, prefix=HASH.chain(HISTORY))
            await theirs[0].send("open", strange.to_header())
            assert (await theirs[0].receive()).header["held"] == 128  # its own
            other = await ring.connect(MemoryTransport(ring.network, PeerId("another")))
            strange = ring.opening(HISTORY, 2, prefix=HASH.chain(HISTORY))
            await other[0].send("open", strange.to_header())
            assert (await other[0].receive()).header["held"] == 0

    asyncio.run(main())


def test_all_go_by_the_stage_that_holds_least() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["three"], **BIG) as ring:
            streams = await ring.connect()
            first, _ = await turn(ring, streams, HISTORY)
            await retained(ring, 192)
            ring.planes[1].retained.clear()  # as on a peer that has just come to the stage
            prompt = [*HISTORY, *first, 5]
            second, held = await turn(ring, streams, prompt)
            assert held == [192, 0, 192] and second == reference(SHAPES["three"], prompt, 40)
            again, held = await turn(ring, streams, prompt)
            assert held == [192, 192, 192] and again == second

    asyncio.run(main())


def test_a_stage_that_holds_less_than_it_says_fails_its_session_and_no_other() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["three"], **BIG) as ring:
            streams = await ring.connect()
            first, _ = await turn(ring, streams, HISTORY)
            await retained(ring, 192)
            ring.planes[1].retained.clear()
            prompt = [*HISTORY, *first, 5]
            with pytest.raises(Refused, match=r"failed: stage 1 of toy .* cannot go on at position 192"):
                opening = ring.opening(prompt, 40, prefix=HASH.chain(prompt))
                await ring.open(streams, opening)
                await streams[0].send(
                    "prompt", {"session": opening.session, "from": 192}, [pack_tokens(prompt)]
                )
                await ring.tokens(streams[1])
            for stream in streams:
                await stream.send("close", {"session": opening.session, "prefix": opening.prefix})
            others = await ring.connect()
            assert (await turn(ring, others, prompt))[0] == reference(SHAPES["three"], prompt, 40)

    asyncio.run(main())


@pytest.mark.parametrize("start", [-1, 129, 160, "1"])
def test_a_prompt_goes_on_at_most_after_what_the_first_stage_said(start: Any) -> None:
    async def main() -> None:
        async with ring_of(SHAPES["one"], **BIG) as ring:
            streams = await ring.connect()
            await turn(ring, streams, HISTORY)
            with pytest.raises(Refused, match="from: "):
                await turn(ring, streams, HISTORY, start=start)
            await turn(ring, streams, HISTORY)
            assert (await turn(ring, streams, HISTORY, start=100))[0] == reference(SHAPES["one"], HISTORY, 40)
            # A gateway of the release before offers no prefix and says nothing.
            assert await ring.generate(HISTORY, 40) == reference(SHAPES["one"], HISTORY, 40)

    asyncio.run(main())


def test_a_beginning_that_several_share_is_copied_also_while_one_of_them_runs() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"], **BIG) as ring:
            streams = await ring.connect()
            runs = ring.opening(HISTORY, 400, prefix=HASH.chain(HISTORY), session="runs")
            await ring.open(streams, runs)
            await ring.prompt(streams, runs, HISTORY)
            await streams[-1].receive()
            prompts = [[*HISTORY, i] for i in range(3)]
            more = [await ring.connect() for _ in prompts]
            answers = await asyncio.gather(
                *(turn(ring, each, prompt) for each, prompt in zip(more, prompts, strict=True))
            )
            for prompt, (tokens, held) in zip(prompts, answers, strict=True):
                assert tokens == reference(SHAPES["two"], prompt, 40) and held == [128, 128]
            whole = reference(SHAPES["two"], HISTORY, 400)
            assert (await ring.tokens(streams[-1])) == whole[1:]

    asyncio.run(main())


def test_what_is_retained_gives_way_before_any_session() -> None:
    async def main() -> None:
        async with ring_of(SHAPES["two"], clock=Clock(), **BIG) as ring:
            for plane in ring.planes:
                plane.most = 600
            streams = await ring.connect()
            await turn(ring, streams, HISTORY)
            await turn(ring, streams, [1, *HISTORY])
            await retained(ring, 384)
            opening = ring.opening([2] * 100, 200, session="runs")
            await ring.open(streams, opening)  # the older one gives way to it
            assert [plane.retained_bytes() for plane in ring.planes] == [192, 192]
            theirs = await ring.connect(MemoryTransport(ring.network, PeerId("other")))
            await ring.open(theirs, ring.opening([2] * 50, 50))
            await ring.prompt(streams, opening, [2] * 100)
            assert await ring.tokens(streams[-1]) == reference(SHAPES["two"], [2] * 100, 200)
            for stream in streams:
                await stream.send("close", {"session": opening.session})
            _, held = await turn(ring, streams, [1, *HISTORY], count=20)
            assert held == [128, 128], "the newer one is there"

    asyncio.run(main())


def test_nothing_is_kept_for_ever_nor_after_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_sessions, "LOOK_SECONDS", 0.001)

    async def main() -> None:
        clock = Clock()
        async with ring_of(SHAPES["one"], clock=clock, **BIG) as ring:
            [plane], streams = ring.planes, await ring.connect()
            await turn(ring, streams, HISTORY)
            await retained(ring, 192)
            clock.now += IDLE_SECONDS / 2
            await turn(ring, streams, [1, *HISTORY])
            await retained(ring, 384)
            clock.now += IDLE_SECONDS / 2 + 1
            while plane.retained_bytes() != 192:
                await asyncio.sleep(0.001)
            ring.tasks[0].cancel()
            await asyncio.wait(ring.tasks)
            assert not plane.retained and not plane.seen

    asyncio.run(main())


def test_a_session_may_end_before_what_another_stage_has_taken_is_free() -> None:
    mine, theirs = (JobId("a" * 64), 0), (JobId("b" * 64), 0)

    async def main() -> None:
        async with ring_of(SHAPES["one"], **BIG) as ring:
            plane, memory, taken = ring.planes[0], MemoryBudget(300), list[int]()

            def account() -> None:
                kept = plane.retained_bytes()
                memory.resize(mine, 10 * len(plane.seen) + kept, kept, taken.append)

            memory.hold(mine, 0)
            memory.hold(theirs, 0)
            ring.rings[0]._runner._account_all = account
            streams = await ring.connect()
            await turn(ring, streams, HISTORY)
            await retained(ring, 192)
            await ring.open(streams, ring.opening([1], 5, session="s"))
            memory.resize(theirs, 290)
            assert taken == [192]
            await streams[0].send("close", {"session": "s"})
            await ring.freed()
            ring.rings[0].shed(taken.pop())
            await retained(ring, 0)
            assert not plane.seen and memory.by_place[mine] == 0
            memory.release(theirs)
            assert await ring.generate([1], 5) == reference(SHAPES["one"], [1], 5)

    asyncio.run(main())
