"""What is computed of the rows that a mask chooses, and its gradients, are torch's; what needs their number is refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion.dag.ir import serialise
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

ROWS, LENGTH, WIDTH = 4, 5, 6


class Tagger(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(3, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self, self.layer(x), y)


def by_token(_: Any, z: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    chosen = loss[y != 0]
    return chosen.mean() + (chosen * chosen).sum() / (y != 0).sum() + chosen.sum() / chosen.numel()


def by_class(_: Any, z: Tensor, y: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, WIDTH)
    return F.cross_entropy(z[y != 0], y[y != 0], weight=weight, label_smoothing=0.1)


def selected(_: Any, z: Tensor, y: Tensor) -> Tensor:
    mask = F.one_hot(y, WIDTH) > 0
    first, again = z[..., 0].masked_select(y > 2), torch.masked_select(y, y > 2).float()
    own, wanted = torch.masked_select(z, mask), torch.masked_select(z.detach() * 2, mask)
    return F.mse_loss(own, wanted) + F.smooth_l1_loss(own, wanted, reduction="sum") + F.l1_loss(first, again)


def out_of_domain(_: Any, z: Tensor, y: Tensor) -> Tensor:
    """Where it is not chosen, a quotient by zero: there is no gradient of it."""
    chosen = y[y != 0].float()
    return (z[..., 0][y != 0].exp() / chosen).log().mean() + (
        z[..., 1][y != 0].exp() * (chosen - 0.5)
    ).sqrt().sum()


def distilled(_: Any, z: Tensor, y: Tensor) -> Tensor:
    found = z[y != 0]
    return F.kl_div(found.log_softmax(-1), F.softmax(found.detach() * 2, dim=-1), reduction="batchmean")


def routed(m: Any, z: Tensor, y: Tensor) -> Tensor:
    """Experts, each with the tokens that are its own."""
    made = torch.zeros_like(z)
    share, which = z.softmax(-1)[..., :2].max(-1)
    for i, expert in enumerate(m.experts):
        mine = which == i
        made[mine] = torch.relu(expert(z[mine])) * share[mine].unsqueeze(-1)
    return made.square().sum()


def of_each(_: Any, z: Tensor, y: Tensor) -> Tensor:
    """Some of each row."""
    rows = z[y != 0]
    return (
        rows[:, 0].exp().mean()
        + rows[..., 1:3].square().sum()
        + rows[:, None, -1].sum()
        + rows.max(1).values.mean()
    )


def one_row(m: Any, z: Tensor, y: Tensor) -> Tensor:
    """The same row wherever the mask says."""
    made = z * 2
    made[y == 2] = m.experts[0].bias
    return (made.exp() * z).mean()


@pytest.mark.parametrize(
    "function", [by_token, by_class, selected, out_of_domain, distilled, routed, of_each, one_row]
)
@pytest.mark.parametrize("rows", [ROWS, ROWS + 3])
def test_values_and_gradients_are_torch_s(function: Callable[..., Tensor], rows: int) -> None:
    torch.manual_seed(1)
    module = Tagger(function)
    example = {"x": torch.randn(ROWS, LENGTH, 3), "y": torch.randint(0, WIDTH, (ROWS, LENGTH))}
    graph = capture_module(module, example, training=True, loss_inputs=())
    program = compile_graph(serialise.decode(serialise.encode(graph)), torch.device("cpu"), training=True)
    x, y = torch.randn(rows, LENGTH, 3), torch.randint(0, WIDTH, (rows, LENGTH))
    y[0] = 0
    values = variables_from_module(module)
    leaves = {name: values[name].clone().requires_grad_() for name in program.variables}
    (found,) = program.run([x, y], list(leaves.values()), None)
    wanted = module(x, y)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    found.backward()
    wanted.backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(leaves[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, z, y: z[y > 0],
        lambda m, z, y: z[y > 0].sum(0).softmax(0).sum() / len(y[y > 0]),
        lambda m, z, y: F.cross_entropy(z[y > 0], y[y > 1]),  # of as many rows only by chance
        lambda m, z, y: F.mse_loss(z[y > 0].sum(-1, keepdim=True), y[y > 0].float()),  # every row with every other
        lambda m, z, y: (z[y > 0] @ z[y > 0].transpose(0, 1)).mean(),
        lambda m, z, y: z[y > 0].sort(0).values.sum(),
        lambda m, z, y: (z[y > 0] * torch.ones(1, WIDTH)).norm(2, 0).sum(),
        lambda m, z, y: z[y > 0][0].sum(),
        lambda m, z, y: z[y > 0][:2, 0].mean(),
        lambda m, z, y: z[..., 0][y > 0][..., 1].mean(),
        lambda m, z, y: z[y > 0][..., 0, 1].mean(),
        lambda m, z, y: torch.cat([z[y > 0], z[y == 0]]).mean(),
    ],
)  # fmt: skip
def test_what_needs_their_number_is_refused(function: Callable[..., Any]) -> None:
    example = {"x": torch.randn(ROWS, LENGTH, 3), "y": torch.ones(ROWS, LENGTH, dtype=torch.int64)}
    with pytest.raises(
        CaptureError, match="the size of a value follows from what is in a tensor: use"
    ) as error:
        capture_module(Tagger(function), example, training=True, loss_inputs=())
    assert "test_masked_rows.py:" in str(error.value)
