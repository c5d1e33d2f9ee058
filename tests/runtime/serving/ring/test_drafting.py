"""A draft model at the first stage of a ring: the same tokens with any, in fewer trips with a good one."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import pytest
from support.toy_ring import GREEDY, SHAPES, VOCABULARY, Ring, WholeModel, make_stages, reference, ring_of

from fusion.runtime.serving.drafts import draft_length
from fusion.runtime.serving.drafts.draft_model import DraftModel
from fusion.runtime.serving.drafts.drafter import DraftStep
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.frames import plan_ring
from fusion.runtime.serving.ring.session import SessionId
from fusion.runtime.serving.ring.stage_session import StageRunner

SEEDED = Sampling(temperature=0.6, top_k=3, seed=5)
POSITIONS = 300


@pytest.fixture(autouse=True)
def short_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of a test take no time, and drafting is to be worth it all the same."""
    monkeypatch.setattr(draft_length, "STEPS_A_TRIP", 1e-9)


def draft_of(plane: WholeModel, positions: int = POSITIONS) -> DraftModel:
    return DraftModel(plane, VOCABULARY, positions, weights_bytes=1)


async def freed(ring: Ring, plane: WholeModel) -> None:
    await ring.freed()
    async with asyncio.timeout(10):
        while plane.seen:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("shape", "sampling"), [("two", SEEDED), ("three", GREEDY), ("skip", GREEDY), ("late-ids", SEEDED)]
)
@pytest.mark.parametrize("wrong", [False, True])
def test_a_ring_gives_the_same_tokens_with_any_draft(shape: str, sampling: Sampling, wrong: bool) -> None:
    stages = SHAPES[shape]

    async def main() -> None:
        plane = WholeModel(stages, wrong=wrong)
        async with ring_of(stages, max_sequence=POSITIONS, draft=draft_of(plane)) as ring:
            for prompt in ([3, 1, 2] * 6, list(range(17))):
                found = await ring.generate(prompt, 60, guesses=True, sampling=sampling)
                assert found == reference(stages, prompt, 60, sampling)
            assert plane.runs
            await freed(ring, plane)

    asyncio.run(main())


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1.0, top_k=4, seed=5)], ids=["greedy", "drawn"]
)
def test_with_a_draft_that_is_right_the_last_stage_has_few_turns(sampling: Sampling) -> None:
    stages, turns = SHAPES["three"], list[int]()

    def on_run(stage: int, _: str, start: int, length: int) -> None:
        if stage == 2:
            turns.append(length)
            time.sleep(0.01)  # a trip takes longer than the draft's steps, however busy this machine is

    async def main() -> None:
        plane = WholeModel(stages)
        async with ring_of(stages, max_sequence=POSITIONS, draft=draft_of(plane), on_run=on_run) as ring:
            prompt = list(range(17))
            found = await ring.generate(prompt, 100, guesses=True, sampling=sampling)
            assert found == reference(stages, prompt, 100, sampling)
        assert len(turns) < 50, turns

    asyncio.run(main())


def test_sessions_with_a_draft_share_a_ring_with_others() -> None:
    stages = SHAPES["two"]

    async def main() -> None:
        plane = WholeModel(stages)
        async with ring_of(stages, max_sequence=200, draft=draft_of(plane)) as ring:
            prompts = [[(i * 7 + j) % VOCABULARY for j in range(4 + i * 9)] for i in range(8)]
            answers = await asyncio.gather(
                *(ring.generate(p, 60, guesses=i % 3 > 0) for i, p in enumerate(prompts))
            )
            assert answers == [reference(stages, p, 60) for p in prompts]
            await freed(ring, plane)

    asyncio.run(main())


def test_a_draft_that_reads_less_than_the_model_guesses_the_beginning() -> None:
    stages = SHAPES["two"]

    async def main() -> None:
        plane = WholeModel(stages)
        async with ring_of(stages, max_sequence=200, draft=draft_of(plane, positions=40)) as ring:
            for prompt in (list(range(20)), [i % 7 for i in range(60)]):
                assert await ring.generate(prompt, 60, guesses=True) == reference(stages, prompt, 60)
            await freed(ring, plane)

    asyncio.run(main())


def test_a_draft_that_fails_is_said_once_and_answers_go_on(caplog: pytest.LogCaptureFixture) -> None:
    stages = SHAPES["two"]

    async def main() -> None:
        plane = WholeModel(stages)
        async with ring_of(stages, max_sequence=200, draft=draft_of(plane)) as ring:
            assert await ring.generate([3], 30, guesses=True) == reference(stages, [3], 30)
            plane.broken = True
            for prompt in ([4], [5, 6]):
                assert await ring.generate(prompt, 30, guesses=True) == reference(stages, prompt, 30)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert caplog.messages == ["the draft model guesses no more: RuntimeError: the device is on fire"]


def test_where_there_is_no_memory_for_a_draft_the_answer_goes_on_without() -> None:
    stages = SHAPES["two"]

    async def main() -> None:
        plane = WholeModel(stages)
        plane.full = True
        async with ring_of(stages, max_sequence=200, draft=draft_of(plane)) as ring:
            assert await ring.generate([3], 30, guesses=True) == reference(stages, [3], 30)
            assert not plane.runs and not plane.seen
            plane.full = False
            assert await ring.generate([3], 30, guesses=True) == reference(stages, [3], 30)
            assert plane.runs

    asyncio.run(main())


def test_without_guesses_the_draft_is_not_run() -> None:
    stages = SHAPES["two"]

    async def main() -> None:
        plane = WholeModel(stages)
        async with ring_of(stages, max_sequence=200, draft=draft_of(plane)) as ring:
            assert await ring.generate([3], 30) == reference(stages, [3], 30)
            assert not plane.runs

    asyncio.run(main())


def test_an_answer_that_has_ended_is_drafted_no_further_though_its_gateway_keeps_it_open() -> None:
    stages = SHAPES["one"]

    async def main() -> None:
        plane = WholeModel(stages)
        async with ring_of(stages, max_sequence=POSITIONS, draft=draft_of(plane)) as ring:
            streams, prompt = await ring.connect(), list(range(17))
            opening = ring.opening(prompt, POSITIONS - len(prompt))
            end = reference(stages, prompt, 10)[-1]
            ring.rings[0]._position = replace(
                ring.rings[0]._position, serve=replace(ring.serve, end_tokens=(end,))
            )
            await ring.open(streams, opening)
            await ring.prompt(streams, opening, prompt, guesses=True)
            assert (await ring.tokens(streams[-1]))[-1] == end
            runs = plane.runs
            await asyncio.sleep(0.1)
            assert plane.runs <= runs + 1, "one was under way"

    asyncio.run(main())


def test_what_the_draft_keeps_gives_way_to_sessions() -> None:
    stages = make_stages(2)
    plane = WholeModel(stages)

    def account() -> None:
        if limit and plane.used_bytes():
            raise MemoryError("full")

    limit = False
    runner = StageRunner(WholeModel(stages), plan_ring(stages, 0), POSITIONS, account, draft_of(plane))
    step = DraftStep("s", 20, 0, (1, 2), last=True)
    assert runner.run_draft([step]) != [None] and plane.seen
    limit = True
    runner.begin(SessionId("t"), 20, 10)
    assert not plane.seen
    assert runner.run_draft([DraftStep("s", 20, 2, (3,), last=True)]) == [None]
