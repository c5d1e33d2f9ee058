"""The op-set, the wire form and the formulas of cost on real exports, against the framework that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from fusion.dag.cutting.costs import node_costs
from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import capture_language_model
from tests.support.stage_costs import node_saved_bytes

BATCH, SEQUENCE = 3, 24
SIZES = {"batch": BATCH, "sequence": SEQUENCE}
COMMON: dict[str, Any] = {"vocab_size": 256, "attn_implementation": "sdpa"}
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, **LLAMA),
    "gpt2": lambda: transformers.GPT2Config(
        **COMMON, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    model: Any
    inference: Graph
    training: Graph


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).train()
    graphs = (capture_language_model(model, training=t, maximum_sequence=64) for t in (False, True))
    return Case(model, *graphs)


def inputs() -> dict[str, torch.Tensor]:
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    return {"input_ids": torch.randint(0, 256, (BATCH, SEQUENCE)), "position_ids": positions}


def test_an_export_passes_validation_and_keeps_its_name(case: Case) -> None:
    for graph in (case.inference, case.training):
        data = serialise.encode(graph)
        again = serialise.decode(data)
        assert again == graph and serialise.encode(again) == data
        assert len(data) < 100 * len(graph.nodes) + 200 * len(graph.variables)


def test_forward_flops_are_those_counted_in_a_run(case: Case) -> None:
    families = ("contraction", "attention")
    ours = sum(c.forward_flops for c in node_costs(case.inference, SIZES) if c.family in families)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        case.model(**inputs(), use_cache=False)
    counted = counter.get_total_flops()
    assert counted * 0.99 <= ours <= counted * 1.1, (
        ours,
        counted,
    )  # the counter leaves out biases and softmax


def test_backward_is_about_twice_forward(case: Case) -> None:
    costs = node_costs(case.training, SIZES)
    assert 1.9 < sum(c.backward_flops for c in costs) / sum(c.forward_flops for c in costs) < 2.1


def test_the_stash_is_what_autograd_keeps(case: Case) -> None:
    ours = sum(node_saved_bytes(case.training, SIZES))
    kept: dict[int, torch.Tensor] = {}
    weights = {p.untyped_storage().data_ptr() for p in (*case.model.parameters(), *case.model.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logits = case.model(**inputs(), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.randint(0, 256, (BATCH * SEQUENCE,))
        )
    actual = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)
    assert loss.requires_grad
    assert 0.9 * actual < ours < 1.1 * actual, (ours, actual)


def test_parameters_are_counted_once(case: Case) -> None:
    costs = node_costs(case.training, SIZES)
    assert sum(c.trainable for c in costs) == sum(p.numel() for p in case.model.parameters())
