"""Parts of a batch, of which a model's code makes sizes: the graph gives what the module gives for every number of samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fusion.dag.ir import serialise
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

SAMPLES = (1, 2, 3, 4, 5, 9)


class Parts(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.first(x))


def halves(h: torch.Tensor) -> torch.Tensor:
    n = h.shape[0]
    return torch.cat([h[: n // 2].sin(), h[n // 2 :]])


def of_a_square(h: torch.Tensor) -> torch.Tensor:
    n = h.shape[0]
    return (h @ h.T)[:, : n // 2] @ h[: n // 2]


def by_fractions(h: torch.Tensor) -> torch.Tensor:
    n = h.shape[0]
    k = int(1.25 * n / 2)
    return h[: int(n / 2)].sum(0) + h[: math.ceil(n / 3)].sum(0) + torch.cat([h, h])[:k].sum(0)


def pieces(h: torch.Tensor) -> torch.Tensor:
    n = h.shape[0]
    one, two = torch.split(h, [n // 2, n - n // 2])
    return torch.cat([two, one.sin()])


def largest(h: torch.Tensor) -> torch.Tensor:
    return h + h.norm(dim=1).topk(h.shape[0] // 2).values.sum()


def windows(h: torch.Tensor) -> torch.Tensor:
    """As a Swin transformer finds its batch again."""
    apart = h.view(-1, 2, 2).transpose(0, 1).reshape(-1, 2)
    samples = int(apart.shape[0] / (4 * 2 / 2 / 2))
    return apart.view(samples, -1).cos()


def every_few(h: torch.Tensor) -> torch.Tensor:
    return h[::2].sin().sum(0) * h[1::2].sum(0) + h[2::3, ::2].sum() + torch.cat([h, h])[1::2].cos().sum(0)


def every_few_of_a_part(h: torch.Tensor) -> torch.Tensor:
    n = h.shape[0]
    return h[::2].t()[:, : n // 3] + h[: n // 3 * 2][::2].t()


def doubled(h: torch.Tensor) -> torch.Tensor:
    h = h * 1
    h[::2] *= 2
    return h


def values(of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    made = of(x)
    return [made, *torch.autograd.grad(made.square().sum(), [x], allow_unused=True)]


@pytest.mark.parametrize(
    "function", [halves, of_a_square, by_fractions, pieces, largest, windows, every_few, every_few_of_a_part]
)
def test_parts_of_a_batch_are_those_of_every_batch(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(1)
    module = Parts(function)
    graph = capture_module(module, {"x": torch.zeros(3, 3)}, training=True)
    program = compile_graph(serialise.decode(serialise.encode(graph)), torch.device("cpu"), training=True)
    held = variables_from_module(module)
    given = [held[name] for name in program.variables]
    for samples in SAMPLES:
        x = torch.randn(samples, 3, requires_grad=True)
        found = values(lambda each: program.run([each], given, None)[0], x)
        for ours, theirs in zip(found, values(module, x), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_two_pieces_are_those_of_all_batches_but_of_one() -> None:
    def swapped(h: torch.Tensor) -> torch.Tensor:
        one, two = h.chunk(2)
        return torch.cat([two, one])

    module = Parts(swapped)
    program = compile_graph(
        capture_module(module, {"x": torch.zeros(3, 3)}), torch.device("cpu"), training=False
    )
    for samples in SAMPLES[1:]:
        x = torch.randn(samples, 3)
        torch.testing.assert_close(
            program.run([x], list(variables_from_module(module).values()), None)[0], module(x)
        )


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda h: h[: max(1, h.shape[0] // 4)].sum(0), r"larger or the smaller of sizes, .*, at \S*test_parts_of_batch\.py:\d+: "),
        (lambda h: h[: max(1, h.shape[0] - 1)].sum(0), r"larger or the smaller of sizes, .*, at \S*test_parts_of_batch\.py:\d+: "),
        (lambda h: h[: int(0.7 * h.shape[0])].sum(0), r"test_parts_of_batch\.py:\d+: .*write 7 \* n // 10"),  # of 90 samples it is 62
        (lambda h: h[: int(0.7 * h.shape[0] * 5)].sum(0), r"test_parts_of_batch\.py:\d+: .*write 7 \* n // 10"),
        (lambda h: h[: int(0.1 * h.shape[0] + 0.2 * h.shape[0])].sum(0), r"test_parts_of_batch\.py:\d+: .*write 7 \* n // 10"),
        (doubled, r"one row in 2 of a size that is free: .* == 0, at \S*test_parts_of_batch\.py:\d+$"),
        (lambda h: h * (h.shape[0] / 3), r"made of a size that is free, .*, at \S*test_parts_of_batch\.py:\d+$"),
        (lambda h: h.split(h.shape[0] // 2)[0], r"test_parts_of_batch\.py:\d+: .*no pieces of which there may be more or fewer"),
        (lambda h: h[: h.shape[0] // 2] - h[h.shape[0] // 2 :], r"test_parts_of_batch\.py:\d+: The size of tensor a \(\(batch//2\)\) must match"),
    ],
)  # fmt: skip
def test_what_is_another_one_for_some_batches_is_refused(
    function: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    with pytest.raises(CaptureError, match=says):
        capture_module(Parts(function), {"x": torch.zeros(3, 3)})
