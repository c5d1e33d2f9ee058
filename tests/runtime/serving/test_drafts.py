"""A served model with a draft model: real models, stages that are killed, drafts that are none."""

from __future__ import annotations

import asyncio
import functools
import logging
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from support.served import MAX_SEQUENCE, Swarm, captured, model, reference, swarm_of

from fusion.dag.ir import serialise
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.stage_graphs import needed_bytes
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.drafts import draft_length
from fusion.runtime.serving.drafts.draft_files import ABOUT_FILE, GRAPH_FILE, WEIGHTS_FILE, AboutDraft
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.swarm.directory.records import Digest, JobId

PROMPT = (1, 2, 3, 4, 5, 6, 7)
TOKENS = 60
PATIENT = FailoverConfig(recover_seconds=20)
IDS = TensorType((symbol("batch"), symbol("odd")), "int64")
ODD = Graph(
    inputs=(Input("input_ids", IDS),),
    variables=(),
    nodes=(Node("n", "aten.neg", (Ref("input_ids"),), (IDS,)),),
    outputs=(Ref("n"),),
    symbols=("batch", "odd"),
)
SAMPLED = {"sampling": Sampling(temperature=0.7, top_k=20, seed=3)}


@pytest.fixture(autouse=True)
def short_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links of a test take no time, and drafting is to be worth it all the same."""
    monkeypatch.setattr(draft_length, "STEPS_A_TRIP", 1e-9)


@functools.cache
def draft(name: str) -> dict[str, bytes]:
    """The model of that name as a draft; its file by name."""
    return {
        GRAPH_FILE: serialise.encode(captured(name, "kv")),
        WEIGHTS_FILE: save({k: v.detach().clone() for k, v in variables_from_module(model(name)).items()}),
        ABOUT_FILE: AboutDraft(MAX_SEQUENCE).to_json(),
    }


async def serve_with(swarm: Swarm, files: dict[str, bytes], stages: int = 2, **options: Any) -> JobId:
    blobs = swarm.peers[-1].context.blobs
    named = tuple([(name, await blobs.put(content)) for name, content in files.items()])
    return await swarm.serve("llama", stages, files=named, **options)


def drafts_held(swarm: Swarm, job: JobId) -> list[Any]:
    hosted = [peer.service._hosted.get((job, 0)) for peer in swarm.peers]
    return [each.loaded.draft for each in hosted if each is not None]


@pytest.mark.parametrize(
    ("name", "sampled"),
    [
        ("llama", SAMPLED),
        ("gpt2", {}),
        pytest.param("llama", {}, marks=pytest.mark.slow),
        pytest.param("gpt2", SAMPLED, marks=pytest.mark.slow),
    ],
)
def test_an_answer_is_the_same_with_the_model_itself_or_another_as_its_draft(
    name: str, sampled: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "gpt2":  # it is always wrong, which would leave it silent most of the time
        monkeypatch.setattr("fusion.runtime.serving.ring.guesses.LONGEST_PAUSE", 1)

    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            job = await serve_with(swarm, draft(name))
            [loaded] = drafts_held(swarm, job)
            assert loaded is not None and loaded.weights_bytes
            turns = count_runs(loaded._plane)
            slow_down(swarm, job, 0.002)
            answers = await asyncio.gather(
                *(swarm.ask(prompt_ids=PROMPT[: n + 4], max_tokens=TOKENS, **sampled) for n in range(3))
            )
            assert len(turns) > 3
            if not sampled:
                assert [list(answer.tokens) for answer in answers] == [
                    reference("llama", PROMPT[: n + 4], TOKENS) for n in range(3)
                ]
            else:
                plain = [
                    await swarm.ask(prompt_ids=PROMPT[: n + 4], max_tokens=TOKENS, guesses=False, **sampled)
                    for n in range(3)
                ]
                assert [a.tokens for a in answers] == [a.tokens for a in plain]
            await swarm.freed()
            async with asyncio.timeout(10):
                while loaded.used_bytes():
                    await asyncio.sleep(0.002)

    asyncio.run(main())


def slow_down(swarm: Swarm, job: JobId, seconds: float) -> None:
    """The first stage waits for the second."""
    ring = swarm.owners[1].service._hosted[job, 1].stage
    passed = ring._pass_all_on

    async def unhurried(*given: Any) -> None:
        await asyncio.sleep(seconds)
        await passed(*given)

    ring._pass_all_on = unhurried  # type: ignore[method-assign]


def count_runs(plane: Any) -> list[int]:
    runs, run = list[int](), plane.run

    def counted(pieces: Any) -> Any:
        runs.append(len(pieces))
        return run(pieces)

    plane.run = counted
    return runs


def test_the_model_itself_guesses_nearly_every_token(tmp_path: Path) -> None:
    """What the last stage runs is a fraction of what it would without."""

    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await serve_with(swarm, draft("llama"))
            turns = count_runs(swarm.owners[1].service._hosted[job, 1].loaded.plane)
            slow_down(swarm, job, 0.02)
            answer = await swarm.ask(prompt_ids=PROMPT, max_tokens=TOKENS)
            assert list(answer.tokens) == reference("llama", PROMPT, TOKENS)
            assert len(turns) < TOKENS * 2 // 3

    asyncio.run(main())


def test_whoever_takes_the_first_stage_over_has_the_draft_and_the_answer_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT) as swarm:
            job = await serve_with(swarm, draft("llama"))
            successor = swarm.peers[2]
            await swarm.stand_by(successor, job, 0)
            request = GenerateRequest(prompt_ids=PROMPT, max_tokens=TOKENS)
            gateway = swarm.peers[-1].id
            async with swarm.client() as transport, aclosing(generate(transport, gateway, request)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Answer):
                        assert list(piece.tokens) == reference("llama", PROMPT, TOKENS)
                    elif piece.index == 20:
                        swarm.network.kill(swarm.owners[0].id)
            assert successor.service._hosted[job, 0].loaded.draft is not None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        ({GRAPH_FILE: b"no graph"}, "the graph of the draft of llama"),
        ({GRAPH_FILE: serialise.encode(ODD)}, "no size given for the symbol 'odd'"),
        ({WEIGHTS_FILE: save({"x": torch.zeros(2)})}, "served without its draft"),
        ({WEIGHTS_FILE: b"no tensors"}, "served without its draft"),
        ({ABOUT_FILE: b"{}"}, "max_sequence is missing"),
        ({ABOUT_FILE: b"[" * 3000}, "draft.json"),
        ({ABOUT_FILE: b'{"max_sequence": 0}'}, "at least 1"),
    ],
)
def test_a_draft_that_is_none_is_said_in_one_line_and_the_model_is_served(
    spoiled: dict[str, bytes], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await serve_with(swarm, {**draft("llama"), **spoiled}, 1)
            assert drafts_held(swarm, job) == [None]
            answer = await swarm.ask(prompt_ids=PROMPT, max_tokens=5)
            assert list(answer.tokens) == reference("llama", PROMPT, 5)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    [line] = [record.getMessage() for record in caplog.records if "draft" in record.getMessage()]
    assert said in line and "\n" not in line


def test_a_draft_that_needs_more_than_the_manifest_says_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(times: int) -> Any:
        async with swarm_of(2, tmp_path / str(times)) as swarm:
            job = await serve_with(swarm, draft("llama"), 1)
            stages = await swarm.owners[0].service._loader.stages(job, swarm.manifests[job])
            alone = needed_bytes(stages[0], swarm.manifests[job])
            with monkeypatch.context() as strict:
                strict.setattr("fusion.runtime.job.stage_graphs.TOLERATED_BYTES", 0)
                again = await serve_with(swarm, draft("llama"), 1, memory_bytes=(times * alone,))
                return drafts_held(swarm, again)

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(main(1)) == [None]
    assert any("needs" in each and "its manifest says" in each for each in caplog.messages)
    [found] = asyncio.run(main(2))
    assert found is not None


def test_the_drafts_memory_counts_as_the_stages(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await serve_with(swarm, draft("llama"), 1)
            memory: MemoryBudget = swarm.owners[0].context.memory
            [found] = drafts_held(swarm, job)
            own = swarm.owners[0].service._hosted[job, 0].loaded.stage_bytes
            assert memory.by_place[job, 0] == own + found.weights_bytes

    asyncio.run(main())


def test_a_draft_that_nobody_has_keeps_nobody_from_serving(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            lost = tuple((name, Digest("0" * 63 + str(i))) for i, name in enumerate(draft("llama")))
            job = await swarm.serve("llama", 1, files=lost)
            assert drafts_held(swarm, job) == [None]

    asyncio.run(main())
