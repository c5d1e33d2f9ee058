"""A second answer over the same stages begins while they open its session, behind what they retained; what else may be reused, or is
not known, waits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.served import Swarm, reference, swarm_of

from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.answers.gateway_session import GatewaySession, GatewaySessions
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.runtime.serving.ring.openings import EARLY_BYTES
from fusion.runtime.serving.ring.stage import RingStage
from fusion.runtime.serving.ring.stage_session import StageRunner
from fusion.swarm.transport import PeerId

PATIENT = FailoverConfig(recover_seconds=20)
PROMPT = (1, 2, 3, 4, 5, 6, 7)
LONG = tuple((13 * i) % 97 for i in range(70))  # more than a block


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each session, whether its prompt went out while stages were still asked to open it."""
    found: list[bool] = []
    prompt = GatewaySession.prompt

    def seen(session: GatewaySession, *args: Any, **options: Any) -> None:
        found.append(bool(session.waiting))
        prompt(session, *args, **options)

    monkeypatch.setattr(GatewaySession, "prompt", seen)
    return found


def ring_of(swarm: Swarm, index: int) -> RingStage:
    [hosted] = swarm.owners[index].service._hosted.values()
    return hosted.stage


def test_an_answer_begins_early_where_the_stages_are_known_and_hold_nothing_of_it(
    begun: list[bool], tmp_path: Path
) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await swarm.serve("llama", 3)
            async with swarm.client() as transport:

                async def ask(prompt: tuple[int, ...], tokens: int, **fields: Any) -> Answer:
                    request = GenerateRequest(prompt_ids=prompt, max_tokens=tokens, **fields)
                    answer = await complete(transport, swarm.peers[-1].id, request)
                    assert list(answer.tokens) == reference("llama", prompt, tokens)
                    return answer

                await ask(PROMPT, 9)
                await ask(PROMPT, 9)
                assert begun == [False, True]
                assert [(await ask(LONG, 9)).cached_tokens for _ in range(2)] == [0, 64]
                assert begun[2:] == [True, True]
                # What the stages have not said yet that they know.
                await ask(PROMPT, 2, top_logprobs=1)
                await ask(PROMPT, 2, top_logprobs=1)
                assert begun[4:] == [False, True]
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_second_turn_is_given_all_the_same_where_a_stage_retains_nothing_any_more(
    begun: list[bool], tmp_path: Path, index: int
) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 3)
            async with swarm.client() as transport:

                async def ask(prompt: tuple[int, ...]) -> Answer:
                    request = GenerateRequest(prompt_ids=prompt, max_tokens=9)
                    return await complete(transport, swarm.peers[-1].id, request)

                turn = (*LONG, *(await ask(LONG)).tokens, 5, 6)
                ring_of(swarm, index).shed(1 << 40)
                answers = [await ask(turn) for _ in range(2)]
                assert all(list(answer.tokens) == reference("llama", turn, 9) for answer in answers)
                assert [answer.cached_tokens for answer in answers] == [0, 64]
                assert begun == [False, True, False, True]
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize("why", ["the release before", "keeps nothing"])
def test_what_stages_retain_that_say_nothing_of_it_is_asked_for_first(
    begun: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def older(header: Any) -> Any:
        return {**header, "knows": [each for each in header["knows"] if each != "expects"]}

    received = GatewaySessions._received_opened
    if why == "keeps nothing":
        monkeypatch.setattr(StageRunner, "chunk_invariant", False)
    else:
        monkeypatch.setattr(
            GatewaySessions,
            "_received_opened",
            lambda sessions, session, stage, frame: received(
                sessions, session, stage, replace(frame, header=older(frame.header))
            ),
        )

    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await swarm.serve("llama", 3)
            async with swarm.client() as transport:
                request = GenerateRequest(prompt_ids=LONG, max_tokens=9)
                answers = [await complete(transport, swarm.peers[-1].id, request) for _ in range(2)]
            assert [answer.cached_tokens for answer in answers] == [0, 0 if why == "keeps nothing" else 64]
            assert begun == [False, False]
            await swarm.freed()

    asyncio.run(main())


def test_a_stage_cannot_say_again_that_it_has_opened_a_session(
    begun: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With less that it holds it would have the answer begin anew as often as it likes, and nobody to blame."""

    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 3)
            sessions = ring_of(swarm, 1)._sessions
            prepare, said = sessions._prepare, list[str]()

            async def twice(session: Any, *given: Any) -> None:
                await prepare(session, *given)
                if not said:
                    said.append(session.id)
                    session.gateway.post("opened", {"session": session.id, "knows": [], "held": 0})

            monkeypatch.setattr(sessions, "_prepare", twice)
            answer = await swarm.ask(prompt_ids=LONG, max_tokens=9)
            assert list(answer.tokens) == reference("llama", LONG, 9)
            assert said and "stage 1 of llama" in caplog.text and "opened twice" in caplog.text
            await swarm.freed()

    with caplog.at_level("DEBUG"):
        asyncio.run(main())


def test_an_answer_whose_chunks_came_too_early_is_given_all_the_same(
    begun: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 3)
            await swarm.ask(prompt_ids=PROMPT, max_tokens=2)
            sessions = ring_of(swarm, 1)._sessions
            reserve, early = sessions._reserve, asyncio.Event()

            async def slowly(session: Any) -> None:
                if not early.is_set():
                    while not sessions._early._waiting:
                        await asyncio.sleep(0.001)
                    early.set()
                    sessions._early.add(session.id, PeerId("another"), lambda session: None, EARLY_BYTES)
                await reserve(session)

            monkeypatch.setattr(sessions, "_reserve", slowly)
            answer = await swarm.ask(prompt_ids=PROMPT, max_tokens=9)
            assert list(answer.tokens) == reference("llama", PROMPT, 9)
            assert early.is_set() and begun == [False, True, False]
            await swarm.freed()

    asyncio.run(main())
