"""Experts whose rows a model sorts are captured as products where these give the same, and refused where they do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.experts import EXPERT_LINEAR, name_experts
from fusion.runtime.capture.capture import capture_language_model, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

pytest.importorskip("transformers")
from transformers.models.jetmoe import modeling_jetmoe

WIDTH = 16
CONFIG = SimpleNamespace(
    hidden_size=WIDTH, intermediate_size=8, kv_channels=4, num_key_value_heads=2, num_local_experts=5,
    num_experts_per_tok=2, activation_function="silu",
)  # fmt: skip


class Model(nn.Module):
    """Experts with a function between their matrices, and a whole layer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(97, WIDTH)
        self.apart = modeling_jetmoe.JetMoeMoA(CONFIG)
        self.whole = modeling_jetmoe.JetMoeMoE(CONFIG)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.table(input_ids) + position_ids.unsqueeze(-1) * 0.01
        inner, _, info = self.apart.map(x)
        return self.whole(x + self.apart.reduce(inner.tanh(), info))  # type: ignore[no-any-return]


def test_products_give_what_sorted_rows_give() -> None:
    torch.manual_seed(0)
    module, plain = Model().eval(), modeling_jetmoe.JetMoeMoA.map
    graph = name_experts(clean(capture_language_model(module, training=False, maximum_sequence=64)))
    assert modeling_jetmoe.JetMoeMoA.map is plain
    assert [node.op for node in graph.nodes].count(EXPERT_LINEAR) == 4
    ids, positions = torch.randint(0, 97, (2, 11)), torch.arange(11).expand(2, -1)
    program = compile_graph(graph, torch.device("cpu"), training=False)
    given, variables = {"input_ids": ids, "position_ids": positions}, variables_from_module(module)
    values = [variables[v.name] for v in graph.variables]
    (found,) = program.run([given[name] for name in program.inputs], values, None)
    torch.testing.assert_close(found, module(ids, positions))


def test_a_layer_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce: Any = modeling_jetmoe.JetMoeMoA.reduce
    monkeypatch.setattr(modeling_jetmoe.JetMoeMoA, "reduce", lambda *given: 1.001 * reduce(*given))
    with pytest.raises(CaptureError, match="size of a value follows from what is in a tensor"):
        capture_language_model(Model().eval(), training=False, maximum_sequence=64)
