"""A model whose code does otherwise with a batch of one sample is refused: a graph has the branch for several alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusion.runtime.capture.capture import capture_module
from fusion.runtime.job.errors import CaptureError


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def captured(function: Callable[[Tensor], Tensor], training: bool) -> None:
    capture_module(Model(function), {"x": torch.zeros(4, 6)}, training=training)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0) if x.shape[0] > 1 else x


def doubled(x: Tensor) -> Tensor:
    if x.size(0) == 1:
        x = x * 2
    return x.relu()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "function",
    [
        centred,
        doubled,
        lambda x: x * (2 if x.shape[0] == 1 else 3),
        lambda x: x.softmax(0 if len(x.shape) == 2 and x.shape[0] > 1 else 1),
        lambda x: x.relu() if x.shape[0] > 1 else x,
    ],
)
def test_a_branch_for_one_sample_is_refused_with_its_line(
    function: Callable[[Tensor], Tensor], training: bool
) -> None:
    with pytest.raises(CaptureError, match="otherwise with a batch of one sample"):
        captured(function, training)


@pytest.mark.parametrize("training", [True, False])
def test_a_branch_where_no_gradient_is_taken_is_refused_with_its_line(training: bool) -> None:
    with pytest.raises(
        CaptureError, match=r"no gradient is taken .*, at \S*test_one_sample\.py:\d+, .*ask self\.training"
    ):
        captured(lambda x: x * 2 if torch.is_grad_enabled() else x + 1, training)


def test_the_line_is_told() -> None:
    with pytest.raises(CaptureError, match=r"at \S*test_one_sample\.py:\d+, and"):
        captured(centred, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x / x.shape[0] + torch.arange(x.shape[0])[:, None],
        lambda x: x.view(x.shape[0], 3, 1).expand(-1, 3, 3).reshape(-1, 9).mean(1, keepdim=True) + x[:1],
        lambda x: x @ torch.eye(3) * torch.zeros(x.shape[0], 3),
        nn.BatchNorm1d(3),
    ],
)
def test_what_is_the_same_for_all_sizes_is_captured(function: Callable[[Tensor], Tensor]) -> None:
    captured(function, False)
