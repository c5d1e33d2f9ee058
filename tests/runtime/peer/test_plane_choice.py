"""Which plane computes is chosen by name, and only then loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fusion.cli.main import main
from fusion.cli.terminal import extras
from fusion.runtime.peer.plane_choice import JAX, TORCH, choose
from fusion.runtime.planes.torch_plane import TorchPlane


def test_a_plane_is_chosen_by_name() -> None:
    assert isinstance(choose(TORCH, "cpu", 1), TorchPlane)


def test_a_plane_that_there_is_not_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^plane: torch or jax, not 'abacus'$"):
        choose("abacus", "cpu", 1)


def test_a_plane_whose_library_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(
        ValueError, match=r'^plane: jax is not installed here: pip install "fusion-peer\[jax\]"$'
    ):
        choose(JAX, "cpu", 1)


def test_start_says_what_to_install_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "jax")
    assert main(["start", "--plane", "jax", "--home", str(tmp_path)]) == 2
    error_output = capsys.readouterr().err
    assert error_output == "fusion-peer: --plane jax needs the jax extra: pip install 'fusion-peer[jax]'\n"


TRAINS = """
import sys
from fusion.cli.terminal.fast_imports import lean_imports
with lean_imports():
    import fusion.runtime.peer.peer
import torch
from fusion.dag.ir.dims import bind
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.peer.plane_choice import TORCH, choose
from fusion.runtime.peer.probes import probes
from fusion.runtime.planes.optimizer import Optimizer
from fusion.runtime.planes.plane import RngKey

graph = probes()[0].graph
some = lambda each: torch.ones([bind(dim, {}) for dim in each.type.shape])
stage = choose(TORCH, "cpu", 1).training(
    probes()[0].stage, {each.name: some(each) for each in graph.variables}, OptimizerConfig()
)
stage.evaluate({each.name: some(each) for each in graph.inputs})
stage.forward(0, {each.name: some(each) for each in graph.inputs}, RngKey(0, 0, 0))
stage.backward(0, {}, 1.0)
print(any(gradient.any() for gradient in stage.gradients().values()))
weight = torch.ones(3, requires_grad=True)
weight.grad = torch.ones(3)
for kind in ("adamw", "sgd"):
    Optimizer(OptimizerConfig(kind=kind), {"w": weight}).step(0.1)
print([name for name in ("torch._dynamo", "sympy", "torch._inductor") if name in sys.modules])
"""


@pytest.mark.program
def test_a_peer_that_trains_does_not_load_the_compiler() -> None:
    """840 modules, 80 MiB and 1.8 s of a core, for each peer that has a stage or stands by for one."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["True", "[]"]
