"""Serves real captured models over the in-memory swarm, with standbys of their stages, and `generate()` as the reference."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save as save_tensors
from support.captured_once import captured_once
from support.surroundings import PRODUCT, Surroundings

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.answers.gateway import GatewayConfig
from fusion.runtime.serving.requests.client import complete
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring.penalties import TokenCounts
from fusion.runtime.serving.ring.sampling import sample
from fusion.runtime.serving.service import ServingService
from fusion.runtime.serving.stage_loader import StageLoader
from fusion.swarm.blobs.blobs import Blobs
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import ClaimRecord, JobId, JobRecord
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId

VOCABULARY = 128
MAX_SEQUENCE = 96
IMPATIENT = FailoverConfig(recover_seconds=0.3)
PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7], [(7 * i) % VOCABULARY for i in range(40)])


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
    graph = captured_once(model(name), training=False, maximum_sequence=MAX_SEQUENCE)
    return serving_graph(graph, cache=cache, maximum_sequence=MAX_SEQUENCE)  # type: ignore[arg-type]


def reference(name: str, prompt: Sequence[int], count: int) -> list[int]:
    return list(_reference(name, tuple(prompt), count))


@functools.cache
def _reference(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
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
    """The reference without cache or swarm: the original module computes the whole prefix for each token."""
    return list(_seeded_reference(name, tuple(prompt), count, sampling))


@functools.cache
def _seeded_reference(name: str, prompt: tuple[int, ...], count: int, sampling: Sampling) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            logits = model(name)(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        counts = TokenCounts(tokens, len(tokens) - len(prompt))
        tokens.append(sample(logits, sampling, len(tokens), counts))
    return tokens[len(prompt) :]


class Successors:
    """Peers that take stages over on request, once the owner has really gone. Implements what serving needs of `Takeover`."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._deciding = asyncio.Lock()
        self.standing: dict[int, list[Peer]] = {}  # stage -> who takes it over, best first
        self.reports: list[tuple[int, PeerId, int]] = []

    async def suspect(self, job: JobId, stage: int, peer: PeerId, term: int) -> ClaimRecord | None:
        self.reports.append((stage, peer, term))
        async with self._deciding:
            swarm = self._swarm
            if peer in swarm.network.transports:
                return None
            for successor in list(self.standing.get(stage, ())):
                self.standing[stage].remove(successor)
                if successor.id in swarm.network.transports:
                    return await swarm.hold(successor, job, stage, over=term, wait=False)
            return None


class Peer:
    def __init__(
        self,
        network: MemoryNetwork,
        home: Path,
        memory_bytes: int,
        failover: FailoverConfig,
        successors: Successors,
        given: Surroundings,
    ) -> None:
        self.identity = given.identity()
        self.id = self.identity.peer_id
        transport = MemoryTransport(network, self.id)
        directory = MemoryDirectory(network, self.identity, given.clock.unix)
        store = BlobStore(home / self.id, quota_bytes=1 << 30)
        self.context = Context(
            peer_id=self.id,
            transport=transport,
            directory=directory,
            blobs=Blobs(store, transport, directory, BlobConfig(retry_seconds=0.01)),
            leases=Leases(self.id, directory, LeaseConfig(confirm_seconds=0.0)),
            worker=given.worker(),
            memory=MemoryBudget(memory_bytes),
            home=home,
            takeover=successors,
            clock=given.clock,
            random=given.random,
        )
        self.service = ServingService(
            self.context,
            StageLoader(self.context, given.plane, StageGraphs(self.context)),
            GatewayConfig(failover=failover),
        )
        self.hosting: list[asyncio.Task[None]] = []

    @property
    def open_sessions(self) -> int:
        return sum(h.stage.sessions + len(h.loaded.plane._sessions) for h in self.service._hosted.values())

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
    def __init__(self, network: MemoryNetwork, given: Surroundings) -> None:
        self.network = network
        self.given = given
        self.peers: list[Peer] = []
        self.owners: list[Peer] = []  # at first, by stage
        self.successors = Successors(self)
        self.manifests: dict[JobId, Manifest] = {}
        self.author = given.identity()

    async def serve(
        self,
        name: str,
        stages: int,
        *,
        cache: str = "kv",
        cuts: tuple[int, ...] | None = None,
        made: tuple[Graph, torch.nn.Module] | None = None,
        **options: Any,
    ) -> JobId:
        """Serve a model: peer i runs stage i, and the last peer of the swarm launches it and runs no stage. `made` is a graph
        and the source of its variables, in place of the model of that name."""
        graph, module = made or (captured(name, cache), model(name))
        legal = legal_cuts(graph)
        if cuts is None:
            cuts = tuple(legal[len(legal) * i // stages] for i in range(1, stages))
        variables = variables_from_module(module)
        blobs = self.peers[-1].context.blobs
        weights = []
        for stage in split(graph, cuts):
            held = {v.name: variables[v.name].detach().clone() for v in stage.graph.variables}
            weights.append(await blobs.put(save_tensors(held)))
        serve = {"max_sequence": MAX_SEQUENCE, "vocabulary": VOCABULARY, "prefill_chunk": 8, "cache": cache}
        manifest = Manifest(
            name=name,
            kind="serve",
            graph=await blobs.put(serialise.encode(graph)),
            cuts=cuts,
            weights=tuple(weights),
            proposed=tuple(peer.id for peer in self.peers[:stages]),
            author=self.author.peer_id,
            serve=ServeConfig(**{**serve, **options.pop("serve", {})}),
            **options,
        )
        job = JobId(await blobs.put(manifests.encode(manifest)))
        self.manifests[job] = manifest
        await self.publish(job, name, stages)
        self.owners = self.peers[:stages]
        for i, peer in enumerate(self.owners):
            await self.hold(peer, job, i)
        return job

    async def publish(self, job: JobId, name: str, stages: int, state: str = "running") -> None:
        launcher = self.peers[-1]
        record = JobRecord(
            job=job, name=name, kind="serve", state=state, term=0, step=0, lead=None, stages=stages,
            snapshot=None, snapshot_step=0, author=launcher.id,
        )  # fmt: skip
        await launcher.context.directory.publish(record, ttl_seconds=60)

    async def hold(
        self, peer: Peer, job: JobId, stage: int, *, over: int = 0, wait: bool = True
    ) -> ClaimRecord:
        """Let the peer claim the stage and host it, with the vote of its owner under the term `over`; `wait` until it is ready."""
        leases = peer.context.leases
        claims = ((old, old.context.leases.holds(job, stage)) for old in self.peers if old is not peer)
        proof = tuple(
            old.context.leases.voting.vote(job, stage, Holding(old.id, over), peer.id)
            for old, claim in claims
            if claim is not None and claim.term == over
        )
        claim = await leases.claim(job, stage, 1.0, over=over, proof=proof)
        assert claim is not None
        host = peer.service.host(job, self.manifests[job], stage, claim.term)
        peer.hosting.append(asyncio.create_task(host))
        while wait and (not (held := leases.holds(job, stage)) or not held.ready):
            assert not peer.hosting[-1].done(), peer.hosting[-1].exception()
            await asyncio.sleep(0.002)
        await leases.beat()
        return claim

    async def hand_over(self, job: JobId, stage: int, old: Peer, new: Peer) -> None:
        """Do what hosting does when a peer with a successor leaves."""
        claim = old.context.leases.holds(job, stage)
        assert claim is not None
        assert await old.service.pass_on(job, stage) == {}
        await self.hold(new, job, stage, over=claim.term)
        old.hosting[0].cancel()

    async def stand_by(self, peer: Peer, job: JobId, *stages: int) -> None:
        """Give the peer what it needs to take any of these stages over."""
        record = await peer.context.directory.job(job)
        assert record is not None
        for stage in stages:
            await peer.service.prepare(job, self.manifests[job], stage, record)
            self.successors.standing.setdefault(stage, []).append(peer)

    async def ask(self, peer: int = -1, **fields: Any) -> Answer:
        """Request an answer from a client that runs no stage, through that peer as the gateway."""
        async with self.client() as transport:
            return await complete(transport, self.peers[peer].id, GenerateRequest(**fields))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[MemoryTransport]:
        async with MemoryTransport(self.network, self.given.identity().peer_id) as transport:
            yield transport

    async def freed(self) -> None:
        async with asyncio.timeout(10):
            while any(p.open_sessions for p in self.peers if p.id in self.network.transports):
                await asyncio.sleep(0.002)


@asynccontextmanager
async def swarm_of(
    count: int,
    home: Path,
    *,
    memory_bytes: int = 1 << 30,
    failover: FailoverConfig = IMPATIENT,
    given: Surroundings = PRODUCT,
    seconds: float = 300,  # it hangs; a busy machine takes its time
) -> AsyncIterator[Swarm]:
    swarm = Swarm(MemoryNetwork(), given)
    swarm.peers = [
        Peer(swarm.network, home, memory_bytes, failover, swarm.successors, given) for _ in range(count)
    ]
    for peer in swarm.peers:
        await peer.context.leases.__aenter__()  # renews, however slow the machine is
        await peer.context.blobs.__aenter__()
        await peer.service.start()
    try:
        async with asyncio.timeout(seconds):
            yield swarm
    finally:
        for peer in swarm.peers:
            await peer.aclose()
