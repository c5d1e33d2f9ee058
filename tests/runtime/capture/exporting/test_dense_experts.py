"""Every position to every expert, times a score, is captured as products with the chosen experts where these give the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.experts import EXPERT_LINEAR, name_experts
from fusion.runtime.capture.capture import capture_language_model, variables_from_module
from fusion.runtime.planes.codegen import compile_graph

WIDTH, INNER, COUNT, TOP = 16, 8, 6, 2


class Router(nn.Linear):
    def __init__(self, rest: float) -> None:
        super().__init__(WIDTH, COUNT, bias=False)
        self.rest = rest

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(hidden_states)
        best, chosen = torch.topk(logits, TOP, dim=1)
        scores = torch.full_like(logits, self.rest).scatter_(1, chosen, best)
        return torch.sigmoid(scores), logits


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(COUNT, WIDTH, 2 * INNER))
        self.down_proj = nn.Parameter(torch.randn(COUNT, INNER, WIDTH))
        self.hidden_size, self.act_fn = WIDTH, nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.view(COUNT, -1, self.hidden_size)
        gate, up = torch.bmm(rows, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(up * self.act_fn(gate), self.down_proj).view(-1, self.hidden_size)


class Mixture(nn.Module):
    """As Llama 4 has it."""

    def __init__(self, rest: float) -> None:
        super().__init__()
        self.top_k, self.hidden_dim = TOP, WIDTH
        self.experts, self.router, self.shared_expert = Experts(), Router(rest), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(rows)
        given = rows.repeat(COUNT, 1) * scores.transpose(0, 1).reshape(-1, 1)
        made = self.experts(given).reshape(COUNT, -1, self.hidden_dim).sum(dim=0)
        return self.shared_expert(rows) + made, logits


class Model(nn.Module):
    def __init__(self, rest: float) -> None:
        super().__init__()
        self.table = nn.Embedding(97, WIDTH)
        self.mixture = Mixture(rest)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.table(input_ids) + position_ids.unsqueeze(-1) * 0.01
        return x + self.mixture(x)[0].view(x.shape)


@pytest.mark.parametrize(("rest", "chosen"), [(float("-inf"), 2), (-1.0, 0)], ids=["zero", "not zero"])
def test_experts_of_score_zero_are_left_out(rest: float, chosen: int) -> None:
    torch.manual_seed(0)
    module = Model(rest).eval()
    graph = name_experts(clean(capture_language_model(module, training=False, maximum_sequence=64)))
    assert sum(node.op == EXPERT_LINEAR for node in graph.nodes) == chosen
    ids, positions = torch.randint(97, (2, 9)), torch.arange(9).expand(2, 9)
    program = compile_graph(graph, torch.device("cpu"), training=False)
    given, variables = {"input_ids": ids, "position_ids": positions}, variables_from_module(module)
    values = [variables[v.name] for v in graph.variables]
    (found,) = program.run([given[name] for name in program.inputs], values, None)
    wanted = module(ids, positions)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    assert type(module.mixture).forward is Mixture.forward
