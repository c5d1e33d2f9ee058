"""Graphs of small models, cut into stages and trained in this process as peers do it, and the models themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from support.captured_once import captured_once, once
from support.families import build, config
from support.models import Chain, Diamond, SameMasks, gpt2, mixtral
from torch import nn
from torch.nn import functional

from fusion.dag.cutting.cuts import tie_groups
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import capture_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.planes.learning_rate import clip_factor, learning_rate
from fusion.runtime.planes.plane import RngKey, TrainingStage

SEED = 5


@dataclass
class Case:
    module: nn.Module
    graph: Graph
    batch: Callable[[int], dict[str, torch.Tensor]]  # of microbatch i
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def vectors(name: str, module: nn.Module, outputs: int) -> Case:
    def batch(i: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(i)
        return {"x": torch.randn(4, 6, generator=made), "targets": torch.randn(4, outputs, generator=made)}

    graph = once(f"staged {name}", lambda: capture_module(module, batch(0), nn.MSELoss()))
    return Case(module, graph, batch, lambda m, b: functional.mse_loss(m(b["x"]), b["targets"]))


def language(module: nn.Module) -> Case:
    def batch(i: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(i)
        tokens = torch.randint(0, 32, (2, 13), generator=made)
        positions = torch.arange(12).repeat(2, 1)
        return {"input_ids": tokens[:, :-1], "position_ids": positions, "targets": tokens[:, 1:]}

    graph = trained_graph(captured_once(module, training=True, maximum_sequence=16))
    return Case(module, graph, batch, language_loss)


def language_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out = module(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def two_layers(configuration: Any) -> Any:
    """One that sees a window, and one that sees all."""
    configuration.num_hidden_layers = 2
    configuration.layer_types = configuration.layer_types[:2]
    return configuration


def make(name: str) -> Case:
    torch.manual_seed(1)
    match name:
        case "chain":
            return vectors(name, Chain(), 3)
        case "diamond":
            return vectors(name, Diamond(), 6)
        case "tied":
            return language(GPT(GPTConfig(vocabulary=32, blocks=2, width=16, heads=2, sequence=16)))
        case "dropout":
            return language(
                GPT(GPTConfig(vocabulary=32, blocks=2, width=16, heads=2, sequence=16, dropout=0.2))
            )
        case "mixtral":
            return language(mixtral())
        case "gemma2":  # capped scores, windows
            return language(build(two_layers(config(name))))
    assert name == "gpt2"
    return language(gpt2())


def run_microbatch(
    staged: Sequence[TrainingStage], values: dict[str, torch.Tensor], key: RngKey, scale: float
) -> float:
    """Run one forward and backward pass through all stages as peers do. Returns the loss."""
    values = dict(values)
    for plane in staged:
        values.update(plane.forward(key.microbatch, values, key))
    gradients: dict[str, torch.Tensor] = {}
    for plane in reversed(staged):
        mine = {e.name: gradients[e.name] for e in plane.stage.sends if e.needs_gradient}
        for name, gradient in plane.backward(key.microbatch, mine, scale).items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return float(values["result/0"])


def share_ties(staged: Sequence[TrainingStage]) -> None:
    for group in tie_groups([p.stage for p in staged]):
        total = sum(staged[s].gradients([group.variable])[group.variable] for s in group.stages)
        for s in group.stages:
            staged[s].set_gradients({group.variable: total.clone()})


def norm(staged: Sequence[TrainingStage]) -> float:
    seen: set[str] = set()
    total = 0.0
    for plane in staged:
        total += plane.squared_norm(frozenset(seen))
        seen.update(plane.gradients())
    return total


def even_cuts(graph: Graph, stages: int) -> tuple[int, ...]:
    return tuple(len(graph.nodes) * i // stages for i in range(1, stages))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.cpu() - b.cpu()).norm() / b.norm().clamp_min(1e-12))


def own_gradients(case: Case, microbatches: int) -> tuple[float, dict[str, torch.Tensor]]:
    case.module.train()
    case.module.zero_grad()
    total = 0.0
    for i in range(microbatches):
        with SameMasks(case.graph, RngKey(SEED, 0, i)):
            loss = case.loss(case.module, case.batch(i)) / microbatches
        loss.backward()
        total += loss.item()
    found = {n: p.grad.clone() for n, p in case.module.named_parameters() if p.grad is not None}
    return total, found


def train(
    case: Case, staged: Sequence[TrainingStage], config: OptimizerConfig, steps: range, total: int
) -> Iterator[float]:
    for step in steps:
        losses = [
            run_microbatch(staged, case.batch(2 * step + i), RngKey(SEED, step, i), 0.5) for i in range(2)
        ]
        share_ties(staged)
        factor = clip_factor(config, norm(staged))
        for plane in staged:
            plane.apply(learning_rate(config, step, total), factor)
        yield sum(losses) / 2


def own_training(case: Case, config: OptimizerConfig, steps: int) -> Iterator[float]:
    parameters = list(case.module.parameters())
    if config.kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            parameters, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
    else:
        optimizer = torch.optim.SGD(parameters, momentum=config.momentum, weight_decay=config.weight_decay)
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for i in range(2):
            with SameMasks(case.graph, RngKey(SEED, step, i)):
                loss = case.loss(case.module, case.batch(2 * step + i)) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, config.clip_norm or float("inf"))
        optimizer.param_groups[0]["lr"] = learning_rate(config, step, steps)
        optimizer.step()
        yield total
