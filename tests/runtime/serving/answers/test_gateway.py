"""Any peer answers for any model: real captured models over the in-memory swarm, against `generate()`."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served import (
    MAX_SEQUENCE,
    PROMPTS,
    VOCABULARY,
    captured,
    model,
    reference,
    seeded_reference,
    swarm_of,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from fusion.runtime.job.text import TokenizerText
from fusion.runtime.serving.answers import catalog
from fusion.runtime.serving.grammar.matcher import GrammarsBusy
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import DEFAULT_MAX_TOKENS, Answer, GenerateRequest, Piece
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import RemoteError
from fusion.swarm.transport import PeerId


def tokenizer_json() -> bytes:
    """Byte-level BPE without merges: ids 0..127 are single bytes, so most characters take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


@pytest.mark.parametrize(("name", "stages"), [("llama", 1), ("llama", 3), ("gpt2", 2)])
def test_answers_are_those_of_generate_whichever_peer_is_asked(
    name: str, stages: int, tmp_path: Path
) -> None:
    async def main() -> None:
        async with swarm_of(stages + 1, tmp_path) as swarm:
            await swarm.serve(name, stages)
            for number, prompt in enumerate(PROMPTS):
                answer = await swarm.ask(
                    number % (stages + 1), model=name, prompt_ids=tuple(prompt), max_tokens=30
                )
                assert list(answer.tokens) == reference(name, prompt, 30)
                assert len(set(answer.tokens)) > 5, "an answer that does not vary proves nothing"
                assert answer.route == tuple(peer.id for peer in swarm.owners)
                assert answer.finish == "length" and answer.prompt_tokens == len(prompt)
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize("cuts", [(2,), (5, 6), (40, 70), (124,)])
def test_any_cut_gives_the_same_answer(cuts: tuple[int, ...], tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(len(cuts) + 2, tmp_path) as swarm:
            await swarm.serve("llama", len(cuts) + 1, cuts=cuts)
            answer = await swarm.ask(prompt_ids=tuple(PROMPTS[1]), max_tokens=12)
            assert list(answer.tokens) == reference("llama", PROMPTS[1], 12)

    asyncio.run(main())


def test_seeded_sampling_is_that_of_the_whole_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            await swarm.serve("llama", 2)
            for sampling in (
                Sampling(temperature=0.8, seed=11),
                Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=12),
            ):
                asked: dict[str, Any] = {
                    "prompt_ids": tuple(PROMPTS[1]),
                    "max_tokens": 16,
                    "sampling": sampling,
                }
                answer = await swarm.ask(**asked)
                assert list(answer.tokens) == seeded_reference("llama", PROMPTS[1], 16, sampling)
                assert answer.tokens == (await swarm.ask(0, **asked)).tokens
            unseeded = {**asked, "seeded": False, "max_tokens": 32}
            assert (await swarm.ask(**unseeded)).tokens != (await swarm.ask(**unseeded)).tokens

    asyncio.run(main())


def test_logits_are_those_of_the_full_recomputation(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await swarm.serve("gpt2", 3)
            request = GenerateRequest(prompt_ids=tuple(PROMPTS[2]), max_tokens=10, logits=True)
            tokens = list(PROMPTS[2])
            async with (
                swarm.client() as transport,
                aclosing(generate(transport, swarm.peers[3].id, request)) as pieces,
            ):
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        with torch.inference_mode():
                            whole = model("gpt2")(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                        ours = torch.frombuffer(bytearray(piece.logits), dtype=torch.float32)
                        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-4)
                        tokens.append(piece.id)
            assert len(tokens) == len(PROMPTS[2]) + 10

    asyncio.run(main())


def test_several_clients_at_once_get_their_own_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            await swarm.serve("llama", 3)
            prompts = [[(i * 31 + j * 7) % VOCABULARY for j in range(1 + 5 * i)] for i in range(6)]
            answers = await asyncio.gather(
                *(swarm.ask(i % 3, prompt_ids=tuple(p), max_tokens=20) for i, p in enumerate(prompts))
            )
            assert [list(a.tokens) for a in answers] == [reference("llama", p, 20) for p in prompts]
            await swarm.freed()

    asyncio.run(main())


def test_a_model_served_without_a_cache_is_exact_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            await swarm.serve("llama", 2, cache="recompute")
            answer = await swarm.ask(prompt_ids=tuple(PROMPTS[1]), max_tokens=12)
            assert list(answer.tokens) == reference("llama", PROMPTS[1], 12)

    asyncio.run(main())


def test_two_models_on_the_same_peers(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            await swarm.serve("llama", 2)
            await swarm.serve("gpt2", 2)
            both = await asyncio.gather(
                *(swarm.ask(model=name, prompt_ids=(9, 8), max_tokens=10) for name in ("llama", "gpt2"))
            )
            assert [list(a.tokens) for a in both] == [reference(n, (9, 8), 10) for n in ("llama", "gpt2")]
            with pytest.raises(RemoteError, match=r"choose one; there are: gpt2, llama"):
                await swarm.ask(prompt_ids=(1,))

    asyncio.run(main())


def test_a_name_means_the_newest_model_of_its_author_once_all_of_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "NAMED_SECONDS", 0.0)

    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            gateway = swarm.peers[3].service.gateway._catalog
            gateway._fresh_seconds = gateway.routes._fresh_seconds = 0.0

            async def asked() -> tuple[int, list[int]]:
                answer = await swarm.ask(3, model="live", prompt_ids=(1, 2, 3), max_tokens=12)
                return len(answer.route), list(answer.tokens)

            async def launched(name: str, stages: int, at: int) -> JobId:
                made = captured(name, "kv"), model(name)
                return await swarm.serve("live", stages, made=made, launched_at=at)

            old, new = (reference(name, (1, 2, 3), 12) for name in ("llama", "gpt2"))
            assert old != new
            first = await launched("llama", 1, 1)
            assert await asked() == (1, old)
            hold, waiting = swarm.hold, list[tuple[Any, ...]]()

            async def held_later(peer: Any, job: JobId, stage: int, **given: Any) -> Any:
                if stage == 2:
                    waiting.append((peer, job, stage))
                    return None
                return await hold(peer, job, stage, **given)

            monkeypatch.setattr(swarm, "hold", held_later)
            await launched("gpt2", 3, 2)
            assert await asked() == (1, old), "nobody holds its last stage"
            await hold(*waiting[0])
            assert await asked() == (3, new)
            # A stranger's model of that name, however new, is another one.
            monkeypatch.setattr(swarm, "hold", hold)
            swarm.author = swarm.given.identity()
            await launched("llama", 2, 3)
            assert await asked() == (3, new)
            assert await swarm.ask(3, model=first, prompt_ids=(1, 2, 3), max_tokens=12)

    asyncio.run(main())


def test_text_streams_in_whole_characters_and_ends_with_an_end_token(tmp_path: Path) -> None:
    async def main() -> None:
        end = reference("llama", list(b"def "), 40)[25]
        async with swarm_of(2, tmp_path) as swarm:
            await swarm.serve("llama", 2, byte_level=True, serve={"end_tokens": (end,)})
            texts, answer = [], None
            async with (
                swarm.client() as transport,
                aclosing(
                    generate(transport, swarm.peers[0].id, GenerateRequest(prompt="def ", max_tokens=40))
                ) as pieces,
            ):
                async for piece in pieces:
                    if isinstance(piece, Answer):
                        answer = piece
                    else:
                        texts.append(piece.text)
            expected = reference("llama", list(b"def "), 40)
            expected = expected[: expected.index(end) + 1]
            assert answer is not None and answer.finish == "stop"
            assert list(answer.tokens) == expected and len(expected) < 40
            assert answer.text == "".join(texts) == bytes(expected[:-1]).decode()

    asyncio.run(main())


def test_a_tokenizer_travels_with_the_model_and_stays_when_the_launcher_leaves(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            tokenizer, launcher = tokenizer_json(), swarm.peers[-1].context.blobs
            digest = await launcher.put(tokenizer)
            await swarm.serve("gpt2", 1, tokenizer=digest)
            await launcher.drop(digest)
            local = Tokenizer.from_str(tokenizer.decode())
            answer = await swarm.ask(1, prompt="if x:", max_tokens=20)
            expected = reference("gpt2", local.encode("if x:").ids, 20)
            assert list(answer.tokens) == expected
            assert len(answer.text) > 10 and answer.text == local.decode(expected).rstrip("\ufffd")

    asyncio.run(main())


def watch_encode(patch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """`before` is called, in its thread, with each text that a tokenizer is about to read."""

    def encode(self: TokenizerText, prompt: str, *, plain: bool = True) -> list[int]:
        before(prompt)
        return original(self, prompt, plain=plain)

    original = TokenizerText.encode
    patch.setattr(TokenizerText, "encode", encode)


def test_a_prompt_that_no_position_could_hold_never_reaches_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    threads: set[str] = set()

    def before(prompt: str) -> None:
        read.append(len(prompt))
        threads.add(threading.current_thread().name)

    watch_encode(monkeypatch, before)

    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm:
            digest = await swarm.peers[0].context.blobs.put(tokenizer_json())
            await swarm.serve("gpt2", 1, tokenizer=digest)
            with pytest.raises(RemoteError, match=r"prompt: \d+ bytes of text; the model takes"):
                await swarm.ask(prompt="x" * (MAX_SEQUENCE * 16 + 1), max_tokens=1)
            assert read == []
            with pytest.raises(RemoteError, match="prompt: the model takes"):
                await swarm.ask(prompt="x" * (MAX_SEQUENCE * 16), max_tokens=1)
            assert read == [MAX_SEQUENCE * 16] and "MainThread" not in threads

    asyncio.run(main())


def test_a_prompt_that_takes_long_to_read_holds_up_no_answer_and_one_prompt_of_each_other_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go, read = threading.Event(), threading.Event(), list[str]()

    def before(prompt: str) -> None:
        if prompt == "long":
            reading.set()
            go.wait()
        read.append(prompt)

    watch_encode(monkeypatch, before)

    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm:
            digest = await swarm.peers[0].context.blobs.put(tokenizer_json())
            await swarm.serve("gpt2", 1, tokenizer=digest)
            gateway = swarm.peers[0].service.gateway
            served = await gateway.catalog.find("")
            one, other = PeerId("http/one"), PeerId("http/other")
            try:
                asked = [asyncio.create_task(gateway.texts.encode(served, one, "long"))]
                await asyncio.to_thread(reading.wait)
                answer = await swarm.ask(prompt_ids=(5, 9), max_tokens=8)
                assert list(answer.tokens) == reference("gpt2", [5, 9], 8) and answer.text
                asked += [asyncio.create_task(gateway.texts.encode(served, one, "again")) for _ in range(3)]
                await asyncio.sleep(0)
                asked.append(asyncio.create_task(gateway.texts.encode(served, other, "other")))
                await asyncio.sleep(0)
            finally:
                go.set()
            await asyncio.gather(*asked)
            assert read.index("other") <= 2

    asyncio.run(main())


def test_a_schema_counts_for_whoever_an_answer_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = list[PeerId]()

    async def busy(*arguments: Any) -> Any:
        tenants.append(arguments[-1])
        raise GrammarsBusy

    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            gateway = swarm.peers[0].service.gateway
            monkeypatch.setattr(gateway, "_open_grammar", busy)
            asked = GenerateRequest(prompt_ids=(5, 9), schema="{}")
            for tenant in (PeerId("http/one"), PeerId("http/other"), None):
                with pytest.raises(GrammarsBusy):
                    await anext(gateway.generate(asked, tenant=tenant))
            assert tenants == [PeerId("http/one"), PeerId("http/other"), swarm.peers[0].id]

    asyncio.run(main())


def test_a_tokenizer_that_fails_is_one_line(tmp_path: Path) -> None:
    file = json.loads(tokenizer_json())
    file["decoder"] = {"type": "Strip", "content": "f", "start": 5, "stop": 5}  # at "f" the library panics

    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm:
            digest = await swarm.peers[0].context.blobs.put(json.dumps(file).encode())
            await swarm.serve("gpt2", 1, tokenizer=digest)
            with pytest.raises(RemoteError, match=r"^the model's tokenizer cannot write its tokens: index"):
                await swarm.ask(prompt="if", max_tokens=20)
            await swarm.freed()

    asyncio.run(main())


def test_a_chat_has_the_special_tokens_of_its_template_alone_and_answers_as_far_as_there_is_room(
    tmp_path: Path,
) -> None:
    made = Tokenizer.from_buffer(tokenizer_json())
    made.add_special_tokens(["!"])
    made.post_processor = processors.TemplateProcessing(
        single="! $A", special_tokens=[("!", made.token_to_id("!"))]
    )
    alone = made.encode("!Hi", add_special_tokens=False).ids
    assert len(alone) == 3 and made.encode("!Hi").ids == [alone[0], *alone]

    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            tokenizer = await swarm.peers[-1].context.blobs.put(made.to_str().encode())
            await swarm.serve("llama", 1, tokenizer=tokenizer)
            plain = await swarm.ask(prompt="!Hi", max_tokens=6)
            assert list(plain.tokens) == reference("llama", [alone[0], *alone], 6)
            with pytest.raises(RemoteError, match="max_tokens"):
                await swarm.ask(prompt="!Hi", max_tokens=1024)
            answer = await swarm.ask(prompt="!Hi", chat=True, max_tokens=1024)
            assert answer.prompt_tokens == 3 and len(answer.tokens) == MAX_SEQUENCE - 3
            assert list(answer.tokens) == reference("llama", alone, MAX_SEQUENCE - 3)
            fits = await swarm.ask(prompt="!" * 59, max_tokens=None)
            assert fits.prompt_tokens == 60 and len(fits.tokens) == MAX_SEQUENCE - 60 < DEFAULT_MAX_TOKENS
            with pytest.raises(RemoteError, match="no token can follow"):
                await swarm.ask(prompt="!" * MAX_SEQUENCE, max_tokens=None)
            with pytest.raises(RemoteError, match="no token can follow"):
                await swarm.ask(prompt="!" * MAX_SEQUENCE, chat=True, max_tokens=1024)
            await swarm.freed()

    asyncio.run(main())
