"""Training over real processes against plain autograd of the original module in this one.

One step of SGD at a learning rate of 2^19 makes the gradients readable in the exported weights: the update is so much
larger than the weights that subtracting them costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from support.jobs import even_cuts, exported, run_to_end, with_client
from support.models import Chain, Diamond, SameMasks, gpt2
from torch import nn
from torch.nn import functional

from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.capture import capture_language_model, capture_module, variables_from_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.launch.launch import prepare_graph
from fusion.runtime.planes.optimizer import learning_rate
from fusion.runtime.planes.plane import RngKey
from fusion.runtime.training.data.batches import Batches

pytestmark = pytest.mark.e2e

SEED, RATE = 7, float(1 << 19)
SAMPLES, SEQUENCE = 64, 12
CASES = [
    ("chain", 1, 1), ("chain", 2, 8), ("chain", 4, 3),
    ("diamond", 2, 1), ("diamond", 3, 8), ("diamond", 4, 4),
    ("tied", 2, 2), ("tied", 4, 8),
    ("gpt2", 1, 4), ("gpt2", 2, 8), ("gpt2", 3, 1), ("gpt2", 4, 8),
]  # fmt: skip


@dataclass
class Case:
    module: nn.Module
    graph: Graph
    arrays: dict[str, torch.Tensor]
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def make(name: str) -> Case:
    torch.manual_seed(1)
    if name in ("chain", "diamond"):
        module: nn.Module = Chain() if name == "chain" else Diamond()
        arrays = {"x": torch.randn(SAMPLES, 6), "targets": torch.randn(SAMPLES, 3 if name == "chain" else 6)}
        graph = capture_module(module, {k: v[:2] for k, v in arrays.items()}, nn.MSELoss())
        return Case(module, clean(graph), arrays, lambda m, b: functional.mse_loss(m(b["x"]), b["targets"]))
    if name == "gpt2":
        module = gpt2()
    else:
        module = GPT(GPTConfig(vocabulary=32, blocks=2, width=16, heads=2, sequence=16))
    tokens = torch.randint(0, 32, (SAMPLES, SEQUENCE + 1))
    positions = torch.arange(SEQUENCE).repeat(SAMPLES, 1)
    arrays = {"input_ids": tokens[:, :-1], "position_ids": positions, "targets": tokens[:, 1:]}
    graph = capture_language_model(module, training=True, maximum_sequence=16)
    return Case(module, clean(graph), arrays, language_loss)


def language_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = module(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


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


def test_gradients_over_processes_are_those_of_one(peers: Any, tmp_path: Path) -> None:
    swarm = peers.swarm(4)

    async def compare(context: Context) -> dict[str, float]:
        worst = {}
        cases = {name: make(name) for name in dict.fromkeys(name for name, _, _ in CASES)}
        for number, (name, stages, microbatches) in enumerate(CASES):
            case = cases[name]
            before = {k: v.clone() for k, v in variables_from_module(case.module).items()}
            digest = context.blobs.store.put(save({k: v.contiguous() for k, v in case.arrays.items()}))
            config = TrainConfig(
                steps=1,
                microbatches=microbatches,
                microbatch_size=4,
                sequence=SEQUENCE,
                seed=SEED,
                optimizer=OptimizerConfig(kind="sgd", learning_rate=RATE, clip_norm=None),
                data=DataConfig(kind="arrays", train=digest),
            )
            prepared = prepare_graph(
                name,
                case.graph,
                before,
                config,
                context.blobs.store,
                cuts=even_cuts(len(case.graph.nodes), stages),
                proposed=[swarm[i % 4].peer_id for i in range(stages)],
            )
            progress = await run_to_end(context, prepared)
            after = await exported(context, prepared, tmp_path / str(number))
            loss, gradients = reference(case, config, context.blobs.store.path(digest))
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
    steps, microbatches = 50, 4
    optimizer = OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=5, weight_decay=0.1)
    torch.manual_seed(2)
    module = GPT(GPTConfig(vocabulary=256, blocks=2, width=32, heads=2, sequence=32))
    graph = clean(capture_language_model(module, training=True, maximum_sequence=32))
    text = Path(torch.__file__).read_bytes()[:60_000]

    async def compare(context: Context) -> tuple[list[float], list[float]]:
        config = TrainConfig(
            steps=steps,
            microbatches=microbatches,
            microbatch_size=4,
            sequence=32,
            seed=SEED,
            optimizer=optimizer,
            data=DataConfig(kind="tokens", train=context.blobs.store.put(text)),
        )
        prepared = prepare_graph(
            "fifty",
            graph,
            variables_from_module(module),
            config,
            context.blobs.store,
            cuts=even_cuts(len(graph.nodes), 3),
            proposed=[peer.peer_id for peer in swarm],
        )
        progress = await run_to_end(context, prepared)
        data = context.blobs.store.path(config.data.train)
        return [loss for _, loss in progress.recent], one_process(module, config, data)

    swarm_losses, own = with_client(peers.root / "client", swarm[0].address, compare)
    assert len(swarm_losses) == steps
    worst = max(abs(a - b) / b for a, b in zip(swarm_losses, own, strict=True))
    print(f"worst relative difference of {steps} losses: {worst:.1e} (from {own[0]:.3f} to {own[-1]:.3f})")
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
