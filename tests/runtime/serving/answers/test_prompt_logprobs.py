"""Log-probabilities of a prompt's own tokens are those of the whole model, over any stages, whoever dies, and beside others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served import PROMPTS, VOCABULARY, Peer, model, reference, swarm_of

from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.text import ByteText
from fusion.runtime.planes.torch_decoding import TorchDecodingStage
from fusion.runtime.serving.answers.answer_text import PromptText
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.requests.prompt_logprobs import packed
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Logprobs, Piece, PromptPiece
from fusion.runtime.serving.requests.sampling_params import GREEDY
from fusion.runtime.serving.ring import sampling
from fusion.runtime.serving.ring.session import Opening, SessionId

PATIENT = FailoverConfig(recover_seconds=20)
LONG = tuple((7 * i + i // 9) % VOCABULARY for i in range(60))


async def told(peer: Peer, prompt: Sequence[int], **fields: Any) -> tuple[list[Logprobs | None], Answer]:
    """Of each token of the prompt, by that peer's gateway; the pieces say which tokens they are of."""
    request = GenerateRequest(prompt_ids=tuple(prompt), echo=True, **fields)
    ids, found, answered = list[int](), list[Logprobs | None](), False
    async with aclosing(peer.service.gateway.generate(request)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Answer):
                assert ids == list(prompt)
                return found, piece
            if isinstance(piece, PromptPiece):
                assert not answered and len(piece.ids) == len(piece.begins)
                ids += piece.ids
                found += piece.logprobs
            answered |= isinstance(piece, Piece)
    raise AssertionError("no answer")


def check(found: Sequence[Logprobs | None], prompt: Sequence[int], count: int) -> None:
    """To 1e-4 those of the whole model."""
    assert found[0] is None and len(found) == len(prompt)
    with torch.inference_mode():
        logits = model("llama")(torch.tensor([list(prompt)]), use_cache=False).logits[0]
    rows = logits.double().log_softmax(-1)
    for each, row, token in zip(found[1:], rows, prompt[1:], strict=False):
        assert each is not None and abs(each.chosen - float(row[token])) < 1e-4
        assert len(each.top) == count
        best = row.sort(descending=True, stable=True)
        for (other, value), expected in zip(each.top, best.values.tolist(), strict=False):
            assert abs(value - float(row[other])) < 1e-4 and abs(value - expected) < 1e-4


@pytest.mark.parametrize("stages", [1, 3])
def test_a_prompt_is_told_of_beside_others(stages: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(stages + 1, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", stages)
            peer = swarm.peers[-1]
            beside = asyncio.create_task(swarm.ask(prompt_ids=LONG, max_tokens=30))
            prompts = (*PROMPTS, LONG)
            asked = [told(peer, p, max_tokens=5, top_logprobs=3) for p in prompts]
            for prompt, (found, answer) in zip(prompts, await asyncio.gather(*asked), strict=True):
                check(found, prompt, 3)
                assert list(answer.tokens) == reference("llama", prompt, 5) and not answer.cached_tokens
            assert list((await beside).tokens) == reference("llama", LONG, 30)
            # What stages have of the prompt does not spare them a token of it.
            found, answer = await told(peer, LONG, max_tokens=0, top_logprobs=0)
            check(found, LONG, 0)
            assert (answer.tokens, answer.finish) == ((), "length")
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize(("together", "at_once"), [(True, 3), (False, 1)])
def test_logits_are_there_of_a_few_positions_at_once(
    together: bool, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "SCORED_BYTES", 3 * 4 * VOCABULARY)
    run, shown = TorchDecodingStage.run, list[int]()

    def counted(stage: TorchDecodingStage, pieces: Any) -> Any:
        found = run(stage, pieces)
        shown.extend(each["result/0"].shape[1] for each in found if "result/0" in each)
        return found

    monkeypatch.setattr(TorchDecodingStage, "run", counted)

    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 2)
            for peer in swarm.owners:
                for hosted in peer.service._hosted.values():
                    hosted.loaded.plane.batched = together
            shown.clear()
            found, answer = await told(swarm.peers[2], LONG, max_tokens=4, top_logprobs=1)
            check(found, LONG, 1)
            assert list(answer.tokens) == reference("llama", LONG, 4) and max(shown) == at_once

    asyncio.run(main())


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stage_dies_while_the_prompt_is_told_of(victim: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(5, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 3)
            await swarm.stand_by(swarm.peers[3], job, victim)
            request = GenerateRequest(prompt_ids=LONG, echo=True, max_tokens=6, top_logprobs=2)
            found, tokens, killed = list[Logprobs | None](), list[int](), False
            async with aclosing(swarm.peers[4].service.gateway.generate(request)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, PromptPiece):
                        found += piece.logprobs
                        if len(found) > 8 and not killed:
                            assert len(found) < len(LONG)
                            swarm.network.kill(swarm.owners[victim].id)
                            killed = True
                    elif isinstance(piece, Piece):
                        tokens.append(piece.id)
                    else:
                        assert piece.route[victim] == swarm.peers[3].id
            assert killed and tokens == reference("llama", LONG, 6)
            check(found, LONG, 2)
            await swarm.freed()

    asyncio.run(main())


def test_a_last_stage_of_the_release_before_is_told_from_one_that_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Opening.from_header.__func__  # type: ignore[attr-defined]

    def forgetful(cls: type[Opening], header: Any, **given: Any) -> Opening:
        return read(cls, {k: v for k, v in header.items() if k != "prompt_logprobs"}, **given)

    monkeypatch.setattr(Opening, "from_header", classmethod(forgetful))

    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 1)
            with pytest.raises(JobFailed, match=r"stage 0 of llama on .* is too old to know prompt_logprobs"):
                await told(swarm.peers[1], LONG, max_tokens=2, top_logprobs=1)
            assert len((await told(swarm.peers[1], LONG, max_tokens=2))[1].tokens) == 2

    asyncio.run(main())


def test_what_no_stage_can_tell_is_refused_in_a_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 1, cache="recompute")
            with pytest.raises(JobError, match=r"echo: no logprobs beside it .* without a KV cache"):
                await told(swarm.peers[1], LONG, max_tokens=2, top_logprobs=1)
            found, answer = await told(swarm.peers[1], LONG, max_tokens=2)
            assert found == [] and list(answer.tokens) == reference("llama", LONG, 2)
            with pytest.raises(JobError, match="so no token can follow"):
                await told(swarm.peers[1], LONG * 2, max_tokens=0)
            with pytest.raises(JobError, match="echo: ask a peer's HTTP API"):
                GenerateRequest(prompt="a", echo=True).to_frame()
            await swarm.freed()

    asyncio.run(main())


def test_the_text_of_a_prompt_has_whole_characters_alone() -> None:
    text, tokens = PromptText(ByteText()), "a\u00e9b".encode() + b"\xc3"
    assert text.read(tokens[:2], last=False) == ("a", (0, 1))
    assert text.read(tokens[2:], last=True) == ("\u00e9b", (1, 2, 3))
    assert text.length == 3


@pytest.mark.parametrize(
    ("payload", "line"),
    [
        (b"", "1 to 128 tokens"),
        (packed([Logprobs(-1.0, ((1, -1.0),))], 1)[:-1], "24 bytes for each"),
        (packed([Logprobs(-1.0, ((1, -1.0),))] * 129, 1), "1 to 128 tokens"),
        (packed([Logprobs(math.nan, ((1, -1.0),))], 1), "between -9999 and 0"),
        (packed([Logprobs(-1.0, ((1, 0.5),))], 1), "between -9999 and 0"),
        (packed([Logprobs(-1.0, ((9, -1.0),))], 1), "tokens that the model does not have"),
        (packed([Logprobs(-1.0, ((-1, -1.0),))], 1), "tokens that the model does not have"),
        (packed([Logprobs(-1.0, ((1, -1.0),))] * 5, 1), "tokens that the prompt does not have"),
    ],
)
def test_nonsense_of_a_last_stage_is_an_error(payload: bytes, line: str) -> None:
    opening = Opening(
        session=SessionId("s"), route=(), prompt_length=5, max_tokens=1, sampling=GREEDY, prompt_logprobs=1
    )
    with pytest.raises(JobError, match=line):
        opening.prompt_logprobs_of(1, memoryview(payload), 9)
