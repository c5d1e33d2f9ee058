"""Training over real processes against plain autograd of the original module in this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import exported, run_to_end, with_client
from support.models import SameMasks
from support.parity import CASES, FAMILIES, RATE, Case, fifty_steps, language_loss, make, one_step
from torch import nn

from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.planes.learning_rate import learning_rate
from fusion.runtime.planes.plane import RngKey
from fusion.runtime.training.data.batches import Batches

pytestmark = pytest.mark.e2e


def reference(case: Case, config: TrainConfig, data: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one step by plain autograd."""
    batches = Batches(config, sorted(case.arrays), data, None)
    case.module.train()
    case.module.zero_grad()
    losses = []
    for microbatch in range(config.microbatches):
        with SameMasks(case.graph, RngKey(config.seed, 0, microbatch)):
            loss = case.loss(case.module, batches.train(0, microbatch))
        (loss / config.microbatches).backward()
        losses.append(loss.item())
    gradients = {n: p.grad.clone() for n, p in case.module.named_parameters() if p.grad is not None}
    return sum(losses) / len(losses), gradients


@pytest.mark.slow
def test_gradients_over_processes_are_those_of_one(peers: Any, tmp_path: Path) -> None:
    swarm = peers.swarm(4)

    async def compare(context: Context) -> dict[str, float]:
        worst = {}
        cases = {name: make(name) for name in dict.fromkeys(name for name, _, _ in [*CASES, *FAMILIES])}
        for number, (name, stages, microbatches) in enumerate([*CASES, *FAMILIES]):
            case = cases[name]
            before = {k: v.clone() for k, v in variables_from_module(case.module).items()}
            prepared = one_step(
                case, name, stages, microbatches, context.blobs.store, [peer.peer_id for peer in swarm]
            )
            config = prepared.manifest.train
            assert config is not None
            progress = await run_to_end(context, prepared)
            after = await exported(context, prepared, tmp_path / str(number))
            loss, gradients = reference(case, config, context.blobs.store.path(config.data.train))
            errors = [abs(progress.loss - loss) / abs(loss)]
            for variable, gradient in gradients.items():
                got = (before[variable].double() - after[variable].double()) / RATE
                errors.append(float((got - gradient.double()).norm() / gradient.double().norm()))
            worst[f"{name}, {stages} stages, {microbatches} microbatches"] = max(errors)
        return worst

    worst = with_client(peers.root / "client", swarm[0].address, compare)
    print("\n".join(f"{error:.1e}  {case}" for case, error in worst.items()))
    assert max(worst.values()) <= 1e-5, worst


def test_fifty_steps_have_the_losses_of_one_process(peers: Any, tmp_path: Path) -> None:
    swarm = peers.swarm(3)

    async def compare(context: Context) -> tuple[list[float], list[float]]:
        module, prepared = fifty_steps(context.blobs.store, [peer.peer_id for peer in swarm])
        config = prepared.manifest.train
        assert config is not None
        progress = await run_to_end(context, prepared)
        data = context.blobs.store.path(config.data.train)
        return [loss for _, loss in progress.recent], one_process(module, config, data)

    swarm_losses, own = with_client(peers.root / "client", swarm[0].address, compare)
    assert len(swarm_losses) == 50
    worst = max(abs(a - b) / b for a, b in zip(swarm_losses, own, strict=True))
    print(f"worst relative difference of 50 losses: {worst:.1e} (from {own[0]:.3f} to {own[-1]:.3f})")
    assert own[-1] < own[0] - 1.0
    assert worst <= 1e-5


def one_process(module: nn.Module, config: TrainConfig, data: Path) -> list[float]:
    batches = Batches(config, ["input_ids", "position_ids", "targets"], data, None)
    settings = config.optimizer
    adam = torch.optim.AdamW(
        module.parameters(), betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
    losses = []
    for step in range(config.steps):
        total = 0.0
        for microbatch in range(config.microbatches):
            loss = language_loss(module, batches.train(step, microbatch))
            (loss / config.microbatches).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm or float("inf"))
        for group in adam.param_groups:
            group["lr"] = learning_rate(settings, step, config.steps)
        adam.step()
        adam.zero_grad()
        losses.append(total / config.microbatches)
    return losses
