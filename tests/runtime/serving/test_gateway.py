"""Any peer answers for any model: real captured models over the in-memory swarm, against `generate()`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fusion.dag import wire
from fusion.dag.cuts import legal_cuts, split
from fusion.runtime import manifest as manifests
from fusion.runtime.context import Context
from fusion.runtime.errors import JobError
from fusion.runtime.job import Manifest, ServeConfig
from fusion.runtime.launch.capture import capture_language_model, variables_from_module
from fusion.runtime.serving.gateway import GatewayConfig
from fusion.runtime.serving.generate_client import complete, generate
from fusion.runtime.serving.request import Answer, GenerateRequest, Piece, Sampling
from fusion.runtime.serving.sampling import sample
from fusion.runtime.serving.service import ServingService
from fusion.runtime.serving.serving_graph import serving_graph
from fusion.runtime.worker import Worker
from fusion.swarm.blob_store import BlobStore
from fusion.swarm.blobs import BlobConfig, Blobs
from fusion.swarm.errors import RemoteError, SwarmError
from fusion.swarm.identity import Identity
from fusion.swarm.leases import LeaseConfig, Leases
from fusion.swarm.memory import MemoryDirectory, MemoryNetwork, MemoryTransport
from fusion.swarm.records import Digest, JobId, JobRecord
from fusion.swarm.transport import PeerId

VOCABULARY = 128
MAX_SEQUENCE = 96


@functools.cache
def model(name: str) -> torch.nn.Module:
    torch.manual_seed(3)
    if name == "llama":
        config: Any = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=MAX_SEQUENCE, initializer_range=0.4,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    else:
        config = transformers.GPT2Config(
            n_embd=32, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=MAX_SEQUENCE, initializer_range=0.4,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    module: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return module.eval()


@functools.cache
def captured(name: str, cache: str) -> Any:
    graph = capture_language_model(model(name), training=False, maximum_sequence=MAX_SEQUENCE)
    return serving_graph(graph, cache=cache, maximum_sequence=MAX_SEQUENCE)  # type: ignore[arg-type]


def reference(name: str, prompt: Sequence[int], count: int) -> list[int]:
    with torch.inference_mode():
        given = torch.tensor([list(prompt)])
        ids = model(name).generate(  # type: ignore[operator]
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(i) for i in ids[0, len(prompt) :]]


def seeded_reference(name: str, prompt: Sequence[int], count: int, sampling: Sampling) -> list[int]:
    """No cache, no swarm: the whole prefix through the original module for each token."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(name)(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(sample(logits, sampling, len(tokens)))
    return tokens[len(prompt) :]


def tokenizer_json() -> bytes:
    """Byte-level BPE without merges: ids 0..127 are single bytes, so most characters take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCABULARY]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


class Peer:
    def __init__(self, network: MemoryNetwork, home: Path, memory_bytes: int) -> None:
        self.identity = Identity.generate()
        self.id = self.identity.peer_id
        transport = MemoryTransport(network, self.id)
        directory = MemoryDirectory(network, self.identity)
        store = BlobStore(home / self.id, quota_bytes=1 << 30)
        self.context = Context(
            peer_id=self.id,
            transport=transport,
            directory=directory,
            blobs=Blobs(store, transport, directory, BlobConfig(retry_seconds=0.01)),
            leases=Leases(self.id, directory, LeaseConfig(confirm_seconds=0.0)),
            worker=Worker(),
            memory_bytes=memory_bytes,
            home=home,
        )
        self.service = ServingService(self.context, GatewayConfig(open_seconds=10, stall_seconds=20))
        self.hosting: list[asyncio.Task[None]] = []

    @property
    def open_sessions(self) -> int:
        return sum(h.stage.sessions + len(h.plane._sessions) for h in self.service._hosted.values())

    async def aclose(self) -> None:
        for task in self.hosting:
            task.cancel()
        outcomes = await asyncio.gather(*self.hosting, return_exceptions=True)
        assert all(isinstance(o, asyncio.CancelledError) for o in outcomes), outcomes
        await self.service.aclose()
        await self.context.leases.aclose()
        await self.context.blobs.aclose()
        await self.context.transport.aclose()
        await self.context.compute.aclose()


class Swarm:
    def __init__(self, network: MemoryNetwork, peers: list[Peer]) -> None:
        self.network = network
        self.peers = peers
        self.owners: list[Peer] = []

    async def serve(
        self,
        name: str,
        stages: int,
        *,
        cache: str = "kv",
        cuts: tuple[int, ...] | None = None,
        **options: Any,
    ) -> JobId:
        """Peer i runs stage i; the last peer of the swarm launches, and runs nothing."""
        graph = captured(name, cache)
        legal = legal_cuts(graph)
        if cuts is None:
            cuts = tuple(legal[len(legal) * i // stages] for i in range(1, stages))
        variables = variables_from_module(model(name))
        blobs = self.peers[-1].context.blobs
        weights = []
        for stage in split(graph, cuts):
            held = {v.name: variables[v.name].detach().clone() for v in stage.graph.variables}
            weights.append(await blobs.put(save_tensors(held)))
        serve = {"max_sequence": MAX_SEQUENCE, "vocabulary": VOCABULARY, "prefill_chunk": 8, "cache": cache}
        manifest = Manifest(
            name=name,
            kind="serve",
            graph=await blobs.put(wire.encode(graph)),
            cuts=cuts,
            weights=tuple(weights),
            proposed=tuple(peer.id for peer in self.peers[:stages]),
            serve=ServeConfig(**{**serve, **options.pop("serve", {})}),
            **options,
        )
        job = JobId(await blobs.put(manifests.encode(manifest)))
        await self.publish(job, name, stages)
        self.owners = self.peers[:stages]
        for i, peer in enumerate(self.owners):
            await self.hold(peer, job, manifest, i)
        return job

    async def publish(self, job: JobId, name: str, stages: int) -> None:
        launcher = self.peers[-1]
        record = JobRecord(
            job=job, name=name, kind="serve", state="running", term=0, step=0, lead=None, stages=stages,
            snapshot=None, snapshot_step=0, author=launcher.id,
        )  # fmt: skip
        await launcher.context.directory.publish(record, ttl_seconds=60)

    async def hold(self, peer: Peer, job: JobId, manifest: Manifest, stage: int) -> None:
        leases = peer.context.leases
        claim = await leases.claim(job, stage, 1.0)
        assert claim is not None
        peer.hosting.append(asyncio.create_task(peer.service.host(job, manifest, stage, claim.term)))
        while not (held := leases.holds(job, stage)) or not held.ready:
            assert not peer.hosting[-1].done(), peer.hosting[-1].exception()
            await asyncio.sleep(0.002)
        await leases.beat()

    async def ask(self, peer: int = -1, **fields: Any) -> Answer:
        """From a client that runs nothing, through that peer."""
        async with self.client() as transport:
            return await complete(transport, self.peers[peer].id, GenerateRequest(**fields))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[MemoryTransport]:
        async with MemoryTransport(self.network, Identity.generate().peer_id) as transport:
            yield transport

    async def freed(self) -> None:
        async with asyncio.timeout(10):
            while any(p.open_sessions for p in self.peers if p.id in self.network.transports):
                await asyncio.sleep(0.002)


@asynccontextmanager
async def swarm_of(count: int, home: Path, *, memory_bytes: int = 1 << 30) -> AsyncIterator[Swarm]:
    network = MemoryNetwork()
    peers = [Peer(network, home, memory_bytes) for _ in range(count)]
    for peer in peers:
        await peer.context.blobs.__aenter__()
        await peer.service.start()
    try:
        async with asyncio.timeout(60):
            yield Swarm(network, peers)
    finally:
        for peer in peers:
            await peer.aclose()


PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7], [(7 * i) % VOCABULARY for i in range(40)])


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


# --- what goes wrong


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": (1, 2), "max_tokens": 95}, r"max_tokens: .* so at most 94 tokens can follow, not 95"),
        ({"prompt_ids": (VOCABULARY,)}, "prompt_ids: this model's tokens are 0 to 127, not 128"),
        ({"prompt_ids": ()}, "prompt: at least one token"),
        ({"prompt": "hello"}, "this model has no tokenizer"),
        ({"prompt_ids": (1,), "model": "bard"}, "nobody serves 'bard'; there are: gpt2"),
    ],
)
def test_a_request_that_cannot_work_is_one_line_before_anything_runs(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            await swarm.serve("gpt2", 1)
            with pytest.raises(RemoteError, match=message) as caught:
                await swarm.ask(**fields)
            assert "\n" not in str(caught.value)
            assert swarm.peers[0].service._hosted and not swarm.peers[0].open_sessions
            assert (await swarm.ask(prompt_ids=(1,), max_tokens=2)).finish == "length"

    asyncio.run(main())


def test_a_swarm_that_serves_nothing_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm:
            with pytest.raises(RemoteError, match="the swarm serves none now"):
                await swarm.ask(prompt_ids=(1,))

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": "a", "prompt_ids": (1,)},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "\udcff"},
        {"prompt_ids": (1 << 64,)},
    ],
)
def test_requests_are_checked_where_they_are_made(fields: dict[str, Any]) -> None:
    with pytest.raises(JobError):
        GenerateRequest(**fields)


@pytest.mark.parametrize(
    ("kind", "header", "payload"),
    [
        ("generate", {}, b"x"),
        ("generate", {"prompt": "text"}, b"\xff"),
        ("generate", {"prompt": "ids"}, b"1234567"),
        ("generate", {"prompt": "ids", "model": 3}, bytes(8)),
        ("generate", {"prompt": "ids", "temperature": -2.0}, bytes(8)),
        ("surprise", {}, b""),
    ],
)
def test_hostile_requests_get_one_error(
    kind: str, header: dict[str, Any], payload: bytes, tmp_path: Path
) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm, swarm.client() as transport:
            stream = await transport.open(swarm.peers[0].id, "/fusion/generate/1")
            await stream.send(kind, header, [payload])
            assert (await stream.receive()).kind == "error"

    asyncio.run(main())


@pytest.mark.parametrize("how", ["kill", "close"])
def test_a_client_that_goes_frees_the_session_on_every_stage(how: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            await swarm.serve("llama", 3)
            request = GenerateRequest(prompt_ids=(1, 2), max_tokens=90)
            async with swarm.client() as transport:
                pieces = generate(transport, swarm.peers[0].id, request)
                await anext(pieces)
                assert all(peer.open_sessions for peer in swarm.peers)
                if how == "kill":
                    swarm.network.kill(transport.peer_id)
                else:
                    await pieces.aclose()
                await swarm.freed()
                await pieces.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stage_that_vanishes_is_named_and_everything_else_is_freed(victim: int, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await swarm.serve("llama", 3)
            async with swarm.client() as transport:
                request = GenerateRequest(prompt_ids=(1, 2), max_tokens=90)
                pieces = generate(transport, swarm.peers[3].id, request)
                await anext(pieces)
                swarm.network.kill(swarm.owners[victim].id)
                with pytest.raises(RemoteError, match=rf"stage {victim} of llama on .* vanished"):
                    async for _ in pieces:
                        pass
            await swarm.freed()
            with pytest.raises(RemoteError, match=rf"stage {victim} of llama"):
                await swarm.ask(3, prompt_ids=(1,), max_tokens=1)

    asyncio.run(main())


def test_a_new_owner_is_found_although_the_old_route_is_still_fresh(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            assert (await swarm.ask(prompt_ids=(4,), max_tokens=3)).route[1] == swarm.peers[1].id
            old, new = swarm.peers[1], swarm.peers[2]
            old.hosting.pop().cancel()
            await old.context.leases.release(job, 1)
            manifest = manifests.decode(await new.context.blobs.read(Digest(job), 1 << 20))
            await swarm.hold(new, job, manifest, 1)
            answer = await swarm.ask(prompt_ids=(4,), max_tokens=8)
            assert answer.route == (swarm.peers[0].id, new.id)
            assert list(answer.tokens) == reference("gpt2", (4,), 8)

    asyncio.run(main())


def test_a_stage_without_an_owner_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            await swarm.peers[1].context.leases.release(job, 1)
            with pytest.raises(RemoteError, match="stage 1 of gpt2 has no owner now"):
                await swarm.ask(prompt_ids=(4,))

    asyncio.run(main())


def test_sessions_beyond_what_a_peer_lends_are_refused_and_its_others_go_on(tmp_path: Path) -> None:
    weights = sum(p.numel() * 4 for p in model("gpt2").parameters())

    async def main() -> None:
        async with swarm_of(2, tmp_path, memory_bytes=weights + 100_000) as swarm:
            await swarm.serve("gpt2", 1)
            async with swarm.client() as transport:
                pieces = generate(
                    transport, swarm.peers[1].id, GenerateRequest(prompt_ids=(1,), max_tokens=95)
                )
                await anext(pieces)  # 96 positions: 3 layers * 2 * 32 * 4 bytes * 96 = 73 728 bytes
                with pytest.raises(RemoteError, match=r"stage 0 of gpt2 on .* no memory for another session"):
                    await swarm.ask(prompt_ids=(1,), max_tokens=95)
                assert isinstance([p async for p in pieces][-1], Answer)
            assert (await swarm.ask(prompt_ids=(1,), max_tokens=95)).finish == "length"

    asyncio.run(main())


@pytest.mark.parametrize("broken", ["graph", "weights"])
def test_a_job_whose_blobs_are_wrong_fails_in_one_line(broken: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm:
            peer = swarm.peers[0]
            good = await peer.context.blobs.put(wire.encode(captured("gpt2", "kv")))
            bad = await peer.context.blobs.put(b"not what it says")
            manifest = Manifest(
                name="odd",
                kind="serve",
                graph=bad if broken == "graph" else good,
                cuts=(),
                weights=(bad,),
                proposed=(PeerId("x"),),
                serve=ServeConfig(cache="kv", max_sequence=8, vocabulary=VOCABULARY),
            )
            with pytest.raises(Exception, match=f"the {broken}.* of odd: ") as caught:
                await peer.service.host(JobId("a" * 64), manifest, 0, 1)
            assert type(caught.value).__name__ == "JobFailed"
            assert not peer.service._hosted

    asyncio.run(main())


def test_progress_is_known_where_the_first_stage_runs(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            job = await swarm.serve("gpt2", 2)
            progress = swarm.peers[0].service.progress(job)
            assert progress is not None and (progress.state, progress.stages) == ("running", 2)
            assert swarm.peers[1].service.progress(job) is None

    asyncio.run(main())


def test_streams_for_stages_that_are_not_here_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(1, tmp_path) as swarm, swarm.client() as transport:
            for hello in (
                {"job": "b" * 64, "from": -1, "to": 0},
                {"job": 5},
                {"job": "b", "from": None, "to": 0},
            ):
                stream = await transport.open(swarm.peers[0].id, "/fusion/ring/1")
                await stream.send("hello", hello)
                assert (await stream.receive()).kind == "error"
                with pytest.raises(SwarmError):
                    await stream.receive()

    asyncio.run(main())
