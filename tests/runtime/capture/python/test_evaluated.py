"""Held-out samples get the loss of the module in evaluation, whatever it does otherwise in training, the cuts and the plane."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest
import torch

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.dag.ir.opset_pointwise import BY_MODE
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.python.python_model import PythonModel
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.job.spec import PythonConfig
from fusion.runtime.planes.plane import Plane, RngKey
from fusion.runtime.planes.torch_plane import TorchPlane

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(4, 8), nn.Linear(8, 8)
        self.head, self.other = nn.Linear(8, 3), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x):
FORWARD

def model():
    return Net()

def loss(made, y):
    if isinstance(made, tuple):
        return F.cross_entropy(made[0], y) + 0.3 * F.cross_entropy(made[1], y)
    return F.cross_entropy(made, y)
"""
PATHS = """
h = self.norm(self.first(x))
f = torch.relu(self.block(h))
h = h + f * (torch.rand(len_(x), 1) < 0.8) if self.training else h + 0.8 * f
return self.head(h)
""".replace("len_(x)", "x.shape[0]")
HEADS = """
h = F.dropout(torch.relu(self.first(x)), 0.5, self.training)
return (self.head(h), self.other(torch.tanh(self.block(h)))) if self.training else self.other(h)
"""
WRITTEN = """
h = self.first(x)
if self.training:
    mean = h.mean(0)
    with torch.no_grad():
        self.centre.mul_(0.9).add_(0.1 * mean)
    return self.head(torch.relu(h - mean))
return self.head(torch.relu(self.block(h) - self.centre))
"""
TYPES = """
h = self.norm(torch.relu(self.first(x)))
if not self.training:
    h = torch.cat([h, self.block(h)], 1)
return h.reshape(x.shape[0], -1, 2).mean(-1)[:, :3] + self.head(h[:, :8])
"""
ALWAYS_BY_BATCH = """
norm = self.norm
h = F.batch_norm(self.first(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, True)
return self.head(torch.relu(h))
"""
SAME = "return self.head(F.dropout(self.norm(self.first(x)), 0.5, self.training))"


def captured(folder: Path, forward: str) -> tuple[PythonModel, Graph, dict[str, torch.Tensor]]:
    path = folder / "model.py"
    path.write_text(MODEL.replace("FORWARD", textwrap.indent(forward, " " * 8)))
    python = PythonModel(PythonConfig(path=path, loss="loss"), ["x", "y"], seed=3)
    torch.manual_seed(0)
    python.module.norm.running_mean.normal_()  # type: ignore[union-attr,operator]
    python.module.centre.normal_()  # type: ignore[operator]
    batch = {"x": torch.randn(5, 4), "y": torch.tensor([0, 1, 2, 1, 0])}
    graph = trained_graph(python.capture(batch).training)
    return python, serialise.decode(serialise.encode(graph)), batch


def planes() -> list[Plane]:
    try:
        from fusion.runtime.planes.jax_plane.jax_plane import JaxPlane
    except ImportError:
        return [TorchPlane()]
    return [TorchPlane(), JaxPlane()]


def require_exact(folder: Path, forward: str, plane: Plane, most: int) -> None:
    """At so many cuts: the loss in evaluation, and in training the loss and its gradients."""
    python, graph, batch = captured(folder, forward)
    assert any(node.op == BY_MODE for node in graph.nodes) and python._loss is not None
    own = copy.deepcopy(python.module).train()
    torch.manual_seed(1)
    loss = python._loss(own(batch["x"]), batch["y"])
    loss.backward()
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    twin = copy.deepcopy(python.module).eval()
    wanted = float(python._loss(twin(batch["x"]), batch["y"]).detach())
    for cut in legal_cuts(graph)[:most]:
        stages = [
            plane.training(stage, variables_from_module(python.module), OptimizerConfig())
            for stage in split(graph, [cut])
        ]
        values = dict(batch)
        for stage in stages:
            values.update(stage.evaluate(values))
        assert float(values["result/0"]) == pytest.approx(wanted, rel=1e-5)
        values = dict(batch)
        for stage in stages:
            values.update(stage.forward(0, values, RngKey(0, 0, 0)))
        arrived: dict[str, torch.Tensor] = {}
        for stage in reversed(stages):
            mine = {e.name: arrived[e.name] for e in stage.stage.sends if e.needs_gradient}  # type: ignore[attr-defined]
            for name, gradient in stage.backward(0, mine, 1.0).items():
                arrived[name] = arrived[name] + gradient if name in arrived else gradient
        held: dict[str, torch.Tensor] = {}
        for stage in stages:  # a weight that two read is in both
            for name, gradient in stage.gradients().items():
                held[name] = held[name] + gradient if name in held else gradient
        assert (
            held.keys() == gradients.keys()
        )  # of what is read in evaluation alone an optimizer would decay the weights
        if "rand" not in forward and "dropout" not in forward:
            assert float(values["result/0"]) == pytest.approx(float(loss.detach()), rel=1e-5)
            torch.testing.assert_close(held, gradients, rtol=1e-4, atol=1e-6)


def test_a_model_that_does_otherwise_in_evaluation_is_evaluated_so(tmp_path: Path) -> None:
    require_exact(tmp_path, WRITTEN, planes()[0], 99)


@pytest.mark.slow
@pytest.mark.parametrize("plane", planes(), ids=lambda plane: plane.name)
@pytest.mark.parametrize("forward", [PATHS, HEADS, WRITTEN, TYPES, ALWAYS_BY_BATCH])
def test_so_is_any_on_every_plane(tmp_path: Path, forward: str, plane: Plane) -> None:
    require_exact(tmp_path, forward, plane, 3)


def test_one_that_does_the_same_has_no_more_than_is_trained(tmp_path: Path) -> None:
    python, graph, batch = captured(tmp_path, SAME)
    alone = trained_graph(python.capture(batch, evaluated=False).training)
    assert graph == alone


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        ("z = self.head(self.first(x))\nreturn z if self.training else z.double()", r"the loss is float64\[\] in evaluation, .* not float32\[\]"),
        ("z = self.head(self.first(x))\nif not self.training and z.sum() > 0:\n    z = z + 1\nreturn z",
         r"in evaluation, for the samples that are held out: .* decides by values of tensors, at .*model\.py:\d+: "),
        ("z = self.head(self.first(x))\nreturn z if self.training else {'z': z}", r"in evaluation, .*model\.py:\d+: .* not dict"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_evaluated_is_refused_where_samples_are_held_out(
    tmp_path: Path, forward: str, says: str
) -> None:
    with pytest.raises(CaptureError, match=says):
        captured(tmp_path, forward)
