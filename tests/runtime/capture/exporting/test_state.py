"""What a model would remember from run to run, or ask of values, is refused with its line: none of it is left out without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusion.runtime.capture.capture import capture_module
from fusion.runtime.job.errors import CaptureError


class Part(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.layer(x))


def averaged(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return x - m.mean


def halved(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean = m.mean / 2
    return x - m.mean


def put(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean.data = x.detach().mean(0)
    return x


def moved(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.mean, m.table = m.mean.to(x.device).contiguous(), (2 * torch.arange(3.0)).cos()
    return x * m.table - m.mean


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (averaged, "sets its buffer 0.mean anew each time it runs"),
        (halved, "sets its buffer 0.mean anew each time it runs"),
        (put, "sets .data of a tensor"),
        (lambda m, x: x / len(x), r"takes len\(\) of a tensor whose first size is free"),
        (lambda m, x: x[x > 0], "the size of a value follows from what is in a tensor: use torch.where or a mask"),
        (lambda m, x: torch.where(x > 0, x, torch.nan), r"a constant that is not a number \(NaN\)"),
        (lambda m, x: nn.functional.ctc_loss(x, x.long(), (3,), (3,)), r"ctc_loss, .*: give it log_probs \(time, batch, classes\)"),
    ],
)  # fmt: skip
def test_it_is_refused_with_its_line(function: Callable[[Any, torch.Tensor], Any], why: str) -> None:
    with pytest.raises(CaptureError, match=why) as refused:
        capture_module(nn.Sequential(Part(function)), {"input": torch.zeros(2, 6)}, training=True)
    assert "test_state.py:" in str(refused.value)


def test_a_buffer_that_is_moved_or_made_again_is_not_state() -> None:
    graph = capture_module(nn.Sequential(Part(moved)), {"input": torch.zeros(2, 6)}, training=True)
    assert {"0.mean"} < {variable.name for variable in graph.variables}
