"""A model whose code does otherwise while it is captured than when it runs is refused by its numbers; one that is run for it is as it was."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from fusion.runtime.capture.python import eager_run
from fusion.runtime.capture.python.python_model import PythonGraphs, PythonModel
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.job.spec import PythonConfig

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        h = self.norm(self.first(x))
FORWARD
        return self.head(h)

def model():
    return Net()

def loss(made, y):
    return F.cross_entropy(made, y)
"""
EXAMPLE = {"x": torch.arange(12.0).view(3, 4).sin(), "y": torch.tensor([0, 2, 1])}


def capture(folder: Path, forward: str, *, evaluated: bool = True) -> tuple[PythonModel, PythonGraphs]:
    path = folder / "model.py"
    path.write_text(MODEL.replace("FORWARD", textwrap.indent(forward, " " * 8)))
    model = PythonModel(PythonConfig(path=path, function="model", loss="loss"), ("x", "y"), seed=1)
    return model, model.capture(EXAMPLE, evaluated=evaluated)


@pytest.mark.parametrize(
    ("forward", "mode"),
    [
        ("if torch.compiler.is_compiling():\n    h = h * 3", "in training"),
        ("if type(x) is not torch.Tensor:\n    h = h * 3", "in training"),
        (
            "try:\n    if x.abs().sum().item() >= 0:\n        h = h * 3\nexcept Exception:\n    pass",
            "in training",
        ),
        ("if not self.training and torch.compiler.is_compiling():\n    h = h * 3", "in evaluation"),
    ],
)
def test_what_only_its_numbers_show_is_refused(tmp_path: Path, forward: str, mode: str) -> None:
    with pytest.raises(
        CaptureError, match=rf"gives \d.* for the first samples, {mode}, and the model itself \d"
    ):
        capture(tmp_path, forward, evaluated=mode == "in evaluation")


def test_a_size_that_is_another_one_for_one_sample_is_refused(tmp_path: Path) -> None:
    text = "if x.shape[0] > 1:\n    k = x.shape[0] - 1\nelse:\n    k = 1\nh = h + h[:k].sum(0)"
    with pytest.raises(
        CaptureError, match=r"for the first sample alone, in evaluation, .*otherwise with one sample"
    ):
        capture(tmp_path, text)


def test_a_model_that_was_run_for_it_is_as_it_was(tmp_path: Path) -> None:
    model, graphs = capture(
        tmp_path, "if self.training:\n    with torch.no_grad():\n        self.seen.lerp_(h.mean(0), 0.1)"
    )
    module = model.module
    assert module.training and not module.get_buffer("seen").any()
    norm = module.get_submodule("norm")
    assert isinstance(norm, torch.nn.BatchNorm1d) and norm.num_batches_tracked == 0
    values = graphs.read(graphs.training.variables)
    assert torch.equal(values["norm.running_var"], torch.ones(8))


@pytest.mark.parametrize(
    "forward",
    [
        "h = F.dropout(h, 0.5, self.training)",
        pytest.param("h = h * torch.rand(8)", marks=pytest.mark.slow),
    ],
)
def test_one_that_draws_is_not_held_against_other_numbers(tmp_path: Path, forward: str) -> None:
    capture(tmp_path, forward)


def test_one_that_takes_too_long_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_run, "MOST_FLOPS", 10)
    capture(tmp_path, "if torch.compiler.is_compiling():\n    h = h * 3")
