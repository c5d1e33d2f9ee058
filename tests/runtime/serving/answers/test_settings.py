"""What users may ask of an answer beside its length: settings of the sampler, log-probabilities, texts that end it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served import PROMPTS, VOCABULARY, Swarm, model, reference, seeded_reference, swarm_of

from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.requests.client import complete, generate
from fusion.runtime.serving.requests.request import Answer, GenerateRequest, Piece
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.session import Opening
from fusion.swarm.errors import RemoteError
from fusion.swarm.transport import PeerId

PROMPT = "def "
PENALISED = Sampling(repetition_penalty=1.4, frequency_penalty=0.9, presence_penalty=0.4)
PATIENT = FailoverConfig(recover_seconds=20)


async def pieces_of(swarm: Swarm, peer: int, request: GenerateRequest) -> tuple[list[Piece], Answer]:
    found: list[Piece] = []
    async with (
        swarm.client() as transport,
        aclosing(generate(transport, swarm.peers[peer].id, request)) as pieces,
    ):
        async for piece in pieces:
            if isinstance(piece, Answer):
                return found, piece
            found.append(piece)
    raise AssertionError("no answer")


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5),
        Sampling(frequency_penalty=1.5, temperature=0.9, seed=5),
        Sampling(presence_penalty=-1.0, logit_bias=((7, 3.0), (9, -100.0))),
        Sampling(temperature=1.5, min_p=0.2, seed=6),
    ],
    ids=["repetition", "frequency", "presence-bias", "min-p"],
)
def test_each_setting_gives_the_tokens_of_the_whole_model(
    stages: int, sampling: Sampling, tmp_path: Path
) -> None:
    async def main() -> None:
        async with swarm_of(stages + 1, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", stages)
            answer = await swarm.ask(prompt_ids=tuple(PROMPTS[1]), max_tokens=30, sampling=sampling)
            assert list(answer.tokens) == seeded_reference("llama", PROMPTS[1], 30, sampling)
            assert list(answer.tokens) != reference("llama", PROMPTS[1], 30), "the setting did nothing"
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize("sampling", [Sampling(), PENALISED], ids=["greedy", "penalised"])
def test_logprobs_are_those_of_the_whole_model_whatever_is_set(sampling: Sampling, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("gpt2", 2)
            request = GenerateRequest(
                prompt_ids=tuple(PROMPTS[2]), max_tokens=10, logits=True, top_logprobs=5, sampling=sampling
            )
            tokens = list(PROMPTS[2])
            pieces, _ = await pieces_of(swarm, 2, request)
            for piece in pieces:
                with torch.inference_mode():
                    whole = model("gpt2")(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                found = torch.frombuffer(bytearray(piece.logits), dtype=torch.float32)
                # To the bit those of the logits that the stage had; close to those of another run.
                assert piece.logprob == float(found.double().log_softmax(0)[piece.id])
                best = found.double().log_softmax(0).sort(descending=True, stable=True)
                expected = list(zip(best.indices[:5].tolist(), best.values[:5].tolist(), strict=True))
                assert list(piece.top_logprobs) == expected
                assert abs(piece.logprob - float(whole.log_softmax(0)[piece.id])) < 1e-4
                tokens.append(piece.id)
            assert len(tokens) == len(PROMPTS[2]) + 10
            [first], _ = await pieces_of(
                swarm, 2, GenerateRequest(prompt_ids=(1,), max_tokens=1, top_logprobs=0)
            )
            assert first.logprob is not None and first.top_logprobs == ()
            [plain], _ = await pieces_of(swarm, 2, GenerateRequest(prompt_ids=(1,), max_tokens=1))
            assert plain.logprob is None and plain.top_logprobs == ()

    asyncio.run(main())


# --- texts that end an answer


@pytest.mark.parametrize(("begin", "length"), [(3, 1), (10, 4), (20, 7), (36, 4)])
def test_an_answer_ends_before_a_stop_text_over_any_tokens(begin: int, length: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 2, byte_level=True)
            free = bytes(reference("llama", PROMPT.encode(), 40)).decode()
            stop = free[begin : begin + length]
            end = free.index(stop) + length
            request = GenerateRequest(prompt=PROMPT, max_tokens=90, stop=("no such text", stop))
            pieces, answer = await pieces_of(swarm, 2, request)
            assert answer.text == "".join(piece.text for piece in pieces) == free[: end - length]
            assert answer.finish == "stop" and bytes(answer.tokens).decode() == free[:end]
            assert [piece.id for piece in pieces] == list(answer.tokens)
            await swarm.freed()

    asyncio.run(main())


def test_every_stage_is_free_before_the_client_has_read_the_last_piece(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 2, byte_level=True)
            free = bytes(reference("llama", PROMPT.encode(), 10)).decode()
            request = GenerateRequest(prompt=PROMPT, max_tokens=90, stop=(free[4:6],))
            gateway = swarm.peers[1].service.gateway
            async with aclosing(gateway.generate(request)) as pieces:
                while (piece := await anext(pieces)) and isinstance(piece, Piece) and piece.index < 5:
                    assert any(peer.open_sessions for peer in swarm.peers) or piece.index == 0
                await swarm.freed()  # the generator waits for its reader, the stages do not
                answer = await anext(pieces)
            assert isinstance(answer, Answer) and answer.text == free[:4]

    asyncio.run(main())


def test_text_that_only_looked_like_a_stop_is_given_at_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            free = bytes(reference("llama", PROMPT.encode(), 12)).decode()
            request = GenerateRequest(prompt=PROMPT, max_tokens=12, stop=(free[9:12] + "!",))
            pieces, answer = await pieces_of(swarm, 0, request)
            assert (answer.text, answer.finish) == (free, "length")
            assert "".join(piece.text for piece in pieces) == free[:9]

    asyncio.run(main())


@pytest.mark.parametrize(
    "at", [9, 11, 13, 14, *(pytest.param(at, marks=pytest.mark.slow) for at in (8, 10, 12, 15))]
)
def test_a_stop_text_is_found_where_another_gateway_goes_on_in_it(at: int, tmp_path: Path) -> None:
    """The tokens 10 to 13 are the stop text; the first gateway vanishes after `at` tokens."""

    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 2, byte_level=True)
            tokens = reference("llama", PROMPT.encode(), 40)
            free = bytes(tokens).decode()
            first, second = swarm.peers[2:]

            async def another(gone: frozenset[PeerId]) -> PeerId | None:
                return second.id

            request = GenerateRequest(prompt=PROMPT, max_tokens=40, stop=(free[10:14],))
            shown = ""
            async with (
                swarm.client() as transport,
                aclosing(generate(transport, first.id, request, another)) as pieces,
            ):
                async for piece in pieces:
                    if isinstance(piece, Answer):
                        assert (piece.text, piece.finish) == (free[:10], "stop")
                        assert list(piece.tokens) == tokens[:14]
                        break
                    shown += piece.text
                    if piece.index == min(at, 14) - 1:
                        swarm.network.kill(first.id)
            assert shown == free[:10]
            await swarm.freed()

    asyncio.run(main())


def test_an_answer_that_had_its_stop_text_already_needs_no_stage(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            request = GenerateRequest(prompt=PROMPT, max_tokens=40, answered=tuple(b"naive"), stop=("ive",))
            async with swarm.client() as transport:
                answer = await complete(transport, swarm.peers[1].id, request)
            assert (answer.text, answer.finish, answer.route) == ("na", "stop", ())
            assert answer.tokens == request.answered

    asyncio.run(main())


# --- what cannot be


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ("x",)}, "stop: this model has no tokenizer"),
        ({"sampling": Sampling(logit_bias=((VOCABULARY, 1.0),))}, "logit_bias: .* 0 to 127, not 128"),
    ],
)
def test_a_request_that_cannot_work_is_one_line(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("gpt2", 1)
            with pytest.raises(RemoteError, match=message):
                await swarm.ask(prompt_ids=(1, 2), **fields)
            assert not swarm.peers[0].open_sessions

    asyncio.run(main())


def test_a_stage_of_the_release_before_never_gives_other_tokens_than_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes over the fields that it does not know: the gateway sees so before there is a token, and goes elsewhere."""
    old: set[PeerId] = set()
    read = Opening.from_header.__func__  # type: ignore[attr-defined]

    def forgetful(cls: type[Opening], header: Any, **given: Any) -> Opening:
        names = ("temperature", "top_k", "top_p", "seed")
        if PeerId(header["route"][-1][0]) in old:
            header = {
                name: value for name, value in header.items() if name not in ("top_logprobs", "answered")
            }
            header["sampling"] = {name: header["sampling"][name] for name in names}
        return read(cls, header, **given)

    monkeypatch.setattr(Opening, "from_header", classmethod(forgetful))

    async def main() -> None:
        async with swarm_of(4, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 2)
            old.add(swarm.owners[1].id)
            prompt = tuple(PROMPTS[1])
            asked: dict[str, Any] = {"prompt_ids": prompt, "max_tokens": 12}
            assert list((await swarm.ask(**asked)).tokens) == reference("llama", prompt, 12)
            line = "stage 1 of llama on .* is too old to know repetition_penalty, frequency_penalty, presence"
            with pytest.raises(RemoteError, match=line):
                await swarm.ask(**asked, sampling=PENALISED)
            with pytest.raises(RemoteError, match="is too old to know top_logprobs"):
                await swarm.ask(**asked, top_logprobs=1)
            await swarm.freed()
            claim = swarm.owners[1].context.leases.holds(job, 1)
            assert claim is not None
            await swarm.hold(swarm.peers[2], job, 1, over=claim.term)
            answer = await swarm.ask(**asked, sampling=PENALISED)
            assert list(answer.tokens) == seeded_reference("llama", prompt, 12, PENALISED)
            assert answer.route[1] == swarm.peers[2].id

    asyncio.run(main())
