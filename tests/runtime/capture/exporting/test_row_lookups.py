"""Rows that code looks up where a mask is true (`torch.where(mask)`, `nonzero`), as loops over experts do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

EXPERTS, CHOSEN = 3, 2


def as_mixtral(
    h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: nn.ModuleList
) -> torch.Tensor:
    out, masks = torch.zeros_like(h), F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for expert, mask in zip(experts, masks, strict=True):
        nth, top = torch.where(mask)
        made = expert(h[None, top].reshape(-1, h.shape[1])) * weights[top, nth, None]
        out.index_add_(0, top, made.to(h.dtype))
    return out


def as_mistral(
    h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: nn.ModuleList
) -> torch.Tensor:
    out = torch.zeros_like(h)
    for i, expert in enumerate(experts):
        rows, nth = torch.where(ids == i)
        out[rows] += weights[rows, nth, None] * expert(h[rows])
    return out


def of_the_first(
    h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: nn.ModuleList
) -> torch.Tensor:
    out = torch.zeros_like(h)
    for i, expert in enumerate(experts):
        rows = torch.nonzero(ids[:, 0] == i).squeeze(-1)
        out[rows] = expert(h[rows]) * weights[rows, 0].unsqueeze(-1)
        rows = (ids == i).any(-1).nonzero(as_tuple=True)[0]
        out = out.index_add(0, rows, expert(h[rows]).sin())
    return out


class Mixture(nn.Module):
    def __init__(self, of: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.of, self.gate = of, nn.Linear(4, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.view(-1, 4)
        weights, ids = self.gate(h).softmax(-1).topk(CHOSEN, -1)
        return self.of(h, weights, ids, self.experts).view(x.shape)


@pytest.mark.parametrize("of", [as_mixtral, as_mistral, of_the_first])
def test_a_loop_over_experts_gives_what_it_gives(of: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(2)
    module = Mixture(of)
    graph = capture_module(module, {"x": torch.zeros(2, 2, 4)}, training=True)
    program = compile_graph(graph, torch.device("cpu"), training=True)
    held = variables_from_module(module)
    leaves = {name: held[name].clone().requires_grad_() for name in program.variables}
    for samples in (1, 4):  # with one, some expert has no row
        x = torch.randn(samples, 2, 4)
        wanted, found = module(x), program.run([x], list(leaves.values()), None)[0]
        torch.testing.assert_close(found, wanted)
        gradients = torch.autograd.grad(wanted.square().sum(), list(module.parameters()))
        names = [name for name, _ in module.named_parameters()]
        own = torch.autograd.grad(found.square().sum(), [leaves[name] for name in names])
        for ours, theirs in zip(own, gradients, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_row_lookups_of_a_mask_that_follows_from_sizes_are_indices() -> None:
    class Upper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, columns = torch.where(torch.ones(4, 4).triu(1) == 1)
            return self.first(x)[:, rows] * x[:, columns]

    module, x = Upper(), torch.randn(3, 4)
    program = compile_graph(capture_module(module, {"x": x}), torch.device("cpu"), training=False)
    torch.testing.assert_close(
        program.run([x], list(variables_from_module(module).values()), None)[0], module(x)
    )


@pytest.mark.parametrize(
    ("of", "says"),
    [
        (lambda h, _, ids, __: h[torch.where(ids == 0)[0]].flip(0), "the model calls flip on what a mask chooses"),
        (lambda h, _, ids, __: h[None, torch.where(ids == 0)[0]] * 2, r"follows from what is in a tensor.*, at \S*test_row_lookups\.py"),
        (lambda h, _, ids, __: h * 2 if (ids == 0).any() else h, r"decides by values .*any rows are chosen can be left out"),
        (lambda h, _, ids, __: h.index_add(0, torch.where(ids == 0)[0], h), r"follows from what is in a tensor.*, at \S*test_row_lookups\.py"),
    ],
)  # fmt: skip
def test_what_needs_to_know_how_many_there_are_is_refused(of: Callable[..., torch.Tensor], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture_module(Mixture(of), {"x": torch.zeros(2, 2, 4)}, training=True)
