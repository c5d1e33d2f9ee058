"""Training over the in-memory transport, with several peers' contexts in one process, and the reference by plain autograd."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file
from support.captured_once import captured_once
from support.surroundings import PRODUCT, Surroundings
from torch import nn
from torch.nn import functional

from fusion.dag.cutting.cuts import legal_cuts, split, tie_groups
from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.mixed_precision import mixed_precision
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.trained_graph import HALVES
from fusion.runtime.hosting.takeover import Takeovers
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import CompressionConfig, DataConfig, Manifest, OptimizerConfig, TrainConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.launch.export import export
from fusion.runtime.launch.launch import launch
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.planes.learning_rate import clip_factor, learning_rate
from fusion.runtime.planes.plane import Plane
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.host import TrainingHost
from fusion.runtime.training.lead.lead import Lead
from fusion.runtime.training.service import TrainingService
from fusion.runtime.training.stage_loader import StageLoader
from fusion.runtime.training.stage_source import StageSource
from fusion.runtime.training.step.events import Committed
from fusion.swarm.blobs.blobs import Blobs
from fusion.swarm.blobs.config import BlobConfig
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, PeerRecord, Place
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport

TINY = GPTConfig(vocabulary=32, blocks=2, width=16, heads=2, sequence=8, tied=True)
LANGUAGE = ("input_ids", "position_ids", "targets")


# --- a swarm in one process


class RecordedService(TrainingService):
    """Keeps the hosts of the stages that it ran, so that tests see how a job ended without a board of jobs."""

    def __init__(self, context: Context, plane: Plane) -> None:
        source = StageSource(context, StageGraphs(context))
        super().__init__(context, StageLoader(context, plane, source))
        self.ran: dict[Place, TrainingHost] = {}
        self._losses: dict[JobId, list[tuple[int, float]]] = {}

    async def _load(self, job: JobId, manifest: Manifest, stage: int, *rest: Any) -> TrainingHost:
        host = self.ran[job, stage] = await super()._load(job, manifest, stage, *rest)
        if host.lead is not None:
            self._record(job, host.lead)
        return host

    def _record(self, job: JobId, lead: Lead) -> None:
        losses, commit = self._losses.setdefault(job, []), lead._committed
        losses.clear()

        def committed(event: Committed) -> None:
            commit(event)
            losses.extend(pair for pair in lead.progress.recent if pair[0] == event.step)

        lead._committed = committed  # type: ignore[method-assign]

    def progress(self, job: JobId) -> Progress | None:
        ran = [host.progress for (other, _), host in sorted(self.ran.items()) if other == job]
        return super().progress(job) or (ran[0] if ran else None)

    def losses(self, job: JobId) -> tuple[tuple[int, float], ...]:
        """(step, loss) of every step that was committed under this peer's newest lead, oldest first."""
        return tuple(self._losses[job])


@dataclass
class Peer:
    """A peer without hosting: it claims stages when the test says so, and takes them over at a partner's request."""

    context: Context
    service: RecordedService
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    work: dict[JobId, Manifest] = field(default_factory=dict)  # what it stands by for

    async def host(self, prepared: Prepared, stage: int) -> None:
        """Claim a stage as hosting does, and run it in a task."""
        self.context.leases.know(prepared.manifest.law(prepared.job))
        claim = await self.context.leases.claim(prepared.job, stage, 1.0)
        assert claim is not None
        self.tasks[stage] = asyncio.create_task(
            self.service.host(prepared.job, prepared.manifest, stage, claim.term)
        )

    async def stand_by(self, prepared: Prepared, stage: int, record: JobRecord) -> int:
        """Prepare a stage and publish that as the standby pool does; call it again for a newer record."""
        self.work[prepared.job] = prepared.manifest
        self.context.leases.know(prepared.manifest.law(prepared.job))
        step = await self.service.prepare(prepared.job, prepared.manifest, stage, record)
        self.context.leases.standbys.stand_by(prepared.job, stage, score=0.5, step=step, ready=True)
        await self.context.leases.beat()
        return step

    def holds(self, job: JobId, stage: int) -> int:
        claim = self.context.leases.holds(job, stage)
        return claim.term if claim is not None and stage in self.tasks else 0

    def release(self, job: JobId, stage: int, successor: Peer) -> tuple[bytes, ...]:
        """This owner's signed vote that `successor` follows it, as in a handover. Without it others need not count the
        successor's claim while this owner's lease lasts."""
        own = Holding(self.context.peer_id, self.holds(job, stage))
        return (self.context.leases.voting.vote(job, stage, own, successor.context.peer_id),)

    @property
    def occupied(self) -> bool:
        return bool(self.tasks)

    async def take_over(
        self,
        job: JobId,
        stage: int,
        over: int,
        handover: Mapping[str, Any] | None,
        proof: tuple[bytes, ...] = (),
    ) -> ClaimRecord | None:
        claim = await self.context.leases.claim(
            job, stage, 0.5, over=over, proof=proof, confirm=handover is None
        )
        before = self.tasks.get(stage)
        # Asked twice, as by its neighbours and by the test, it is hosted once.
        if claim is not None and (before is None or before.done()):
            self.tasks[stage] = asyncio.create_task(
                self.service.host(job, self.work[job], stage, claim.term, handover)
            )
        return claim


@dataclass
class Swarm:
    network: MemoryNetwork
    root: Path
    stack: AsyncExitStack
    given: Surroundings
    peers: list[Peer] = field(default_factory=list)

    async def join(self, count: int) -> list[Peer]:
        joined = [await self._peer() for _ in range(count)]
        self.peers += joined
        return joined

    async def _peer(self) -> Peer:
        given = self.given
        identity = given.identity()
        home = self.root / identity.peer_id
        transport = MemoryTransport(self.network, identity.peer_id)
        directory = MemoryDirectory(self.network, identity, given.clock.unix)
        store = BlobStore(home / "blobs", 1 << 30)
        blobs = await self.stack.enter_async_context(
            Blobs(store, transport, directory, BlobConfig(retry_seconds=0.05))
        )
        leases = await self.stack.enter_async_context(
            Leases(identity.peer_id, directory, LeaseConfig(heartbeat_seconds=0.2, confirm_seconds=0.0))
        )
        worker = await self.stack.enter_async_context(given.worker())
        successor = Takeovers(transport, leases)
        context = Context(
            peer_id=identity.peer_id,
            transport=transport,
            directory=directory,
            blobs=blobs,
            leases=leases,
            worker=worker,
            codec_worker=await self.stack.enter_async_context(given.worker()),
            home=home,
            takeover=successor,
            stall_seconds=given.stall_seconds,
            clock=given.clock,
            random=given.random,
        )
        peer = Peer(context, RecordedService(context, given.plane))
        await successor.start(peer)
        await peer.service.start()
        return peer

    async def kill(self, peer: Peer) -> None:
        """Kill the peer's process, whatever it does."""
        self.network.kill(peer.context.peer_id)
        for task in peer.tasks.values():
            task.cancel()
        await asyncio.gather(*peer.tasks.values(), return_exceptions=True)
        self.peers.remove(peer)

    async def forgets(self, job: Job, stage: int) -> None:
        """Wait until the claim of a dead owner has expired."""
        while await self.peers[0].context.leases.owner(job.prepared.job, stage) is not None:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def swarm(root: Path, count: int, given: Surroundings = PRODUCT) -> AsyncIterator[Swarm]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        made = Swarm(MemoryNetwork(), root, stack, given)
        await made.join(count)
        yield made
        for peer in made.peers:
            for task in peer.tasks.values():
                task.cancel()
            await asyncio.gather(*peer.tasks.values(), return_exceptions=True)


# --- jobs, and the same training in one process


def tokens(count: int = 400) -> bytes:
    """Text that a model can learn: a random walk over the vocabulary."""
    draws = np.random.default_rng(0).integers(0, 3, count)
    return bytes(np.cumsum(draws).astype(np.uint8) % 32)


def config(**changes: Any) -> TrainConfig:
    made = TrainConfig(
        steps=6,
        microbatches=4,
        microbatch_size=2,
        sequence=8,
        seed=5,
        # eps well above the noise of float32: where a gradient is zero but for rounding (the bias of keys), AdamW
        # would otherwise turn the rounding into steps.
        optimizer=OptimizerConfig(
            learning_rate=3e-3, eps=1e-5, weight_decay=0.1, schedule="cosine", warmup_steps=2
        ),
        data=DataConfig(kind="tokens", train=Digest("")),
        snapshot_every=2,
        evaluate_batches=2,
    )
    return replace(made, **changes)


@dataclass
class Job:
    prepared: Prepared
    train: Path
    held_out: Path


def captured(module: nn.Module) -> Graph:
    """The training graph of a language model."""
    return clean(captured_once(module, training=True, maximum_sequence=TINY.sequence))


def compressed(
    module: nn.Module, stages: int, forward: str, backward: str, train: TrainConfig, **how: Any
) -> TrainConfig:
    """`train` with these codecs on every edge and every tied variable of `language_job`."""
    graph = captured(module)
    parts = split(graph, _even(graph, stages))
    codecs = [(edge.name, forward, backward) for part in parts for edge in part.sends]
    codecs += [(group.variable, "int8", "none") for group in tie_groups(parts)]
    families = ("bf16", "fp16", "int8", "int4", "topk")
    return replace(
        train,
        codecs=tuple(codecs),
        compression=CompressionConfig(kind="adaptive", families=families, live=False, **how),
    )


def _even(graph: Graph, stages: int) -> tuple[int, ...]:
    legal = legal_cuts(graph)
    return tuple(legal[i * len(legal) // stages] for i in range(1, stages))


def language_job(
    peer: Peer, module: nn.Module, train: TrainConfig, stages: int, files: Mapping[str, bytes] | None = None
) -> Job:
    graph = captured(module)
    if train.precision in HALVES:
        graph = mixed_precision(graph, HALVES[train.precision])
    texts = tokens(), tokens()[100:]
    return job(peer, graph, variables_from_module(module), train, stages, *texts, files=files)


def job(
    peer: Peer,
    graph: Graph,
    variables: Mapping[str, torch.Tensor],
    train: TrainConfig,
    stages: int,
    data: bytes | Path,
    held_out: bytes | Path,
    cuts: Sequence[int] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Job:
    store = peer.context.blobs.store
    digests = store.put(data), store.put(held_out)
    train = replace(train, data=replace(train.data, train=digests[0], held_out=digests[1]))
    key = hashlib.sha256(f"trainer at {peer.context.peer_id}".encode()).digest()
    author = Identity(Ed25519PrivateKey.from_private_bytes(key), None)
    placed = as_requested(graph, train, cuts or _even(graph, stages))
    job = GraphJob(name="test", graph=graph, variables=variables, files=files or {}, author=author)
    prepared = prepare_graph(job, placed, store, random=peer.context.random, now=peer.context.clock.unix)
    return Job(prepared, store.path(digests[0]), store.path(digests[1]))


@dataclass
class Reference:
    """The same job by plain autograd of the original module in one process."""

    losses: list[float]
    validation: float
    state: dict[str, torch.Tensor]


def reference(
    module: nn.Module,
    job: Job,
    inputs: Sequence[str],
    loss_of: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor],
) -> Reference:
    train = job.prepared.manifest.train
    assert train is not None
    batches = Batches(train, inputs, job.train, job.held_out)
    o = train.optimizer
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1.0, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
    )
    losses = []
    for step in range(train.steps):
        total = 0.0
        for m in range(train.microbatches):
            loss = loss_of(module, batches.train(step, m)) / train.microbatches
            loss.backward()
            total += float(loss.detach())
        norm = sum(float(p.grad.double().square().sum()) for p in module.parameters() if p.grad is not None)
        for p in module.parameters():
            if p.grad is not None:
                p.grad *= clip_factor(o, norm)
        optimizer.param_groups[0]["lr"] = learning_rate(o, step, train.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with torch.no_grad():
        held_out = [float(loss_of(module, batches.held_out(b))) for b in range(train.evaluate_batches)]
    return Reference(losses, sum(held_out) / len(held_out), module.state_dict())


def language_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = module(batch["input_ids"], batch["position_ids"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


async def run(swarm: Swarm, job: Job, owners: Sequence[int]) -> Progress:
    """Host stage i on peer owners[i] and wait for the end."""
    await launch(swarm.peers[0].context, job.prepared)
    for stage, owner in enumerate(owners):
        await swarm.peers[owner].host(job.prepared, stage)
    await asyncio.gather(*(t for peer in swarm.peers for t in peer.tasks.values()))
    progress = swarm.peers[owners[0]].service.progress(job.prepared.job)
    assert progress is not None
    return progress


def assert_same(
    job: Job, made: Reference, lead: Peer, progress: Progress, exported: Mapping[str, torch.Tensor]
) -> None:
    losses = [loss for _, loss in lead.service.losses(job.prepared.job)]
    assert losses == pytest.approx(made.losses, rel=1e-5)
    assert progress.validation_loss == pytest.approx(made.validation, rel=1e-5)
    assert set(exported) == set(made.state)
    for name, tensor in made.state.items():
        error = (exported[name] - tensor).double().norm() / tensor.double().norm().clamp(min=1e-8)
        assert error <= 1e-5, name


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def exported_weights(peer: Peer, job: Job, target: Path) -> dict[str, torch.Tensor]:
    progress = peer.service.progress(job.prepared.job)
    assert progress is not None
    await peer.context.directory.publish(record_of(peer, job, progress))
    await export(peer.context, job.prepared.job, target)
    return load_file(target / "model.safetensors")


def record_of_peer(peer: Peer) -> PeerRecord:
    return PeerRecord(
        peer=peer.context.peer_id, name="", addresses=(), role="peer", device="cpu", flops_per_second=1e9,
        memory_bytes=1 << 30, free_memory_bytes=1 << 30, software="0", opset=1, started_at=0.0,
    )  # fmt: skip


def record_of(peer: Peer, job: Job, progress: Progress) -> JobRecord:
    return JobRecord(
        job=job.prepared.job,
        name="test",
        kind="train",
        state=progress.state,
        term=1,
        step=progress.step,
        lead=peer.context.peer_id,
        stages=job.prepared.manifest.stages,
        snapshot=progress.snapshot,
        snapshot_step=progress.snapshot_step,
        author=peer.context.peer_id,
    )


LONG = config(
    steps=100_000, snapshot_every=3
)  # stopped by the test: how fast this machine is must not matter


async def reached(peer: Peer, job: Job, step: int, snapshot_step: int = 0) -> Progress:
    """The progress at `peer` once it knows of that step and that snapshot."""

    def there() -> bool:
        progress = peer.service.progress(job.prepared.job)
        return progress is not None and progress.step >= step and progress.snapshot_step >= snapshot_step

    await until(there)
    progress = peer.service.progress(job.prepared.job)
    assert progress is not None
    return progress


async def ended(made: Swarm, lead: Peer) -> None:
    """Wait until the lead's stage has ended, and end the others as their hosting would at the author's statement."""
    await lead.tasks[0]
    others = [task for peer in made.peers for task in peer.tasks.values() if not task.done()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def stopped(made: Swarm, lead: Peer, job: Job) -> dict[int, float]:
    """Stop the job, and return the loss of every step under this lead."""
    before = lead.service.progress(job.prepared.job)
    assert before is not None and before.owners, "it leads the job"
    lead.service.stop(job.prepared.job)  # at once where no step is under way
    await ended(made, lead)
    progress = lead.service.progress(job.prepared.job)
    assert progress is not None and progress.state == "stopped"
    return dict(lead.service.losses(job.prepared.job))


async def undisturbed(
    root: Path, module: nn.Module, stages: int, steps: int, train: TrainConfig = LONG
) -> dict[int, float]:
    """The losses of the same run when nothing goes wrong; of equal runs in this process the longest one's, with more steps
    than were asked for."""
    weights = b"".join(value.numpy().tobytes() for value in module.state_dict().values())
    key = (serialise.digest(captured(module)), hashlib.sha256(weights).hexdigest(), stages, train)
    if len(_calm.get(key, ())) < steps:
        _calm[key] = await _run_undisturbed(root, module, stages, 2 * steps, train)
    return _calm[key]


_calm: dict[Any, dict[int, float]] = {}


async def _run_undisturbed(
    root: Path, module: nn.Module, stages: int, steps: int, train: TrainConfig
) -> dict[int, float]:
    async with swarm(root, stages) as made:
        work = language_job(made.peers[0], module, train, stages)
        await launch(made.peers[0].context, work.prepared)
        for stage in range(stages):
            await made.peers[stage].host(work.prepared, stage)
        await reached(made.peers[0], work, steps)
        return await stopped(made, made.peers[0], work)


def assert_bit_identical(rough: dict[int, float], calm: dict[int, float]) -> None:
    """A loss tells of every weight before it: equal losses, bit for bit, after the accident are equal states."""
    assert rough == {step: calm[step] for step in rough}
