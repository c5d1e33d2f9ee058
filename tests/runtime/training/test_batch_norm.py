"""Batch normalisation over stages: its running statistics are a part of the state that a step commits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.captured_once import once
from support.training import (
    Job,
    Peer,
    assert_same,
    config,
    exported_weights,
    job,
    reached,
    record_of,
    reference,
    run,
    stopped,
    swarm,
    until,
)
from torch import nn
from torch.nn import functional

from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.manifest import DataConfig, TrainConfig
from fusion.runtime.launch.launch import launch
from fusion.swarm.directory.records import Digest

INPUTS = ("x", "targets")
ARRAYS = config(
    data=DataConfig(kind="arrays", train=Digest("")), sequence=0, microbatches=3, microbatch_size=4
)


class Normalised(nn.Module):
    """Convolutions with statistics of their own, one of them run twice, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(n, 4, 3, padding=1, bias=False) for n in (1, 4, 4))
        self.norm, self.twice = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        y = torch.relu_(self.twice(self.second(x)))
        y = self.twice(self.third(y)) + x
        made: torch.Tensor = self.last(y.mean((2, 3)))
        return made


def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    module.train(torch.is_grad_enabled())  # held-out samples come without gradients
    return functional.cross_entropy(module(batch["x"]), batch["targets"])


def normalised_job(peer: Peer, module: nn.Module, train: TrainConfig, folder: Path, stages: int = 3) -> Job:
    torch.manual_seed(3)
    arrays = {"x": 2 + 3 * torch.randn(40, 1, 6, 6), "targets": torch.randint(0, 3, (40,))}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "arrays"
    save_file(arrays, path)
    example = {name: value[:4] for name, value in arrays.items()}
    graph = clean(once("normalised", lambda: capture_module(module, example, functional.cross_entropy)))
    norms = [i for i, node in enumerate(graph.nodes) if node.op == "aten.batch_norm"]
    cuts = (norms[0] + 1, norms[1], len(graph.nodes) - 2)[: stages - 1]
    return job(peer, graph, variables_from_module(module), train, stages, path, path, cuts)


def module() -> nn.Module:
    torch.manual_seed(1)
    return Normalised()


def test_statistics_follow_the_microbatches_as_in_one_process(tmp_path: Path) -> None:
    async def main() -> None:
        own = module()
        async with swarm(tmp_path, 3) as made:
            work = normalised_job(made.peers[0], own, ARRAYS, tmp_path)
            progress = await run(made, work, range(3))
            expected = reference(own, work, INPUTS, loss)
            weights = await exported_weights(made.peers[0], work, tmp_path / "out")
            assert_same(work, expected, made.peers[0], progress, weights)
            # 6 steps of 3 microbatches; one of them normalises twice in each
            assert int(weights["norm.num_batches_tracked"]) == 18
            assert int(weights["twice.num_batches_tracked"]) == 36
            Normalised().load_state_dict(weights, strict=True)
            assert weights["norm.running_mean"].abs().max() > 0.05  # they were zeros

    asyncio.run(main())


def test_a_killed_stage_ends_with_the_statistics_of_a_quiet_run(tmp_path: Path) -> None:
    long = replace(ARRAYS, steps=100_000, snapshot_every=3)

    async def rough() -> tuple[int, dict[str, torch.Tensor], dict[int, float]]:
        async with swarm(tmp_path / "rough", 4) as made:
            lead, spare = made.peers[0], made.peers[3]
            work = normalised_job(lead, module(), long, tmp_path / "rough")
            await launch(lead.context, work.prepared)
            for stage in range(3):
                await made.peers[stage].host(work.prepared, stage)
            await reached(lead, work, 4, snapshot_step=3)
            await made.kill(made.peers[1])  # which holds all the statistics of `twice`
            await made.forgets(work, 1)
            await lead.context.directory.publish(record_of(lead, work, await reached(lead, work, 4)))
            spare.context.leases.observe(work.prepared.job, 1, 1)
            await spare.host(work.prepared, 1)
            await until(lambda: lead.service.progress(work.prepared.job).attempts >= 2)  # type: ignore[union-attr]
            await reached(lead, work, 8)
            losses = await stopped(made, lead, work)
            # The first attempt may have come further than the second one, which the job ended with.
            steps = lead.service.progress(work.prepared.job).step  # type: ignore[union-attr]
            return steps, await exported_weights(lead, work, tmp_path / "rough-out"), losses

    async def calm(steps: int) -> tuple[dict[str, torch.Tensor], dict[int, float]]:
        async with swarm(tmp_path / "calm", 3) as made:
            lead = made.peers[0]
            # The schedule of the learning rate is that of the long run.
            constant = replace(long, steps=steps)
            work = normalised_job(lead, module(), constant, tmp_path / "calm")
            await run(made, work, range(3))
            weights = await exported_weights(lead, work, tmp_path / "calm-out")
            return weights, dict(lead.service.losses(work.prepared.job))

    steady = replace(long.optimizer, schedule="constant", warmup_steps=0)
    long = replace(long, optimizer=steady)
    steps, weights, losses = asyncio.run(rough())
    expected, quiet = asyncio.run(calm(steps))
    assert {step: loss for step, loss in losses.items() if step < steps} == quiet
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
