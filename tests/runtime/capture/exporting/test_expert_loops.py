"""Experts in a loop are captured as products where these give the same, and refused where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.experts import EXPERT_LINEAR, name_experts
from fusion.runtime.capture.capture import capture_language_model, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

WIDTH, INNER, TOP = 16, 8, 3


class Experts(nn.Module):
    """As LongCat-Flash has them: those without a second matrix give what they are given."""

    def __init__(self, total: int, count: int, times: float = 1.0) -> None:
        super().__init__()
        self.total, self.count, self.times = total, count, times
        self.gate_up_proj = nn.Parameter(torch.randn(total, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(count, WIDTH, INNER))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        mask = functional.one_hot(top_k_index, num_classes=self.total).permute(2, 1, 0)
        for at in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = int(at.item())
            place, token = torch.where(mask[expert])
            x = hidden_states[token]
            if expert < self.count:
                gate, up = functional.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
                x = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            total.index_add_(0, token, self.times * x * top_k_weights[token, place, None])
        return total


class Stacks(nn.Module):
    """The matrices of the experts of DBRX, one below the other."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(total * INNER, WIDTH)) for _ in range(3))
        self.activation_fn = torch.sigmoid


class StackedExperts(nn.Module):
    def __init__(self, total: int, times: float = 1.0) -> None:
        super().__init__()
        self.num_experts, self.times, self.ffn_hidden_size = total, times, INNER
        self.mlp = Stacks(total)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        total = torch.zeros_like(rows)
        mask = functional.one_hot(top_k_index, num_classes=self.num_experts).permute(2, 1, 0)
        for at in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            expert = int(at.item())
            place, token = torch.where(mask[expert])
            own = (
                getattr(self.mlp, n).view(self.num_experts, -1, rows.shape[1])[expert]
                for n in ("w1", "v1", "w2")
            )
            gate, up, down = own
            x = (self.mlp.activation_fn(rows[token] @ gate.T) * (rows[token] @ up.T)) @ down
            total.index_add_(0, token, self.times * x * top_k_weights[token, place, None])
        return total.view(hidden_states.shape)


class Model(nn.Module):
    def __init__(self, experts: nn.Module, total: int) -> None:
        super().__init__()
        self.table = nn.Embedding(97, WIDTH)
        self.router = nn.Linear(WIDTH, total)
        self.experts = experts

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.table(input_ids) + position_ids.unsqueeze(-1) * 0.01
        rows = x.view(-1, WIDTH)
        weights, chosen = self.router(rows).softmax(-1).topk(TOP)
        return x + self.experts(rows, chosen, weights).view(x.shape)


def model(total: int, count: int, **more: Any) -> Model:
    torch.manual_seed(0)
    return Model(Experts(total, count, **more), total).eval()


def captured(module: nn.Module) -> Graph:
    return name_experts(clean(capture_language_model(module, training=False, maximum_sequence=64)))


def stacked(total: int, **more: Any) -> Model:
    torch.manual_seed(0)
    return Model(StackedExperts(total, **more), total).eval()


@pytest.mark.parametrize(("module", "products"), [(model(8, 8), 2), (model(8, 5), 2), (stacked(8), 3)])
def test_products_give_what_the_loop_gives(module: Model, products: int) -> None:
    kind: Any = type(module.experts)
    plain = kind.forward
    graph = captured(module)
    assert kind.forward is plain
    assert [node.op for node in graph.nodes].count(EXPERT_LINEAR) == products
    ids, positions = torch.randint(0, 97, (2, 11)), torch.arange(11).expand(2, -1)
    program = compile_graph(graph, torch.device("cpu"), training=False)
    given, variables = {"input_ids": ids, "position_ids": positions}, variables_from_module(module)
    values = [variables[v.name] for v in graph.variables]
    (found,) = program.run([given[name] for name in program.inputs], values, None)
    torch.testing.assert_close(found, module(ids, positions))


@pytest.mark.parametrize("module", [model(8, 8, times=1.01), stacked(8, times=1.01)])
def test_a_loop_that_does_something_else_is_refused(module: Model) -> None:
    with pytest.raises(CaptureError, match=r"test_expert_loops\.py"):
        captured(module)


def test_so_is_one_of_other_parts() -> None:
    module = model(8, 8)
    module.experts.register_buffer("more", torch.ones(1))
    with pytest.raises(CaptureError, match=r"test_expert_loops\.py"):
        captured(module)
