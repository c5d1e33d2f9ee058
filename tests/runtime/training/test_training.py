"""Training over the in-memory transport: several peers' contexts in one process, against plain autograd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from fusion.dag.cuts import legal_cuts
from fusion.dag.ir import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.context import Context
from fusion.runtime.data import Batches
from fusion.runtime.errors import JobFailed
from fusion.runtime.job import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.launch.capture import capture_language_model, capture_module, variables_from_module
from fusion.runtime.launch.launch import (
    Held,
    Prepared,
    launch,
    prepare_graph,
    prepare_training,
    wait_until_held,
)
from fusion.runtime.launch.models import GPT, GPTConfig
from fusion.runtime.launch.spec import load
from fusion.runtime.planes.optimizer import clip_factor, learning_rate
from fusion.runtime.progress import Progress
from fusion.runtime.training.export import export
from fusion.runtime.training.messages import PROTOCOL
from fusion.runtime.training.neighbours import Overtaken
from fusion.runtime.training.service import TrainingService
from fusion.runtime.worker import Worker
from fusion.swarm.blob_store import BlobStore
from fusion.swarm.blobs import BlobConfig, Blobs
from fusion.swarm.identity import Identity
from fusion.swarm.leases import LeaseConfig, Leases
from fusion.swarm.memory import MemoryDirectory, MemoryNetwork, MemoryTransport
from fusion.swarm.records import Digest, JobRecord, PeerRecord

TINY = GPTConfig(vocabulary=32, blocks=2, width=16, heads=2, sequence=8, tied=True)
LANGUAGE = ("input_ids", "position_ids", "targets")


# --- a swarm in one process


@dataclass
class Peer:
    context: Context
    service: TrainingService
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    async def host(self, prepared: Prepared, stage: int) -> None:
        """Claim a stage, as the peer's hosting does, and run it in a task."""
        claim = await self.context.leases.claim(prepared.job, stage, 1.0)
        assert claim is not None
        self.tasks[stage] = asyncio.create_task(
            self.service.host(prepared.job, prepared.manifest, stage, claim.term)
        )


@dataclass
class Swarm:
    network: MemoryNetwork
    root: Path
    stack: AsyncExitStack
    peers: list[Peer] = field(default_factory=list)

    async def join(self, count: int) -> list[Peer]:
        joined = [await self._peer() for _ in range(count)]
        self.peers += joined
        return joined

    async def _peer(self) -> Peer:
        identity = Identity.generate()
        home = self.root / identity.peer_id
        transport = MemoryTransport(self.network, identity.peer_id)
        directory = MemoryDirectory(self.network, identity)
        store = BlobStore(home / "blobs", 1 << 30)
        blobs = await self.stack.enter_async_context(
            Blobs(store, transport, directory, BlobConfig(retry_seconds=0.05))
        )
        leases = await self.stack.enter_async_context(
            Leases(identity.peer_id, directory, LeaseConfig(heartbeat_seconds=0.2, confirm_seconds=0.0))
        )
        worker = await self.stack.enter_async_context(Worker(1))
        context = Context(
            peer_id=identity.peer_id,
            transport=transport,
            directory=directory,
            blobs=blobs,
            leases=leases,
            worker=worker,
            home=home,
        )
        peer = Peer(context, TrainingService(context))
        await peer.service.start()
        return peer

    async def kill(self, peer: Peer) -> None:
        """The process vanishes in the middle of whatever it does."""
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
async def swarm(root: Path, count: int) -> AsyncIterator[Swarm]:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        made = Swarm(MemoryNetwork(), root, stack)
        await made.join(count)
        yield made
        for peer in made.peers:
            for task in peer.tasks.values():
                task.cancel()
            await asyncio.gather(*peer.tasks.values(), return_exceptions=True)


# --- jobs, and the same training in one process


def tokens(count: int = 400) -> bytes:
    """Text that can be learnt: a noisy walk over the vocabulary."""
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


def language_job(peer: Peer, module: nn.Module, train: TrainConfig, stages: int) -> Job:
    graph = clean(capture_language_model(module, training=True, maximum_sequence=TINY.sequence))
    return job(peer, graph, variables_from_module(module), train, stages, tokens(), tokens()[100:])


def job(
    peer: Peer,
    graph: Graph,
    variables: Mapping[str, torch.Tensor],
    train: TrainConfig,
    stages: int,
    data: bytes | Path,
    held_out: bytes | Path,
    cuts: Sequence[int] | None = None,
) -> Job:
    store = peer.context.blobs.store
    digests = store.put(data), store.put(held_out)
    train = replace(train, data=replace(train.data, train=digests[0], held_out=digests[1]))
    legal = legal_cuts(graph)
    cuts = cuts or [legal[i * len(legal) // stages] for i in range(1, stages)]
    prepared = prepare_graph("test", graph, variables, train, store, cuts=cuts)
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
        error = (exported[name] - tensor).norm() / tensor.norm().clamp(min=1e-8)
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


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_trains_as_in_one_process(tmp_path: Path, stages: int, tied: bool) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(replace(TINY, tied=tied))
        async with swarm(tmp_path, stages) as made:
            work = language_job(made.peers[0], module, config(), stages)
            progress = await run(made, work, range(stages))
            expected = reference(module, work, LANGUAGE, language_loss)
            weights = await exported_weights(made.peers[0], work, tmp_path / "out")
            assert_same(work, expected, made.peers[0], progress, weights)
            assert progress.state == "done" and progress.step == 6 and progress.snapshot_step == 6
            assert expected.losses[-1] < expected.losses[0]

    asyncio.run(main())


class Diamond(nn.Module):
    """Two branches of unlike depth that meet again, and the input once more at the end: skips over whole stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.deeper, self.last = (nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        left = torch.tanh(self.left(x))
        right = self.deeper(torch.relu(self.right(x)))
        y: torch.Tensor = self.last(left * right + left) + x
        return y


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule"), [(2, 1, "1f1b"), (3, 8, "gpipe"), (4, 5, "1f1b")]
)
def test_a_diamond_with_skips_trains_as_in_one_process(
    tmp_path: Path, stages: int, microbatches: int, schedule: Any
) -> None:
    async def main() -> None:
        torch.manual_seed(2)
        module = Diamond()
        x = torch.randn(64, 6)
        save_file({"x": x, "targets": x.sin()}, tmp_path / "data")
        example = {"x": x[:4], "targets": x[:4]}
        train = config(
            data=DataConfig(kind="arrays", train=Digest("")), sequence=0, microbatches=microbatches, schedule=schedule,
            optimizer=OptimizerConfig(kind="sgd", learning_rate=0.1, clip_norm=0.5),
        )  # fmt: skip
        graph = clean(capture_module(module, example, functional.mse_loss))
        async with swarm(tmp_path, stages) as made:
            lead = made.peers[0]
            path = tmp_path / "data"
            work = job(lead, graph, variables_from_module(module), train, stages, path, path)
            progress = await run(made, work, range(stages))
            batches = Batches(work.prepared.manifest.train, ["x", "targets"], work.train, work.held_out)  # type: ignore[arg-type]
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            losses = []
            for step in range(6):
                parts = [batches.train(step, m) for m in range(microbatches)]
                loss = sum(functional.mse_loss(module(p["x"]), p["targets"]) for p in parts) / microbatches
                loss.backward()  # type: ignore[union-attr]
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss))
            weights = await exported_weights(lead, work, tmp_path / "out")
            module_weights = module.state_dict()
            assert [loss for _, loss in lead.service.losses(work.prepared.job)] == pytest.approx(
                losses, rel=1e-5
            )
            for name, tensor in module_weights.items():
                assert (weights[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
            assert progress.state == "done"

    asyncio.run(main())


def test_dropout_draws_the_same_masks_however_the_graph_is_cut(tmp_path: Path) -> None:
    async def losses(stages: int) -> list[tuple[int, float]]:
        torch.manual_seed(1)
        module = GPT(replace(TINY, dropout=0.3))
        async with swarm(tmp_path / str(stages), stages) as made:
            work = language_job(made.peers[0], module, config(), stages)
            await run(made, work, range(stages))
            return list(made.peers[0].service.losses(work.prepared.job))

    one, three = asyncio.run(losses(1)), asyncio.run(losses(3))
    assert [a for _, a in one] == pytest.approx([b for _, b in three], rel=1e-5)


def test_one_peer_may_run_several_stages(tmp_path: Path) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path, 2) as made:
            work = language_job(made.peers[0], module, config(steps=2), 4)
            first, service, states = made.peers[0], made.peers[0].service, []
            whole = asyncio.create_task(run(made, work, [0, 1, 0, 1]))
            await until(lambda: 0 in first.tasks)
            first.tasks[0].add_done_callback(lambda _: states.append(service.progress(work.prepared.job)))
            progress = await whole
            # The lead's word counts as soon as it has ended, whatever another stage on its peer still believes.
            assert [p.state for p in states if p is not None] == ["done"]
            expected = reference(module, work, LANGUAGE, language_loss)
            assert [x for _, x in made.peers[0].service.losses(work.prepared.job)] == pytest.approx(
                expected.losses, rel=1e-5
            )
            assert set(progress.owners) == {p.context.peer_id for p in made.peers}
            assert len(progress.busy) == 4 and all(0 < b <= 1 for b in progress.busy)
            assert progress.sent_bytes > 0 and progress.received_bytes > 0

    asyncio.run(main())


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


async def stopped(made: Swarm, lead: Peer, job: Job) -> dict[int, float]:
    """Stop the job; the loss of every step under this lead."""
    assert lead.service.stop(job.prepared.job)
    await asyncio.gather(*(t for peer in made.peers for t in peer.tasks.values()))
    progress = lead.service.progress(job.prepared.job)
    assert progress is not None and progress.state == "stopped"
    return dict(lead.service.losses(job.prepared.job))


async def undisturbed(root: Path, module: nn.Module, stages: int, steps: int) -> dict[int, float]:
    """The losses of the same run when nothing goes wrong."""
    async with swarm(root, stages) as made:
        work = language_job(made.peers[0], module, LONG, stages)
        await launch(made.peers[0].context, work.prepared)
        for stage in range(stages):
            await made.peers[stage].host(work.prepared, stage)
        await reached(made.peers[0], work, steps)
        return await stopped(made, made.peers[0], work)


def assert_bit_identical(rough: dict[int, float], calm: dict[int, float]) -> None:
    """A loss tells of every weight before it: equal losses, bit for bit, after the accident are equal states."""
    assert rough == {step: calm[step] for step in rough}


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_stage_costs_a_step_and_changes_nothing(tmp_path: Path, victim: int) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 4) as made:
            lead, spare = made.peers[0], made.peers[3]
            work = language_job(lead, module, LONG, 3)
            await launch(lead.context, work.prepared)
            for stage in range(3):
                await made.peers[stage].host(work.prepared, stage)
            await reached(lead, work, 4, snapshot_step=3)
            await made.kill(made.peers[victim])
            at_death = await reached(lead, work, 4)
            await made.forgets(work, victim)
            # The step that was under way is not committed, however long the others wait.
            left = await reached(lead, work, 4)
            assert left.state == "running" and left.step <= at_death.step + 1
            await lead.context.directory.publish(record_of(lead, work, left))
            spare.context.leases.observe(work.prepared.job, victim, 1)
            await spare.host(work.prepared, victim)
            await until(lambda: lead.service.progress(work.prepared.job).attempts >= 2)  # type: ignore[union-attr]
            await reached(lead, work, left.step + 3)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1))

    asyncio.run(main())


def test_a_killed_lead_is_followed_by_one_that_learns_of_the_snapshot_from_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 3) as made:
            lead, other, spare = made.peers
            work = language_job(spare, module, LONG, 2)
            await launch(spare.context, work.prepared)
            await lead.host(work.prepared, 0)
            await other.host(work.prepared, 1)
            known = await reached(other, work, 4, snapshot_step=3)  # and nobody ever published it
            await made.kill(lead)
            spare.context.leases.observe(work.prepared.job, 0, 1)
            await made.forgets(work, 0)
            await spare.host(work.prepared, 0)
            await reached(spare, work, known.step + 3)
            losses = await stopped(made, spare, work)
            assert min(losses) >= 3  # it went on, it did not start anew
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1))

    asyncio.run(main())


def test_a_broken_link_discards_the_step_and_the_run_goes_on_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 3) as made:
            lead = made.peers[0]
            work = language_job(lead, module, replace(LONG, snapshot_every=1000), 3)
            await launch(lead.context, work.prepared)
            for stage in range(3):
                await made.peers[stage].host(work.prepared, stage)
            await reached(lead, work, 3)
            made.network.partition([made.peers[1].context.peer_id], [made.peers[2].context.peer_id])
            await until(lambda: bool(lead.service.progress(work.prepared.job).message))  # type: ignore[union-attr]
            left = await reached(lead, work, 3)
            made.network.heal()
            await reached(lead, work, left.step + 3)
            losses = await stopped(made, lead, work)
            steps = [step for step, _ in lead.service.losses(work.prepared.job)]
            assert steps == list(range(len(steps)))  # every step once: nobody had to go back
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1))

    asyncio.run(main())


def test_an_owner_of_a_term_that_is_over_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        module = GPT(TINY)
        async with swarm(tmp_path, 3) as made:
            lead, old, intruder = made.peers
            work = language_job(lead, module, config(steps=10_000), 2)
            job_id = work.prepared.job
            await launch(lead.context, work.prepared)
            lead.context.leases.observe(job_id, 0, 4)
            await lead.host(work.prepared, 0)
            await old.host(work.prepared, 1)
            await until(lambda: (p := lead.service.progress(job_id)) is not None and p.step >= 2)

            async def say(peer: Peer, **changes: Any) -> str:
                hello = {"job": job_id, "source": 1, "target": 0, "term": 1, "target_term": 5, **changes}
                stream = await peer.context.transport.open(lead.context.peer_id, PROTOCOL)
                await stream.send("hello", hello)
                reply = await stream.receive()
                if reply.kind == "welcome":
                    await stream.send("ready", {"term": hello["term"] - 1})
                    reply = await stream.receive()
                stream.abort()
                return f"{reply.kind}: {reply.header.get('message')}"

            assert "no claim of stage 1 at term 9 seen yet" in await say(intruder, term=9)
            assert "under term 5, not 4" in await say(old, target_term=4)
            assert "is here under term 5" in await say(old, target_term=6)
            assert "has nothing to say" in await say(old, source=7)
            assert "a frame of term 0 on a stream of term 1" in await say(old)
            # The stage goes to another peer at a higher term: what the old owner says now is refused.
            intruder.context.leases.observe(job_id, 1, 1)
            claim = (await intruder.context.leases.claims(job_id, 1))[0]
            taken = replace(claim, peer=intruder.context.peer_id, term=2)
            await intruder.context.directory.publish(taken)
            assert "under term 2, not 1" in await say(old)
            await until(lambda: old.context.leases.holds(job_id, 1) is None)

    asyncio.run(main())


def test_an_owner_that_knows_less_of_terms_than_its_neighbours_claims_anew(tmp_path: Path) -> None:
    """The claims of the owner before it had run out when it joined."""

    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 2) as made:
            lead, before = made.peers
            work = language_job(lead, module, LONG, 2)
            await launch(lead.context, work.prepared)
            before.context.leases.observe(work.prepared.job, 1, 6)
            await lead.host(work.prepared, 0)
            await before.host(work.prepared, 1)
            left = await reached(lead, work, 4, snapshot_step=3)
            await made.kill(before)
            await made.forgets(work, 1)
            [late] = await made.join(1)
            await late.host(work.prepared, 1)
            with pytest.raises(Overtaken, match="held under term 7, not 1"):
                await late.tasks[1]
            await late.context.leases.release(work.prepared.job, 1)
            await late.host(work.prepared, 1)
            await reached(lead, work, left.step + 3)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1))

    asyncio.run(main())


def test_a_job_that_is_stopped_ends_with_a_snapshot_of_the_step_it_reached(tmp_path: Path) -> None:
    async def main() -> None:
        module = GPT(TINY)
        async with swarm(tmp_path, 2) as made:
            lead = made.peers[0]
            work = language_job(lead, module, config(steps=10_000, snapshot_every=1000), 2)
            await launch(lead.context, work.prepared)
            await lead.host(work.prepared, 0)
            await made.peers[1].host(work.prepared, 1)
            seen: list[Progress] = []
            await until(lambda: lead.service.progress(work.prepared.job) is not None)
            async for progress in lead.service.watch(work.prepared.job):
                seen.append(progress)
                if progress.step == 5:
                    assert lead.service.stop(work.prepared.job)
            assert seen[-1].state == "stopped" and 5 <= seen[-1].step < 20
            assert seen[-1].snapshot_step == seen[-1].step
            await asyncio.gather(*(t for peer in made.peers for t in peer.tasks.values()))
            weights = await exported_weights(lead, work, tmp_path / "out")
            module.load_state_dict(weights, strict=True)

    asyncio.run(main())


def test_a_run_that_diverges_fails_on_every_peer_with_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        module = GPT(TINY)
        train = config(steps=100, optimizer=OptimizerConfig(kind="sgd", learning_rate=1e6, clip_norm=None))
        async with swarm(tmp_path, 2) as made:
            lead = made.peers[0]
            work = language_job(lead, module, train, 2)
            await launch(lead.context, work.prepared)
            await lead.host(work.prepared, 0)
            await made.peers[1].host(work.prepared, 1)
            results = await asyncio.gather(
                *(t for peer in made.peers for t in peer.tasks.values()), return_exceptions=True
            )
            assert all(isinstance(r, JobFailed) and "not finite" in str(r) for r in results)
            progress = lead.service.progress(work.prepared.job)
            assert progress is not None and progress.state == "failed" and "not finite" in progress.error

    asyncio.run(main())


def test_a_weights_blob_that_lacks_a_variable_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        module = GPT(TINY)
        async with swarm(tmp_path, 1) as made:
            peer = made.peers[0]
            work = language_job(peer, module, config(), 1)
            path = tmp_path / "weights"
            values = load_file(peer.context.blobs.store.path(work.prepared.manifest.weights[0]))
            values.pop("tokens.weight")
            save_file(values, path)
            manifest = replace(work.prepared.manifest, weights=(peer.context.blobs.store.put(path),))
            with pytest.raises(ValueError, match=r"lacks tokens\.weight"):
                await peer.service.host(work.prepared.job, manifest, 0, 1)

    asyncio.run(main())


def test_the_launcher_may_leave_once_the_swarm_holds_the_job(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 50)
    (tmp_path / "job.toml").write_text(
        'name = "fox"\n[model]\nkind = "gpt"\nblocks = 2\nwidth = 16\nheads = 2\n[data]\nfiles = ["text.txt"]\n'
        "[train]\nsteps = 6\nsequence = 8\nmicrobatches = 2\nsnapshot_every = 2\n[placement]\nstages = 2\n"
    )

    async def main() -> None:
        async with swarm(tmp_path, 4) as made:
            launcher, one, two, watcher = made.peers
            records = [record_of_peer(one), record_of_peer(two)]
            store = launcher.context.blobs.store
            prepared = await asyncio.to_thread(prepare_training, load(tmp_path / "job.toml"), records, store)
            await launch(launcher.context, prepared)
            assert await watcher.context.directory.job(prepared.job) is not None
            seen: list[Held] = []
            held = asyncio.ensure_future(wait_until_held(launcher.context, prepared, on_change=seen.append))
            await asyncio.sleep(0)
            owners = {peer.context.peer_id: peer for peer in (one, two)}
            for stage, owner in enumerate(prepared.manifest.proposed):
                await owners[owner].host(prepared, stage)
                for digest in (prepared.job,):
                    await owners[owner].context.blobs.fetch(Digest(digest))
            await held
            await made.kill(launcher)
            assert not seen[0].complete and seen[-1].complete
            lead = owners[prepared.manifest.proposed[0]]
            await asyncio.gather(*(t for peer in made.peers for t in peer.tasks.values()))
            progress = lead.service.progress(prepared.job)
            assert progress is not None and progress.state == "done"
            work = Job(prepared, tmp_path, tmp_path)
            await lead.context.directory.publish(record_of(lead, work, progress))
            assert await export(watcher.context, prepared.job, tmp_path / "out") == 6
            assert {p.name for p in (tmp_path / "out").iterdir()} == {
                "model.safetensors",
                "inference.graph",
                "fusion.json",
            }
            module = GPT(GPTConfig(blocks=2, width=16, heads=2, sequence=8))
            module.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
            with pytest.raises(ValueError, match="not an empty directory"):
                await export(watcher.context, prepared.job, tmp_path / "out")
            assert not list(lead.context.home.glob("scratch/*"))

    asyncio.run(main())
