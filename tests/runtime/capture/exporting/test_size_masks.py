"""What a mask chooses that follows from sizes alone is of a size as others are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fusion.dag.ir import serialise
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph


class Pairs(nn.Module):
    """Two views of each sample, each held against all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = functional.normalize(self.layer(torch.cat([a, b])), dim=1)
        alike, n = h @ h.T, h.shape[0]
        eye = torch.eye(n, dtype=torch.bool)
        labels = torch.cat([torch.arange(n // 2)] * 2)
        same = (labels[:, None] == labels)[~eye].view(n, -1)
        others = alike[~eye].view(n, -1)
        scores = torch.cat([others[same].view(n, -1), others[~same].view(n, n - 2)], 1)
        loss = functional.cross_entropy(scores, torch.zeros(n, dtype=torch.long))
        partner = alike[eye.roll(n // 2, 0)] - alike.logsumexp(-1)
        written = alike * 1
        written[~eye] = alike.masked_select(~eye) ** 2
        first, second = h.chunk(2)
        upper = (first[:, :, None] * second[:, None])[:, torch.ones(4, 4).triu(1).bool()]
        both = torch.cat([torch.diag(alike, n // 2), alike.diagonal(-(n // 2))])
        return both.exp().mean() + loss + partner.mean() + written.sin().mean() + (upper @ upper.T).mean()


class Others(nn.Module):
    """One view held against those of all other samples: of two samples, one column."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one = self.layer(a) @ self.layer(b).T
        less = one[~torch.eye(a.shape[0], dtype=torch.bool)].view(a.shape[0], -1)
        return (less - less.logsumexp(1, keepdim=True)).mean()


@pytest.mark.parametrize("kind", [Pairs, Others])
def test_values_and_gradients_are_torch_s(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    module = kind()
    graph = capture_module(module, {n: torch.zeros(2, 6) for n in "ab"}, training=True)
    program = compile_graph(serialise.decode(serialise.encode(graph)), torch.device("cpu"), training=True)
    for rows in (2, 5):
        given = [torch.randn(rows, 6) for _ in "ab"]
        values = variables_from_module(module)
        leaves = [values[name].clone().requires_grad_() for name in program.variables]
        (found,) = program.run(given, leaves, None)
        found.backward()
        module.zero_grad()
        wanted = module(*given)
        wanted.backward()
        torch.testing.assert_close(found, wanted)
        named = dict(zip(program.variables, leaves, strict=True))
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(named[name].grad, parameter.grad)


def test_a_mask_that_chooses_unlike_numbers_of_each_row_is_refused() -> None:
    class Above(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alike = x @ x.T
            return alike[torch.ones_like(alike).triu(1).bool()].view(-1, 1)

    with pytest.raises(CaptureError, match=r"calls view on what a mask chooses.*test_size_masks\.py:\d+"):
        capture_module(Above(), {"x": torch.zeros(2, 6)}, training=True)
