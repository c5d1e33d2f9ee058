"""Jobs whose gradients are compared with plain autograd (`tests/e2e/test_parity.py`) and between checkouts
(`tests/bench/exactness.py`).

One step of SGD at a learning rate of 2^19 makes the gradients readable in the exported weights: the update is so much
larger than the weights that subtracting them costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from support.captured_once import captured_once, once
from support.families import build, config
from support.models import Chain, Diamond, gpt2, mixtral
from support.staged import even_cuts, language_loss, two_layers
from torch import nn
from torch.nn import functional

from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.capture.models import GPT
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.job.manifest import DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.shard import GraphJob, prepare_graph
from fusion.runtime.placing.placed_job import as_requested
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.transport import PeerId

SEED, RATE = 7, float(1 << 19)
SAMPLES, SEQUENCE = 64, 12
CASES = [
    ("chain", 1, 1), ("chain", 2, 8), ("chain", 4, 3),
    ("diamond", 2, 1), ("diamond", 3, 8), ("diamond", 4, 4),
    ("tied", 2, 2), ("tied", 4, 8),
    ("gpt2", 1, 4), ("gpt2", 2, 8), ("gpt2", 3, 1), ("gpt2", 4, 8),
]  # fmt: skip
FAMILIES = [("mixtral", 3, 8), ("gemma2", 3, 2)]  # experts; capped scores and windows


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
        graph = once(
            f"parity {name}",
            lambda: capture_module(module, {k: v[:2] for k, v in arrays.items()}, nn.MSELoss()),
        )
        return Case(module, clean(graph), arrays, lambda m, b: functional.mse_loss(m(b["x"]), b["targets"]))
    match name:
        case "gpt2":
            module = gpt2()
        case "mixtral":
            module = mixtral()
        case "gemma2":
            module = build(two_layers(config(name)))
        case _:
            module = GPT(GPTConfig(vocabulary=32, blocks=2, width=16, heads=2, sequence=16))
    tokens = torch.randint(0, 32, (SAMPLES, SEQUENCE + 1))
    positions = torch.arange(SEQUENCE).repeat(SAMPLES, 1)
    arrays = {"input_ids": tokens[:, :-1], "position_ids": positions, "targets": tokens[:, 1:]}
    graph = captured_once(module, training=True, maximum_sequence=16)
    return Case(module, trained_graph(graph), arrays, language_loss)


def one_step(
    case: Case, name: str, stages: int, microbatches: int, store: BlobStore, peers: Sequence[PeerId]
) -> Prepared:
    """A job of one step, with its stages given to the peers in turn."""
    config = TrainConfig(
        steps=1,
        microbatches=microbatches,
        microbatch_size=4,
        sequence=SEQUENCE,
        seed=SEED,
        optimizer=OptimizerConfig(kind="sgd", learning_rate=RATE, clip_norm=None),
        data=DataConfig(
            kind="arrays", train=store.put(save({k: v.contiguous() for k, v in case.arrays.items()}))
        ),
    )
    proposed = [peers[i % len(peers)] for i in range(stages)]
    return prepare_graph(
        GraphJob(name=name, graph=case.graph, variables=variables_from_module(case.module)),
        as_requested(case.graph, config, even_cuts(case.graph, stages), proposed),
        store,
    )


def fifty_steps(store: BlobStore, peers: Sequence[PeerId]) -> tuple[nn.Module, Prepared]:
    """A small GPT with a stage for each peer, and text that is the same for the same version of PyTorch."""
    torch.manual_seed(2)
    module = GPT(GPTConfig(vocabulary=256, blocks=2, width=32, heads=2, sequence=32))
    graph = clean(captured_once(module, training=True, maximum_sequence=32))
    config = TrainConfig(
        steps=50,
        microbatches=4,
        microbatch_size=4,
        sequence=32,
        seed=SEED,
        optimizer=OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=5, weight_decay=0.1),
        data=DataConfig(kind="tokens", train=store.put(Path(torch.__file__).read_bytes()[:60_000])),
    )
    prepared = prepare_graph(
        GraphJob(name="fifty", graph=graph, variables=variables_from_module(module)),
        as_requested(graph, config, even_cuts(graph, len(peers)), peers),
        store,
    )
    return module, prepared
