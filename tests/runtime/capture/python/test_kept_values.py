"""What a model writes to its buffers in training is there in its next run, as in torch, whatever the cuts and the plane."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.ir import serialise
from fusion.dag.ir.opset_pointwise import KEEP
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.python.python_model import PythonModel
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.job.spec import PythonConfig
from fusion.runtime.planes.plane import Plane, RngKey, TrainingStage
from fusion.runtime.planes.torch_plane import TorchPlane

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("u", torch.ones(4) / 2)
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = torch.tanh(self.layer(x))
        if self.training:
            with torch.no_grad():
                self.u.copy_(nn.functional.normalize(self.layer.weight @ self.u, dim=0))
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)  # set anew
            self.samples += x.shape[0]  # nothing of the run reads it
        h = (h - self.mean) / (self.u @ self.layer.weight @ self.u)
        return self.head(h) * KIND

def model():
    return Net()

def loss(made, y):
    return (made - y).square().mean()
"""
BUFFERS = ("mean", "u", "samples")


def made(folder: Path, kind: str) -> PythonModel:
    path = folder / "model.py"
    path.write_text(MODEL.replace("KIND", kind))
    return PythonModel(PythonConfig(path=path, loss="loss"), ["x", "y"], seed=3)


def trained(stages: list[TrainingStage], batches: list[dict[str, torch.Tensor]]) -> list[float]:
    losses = []
    for m, batch in enumerate(batches):
        values = dict(batch)
        for stage in stages:
            values.update(stage.forward(m, values, RngKey(0, 0, m)))
        losses.append(float(values["result/0"]))
    for m in range(len(batches)):  # after all of them, as in a pipeline
        arrived: dict[str, torch.Tensor] = {}
        for stage in reversed(stages):
            mine = {e.name: arrived[e.name] for e in stage.stage.sends if e.needs_gradient}  # type: ignore[attr-defined]
            for name, gradient in stage.backward(m, mine, 1.0).items():
                arrived[name] = arrived[name] + gradient if name in arrived else gradient
    return losses


def state(stages: list[TrainingStage]) -> dict[str, torch.Tensor]:
    found = {k: v for s in stages for k, v in s.state().items()}
    return {name: found[f"variable/{name}"].clone() for name in BUFFERS}


def test_every_plane_and_every_cut_keeps_what_torch_keeps(tmp_path: Path) -> None:
    python, twin = made(tmp_path, "1"), made(tmp_path, "1").module.train()
    torch.manual_seed(0)
    batches = [{"x": torch.randn(n, 4), "y": torch.randn(n, 2)} for n in (3, 1, 2)]
    graphs = python.capture(batches[0])
    graph = serialise.decode(serialise.encode(trained_graph(graphs.training)))
    assert sorted(str(n.args[0]) for n in graph.nodes if n.op == KEEP) == sorted(BUFFERS)
    losses = []
    for batch in batches:
        loss = (twin(batch["x"]) - batch["y"]).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
    planes: list[tuple[Plane, list[int]]] = [(TorchPlane(), [cut]) for cut in legal_cuts(graph)]
    try:
        from fusion.runtime.planes.jax_plane.jax_plane import JaxPlane

        planes.append((JaxPlane(), list(legal_cuts(graph)[:1])))
    except ImportError:
        pass
    assert len(planes) > 2
    kept = {name: dict(twin.named_buffers())[name] for name in BUFFERS}
    for plane, cuts in planes:
        stages = [
            plane.training(stage, variables_from_module(python.module), OptimizerConfig())
            for stage in split(graph, cuts)
        ]
        before = state(stages)
        trained(stages, batches)
        torch.testing.assert_close(state(stages), before, rtol=0, atol=0)  # not yet committed
        for stage in stages:
            stage.discard()
        assert trained(stages, batches) == pytest.approx(losses, rel=1e-5)
        for name, parameter in twin.named_parameters():
            held = [g[name] for stage in stages if name in (g := stage.gradients())]
            torch.testing.assert_close(sum(held), parameter.grad, rtol=1e-4, atol=1e-6)
        for stage in stages:
            stage.apply(0.0, 1.0)
        torch.testing.assert_close(state(stages), kept, rtol=1e-5, atol=1e-6)
        values = dict(batches[0])
        for stage in stages:
            values.update(stage.evaluate(values))
        twin.eval()
        wanted = (twin(batches[0]["x"]) - batches[0]["y"]).square().mean()
        assert float(values["result/0"]) == pytest.approx(float(wanted.detach()), rel=1e-5)
        twin.train()


STATISTICS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
        self.layer, self.norm = nn.Linear(15, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        a, b = (self.norm(self.layer(self.before(each).flatten(1))) for each in (x, x.flip(2)))
        c = (a.T @ b).div_(x.shape[0])
        return torch.diagonal(c).add_(-1).pow_(2).sum() + c.square().sum()  # a view that is written to

def model():
    return Net()
"""


def test_statistics_go_on_as_torch_s(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(STATISTICS)
    python, twin = (PythonModel(PythonConfig(path=path), ["x"], seed=3) for _ in range(2))
    torch.manual_seed(0)
    batches = [{"x": torch.randn(n, 3, 5)} for n in (3, 2)]
    graph = trained_graph(python.capture(batches[0], evaluated=False).training)
    wanted = [twin.module.train()(batch["x"]) for batch in batches]
    for loss in wanted:
        loss.backward()
    plane = TorchPlane()
    stages = [
        plane.training(stage, variables_from_module(python.module), OptimizerConfig())
        for stage in split(graph, legal_cuts(graph)[1:2])
    ]
    assert trained(stages, batches) == pytest.approx([float(loss.detach()) for loss in wanted], rel=1e-5)
    for name, parameter in twin.module.named_parameters():
        held = [g[name] for stage in stages if name in (g := stage.gradients())]
        torch.testing.assert_close(sum(held), parameter.grad, rtol=1e-4, atol=1e-4)
    for stage in stages:
        stage.apply(0.0, 1.0)
    found = {k: v for s in stages for k, v in s.state().items()}
    for name, value in twin.module.named_buffers():
        if value.is_floating_point():  # what counts batches is told when it is saved
            torch.testing.assert_close(found[f"variable/{name}"], value, rtol=1e-5, atol=1e-6)
