"""What a stage in JAX keeps of the microbatches under way, and how often it is compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.staged import make
from torch import nn

from fusion.dag.cutting.cuts import split
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.peer.plane_choice import JAX, choose
from fusion.runtime.planes.plane import RngKey

jax = pytest.importorskip("jax", reason="the extra jax is not installed")

STEPS, MICROBATCHES = 2, 3


@pytest.mark.parametrize("name", ["tied", "chain", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_microbatch_under_way_holds_no_copy_of_the_weights(name: str) -> None:
    case = make(name)
    (whole,) = split(case.graph, ())
    stage = choose(JAX, "cpu", 1).training(whole, variables_from_module(case.module), OptimizerConfig())
    weights = {tuple(v.type.shape) for v in whole.graph.variables if len(v.type.shape) > 1}
    weights |= {shape[::-1] for shape in weights}
    for i in range(MICROBATCHES):
        stage.forward(i, case.batch(i), RngKey(0, 0, i))
    values = {id(value) for value in stage._values.values()}  # type: ignore[attr-defined]
    for stash in stage._stashes.values():  # type: ignore[attr-defined]
        held, returned = stash.residuals
        assert any(id(value) in values for value in held)
        assert not weights & {value.shape for value in returned}


@pytest.mark.parametrize("name", ["chain", pytest.param("tied", marks=pytest.mark.slow)])
def test_a_stage_is_compiled_once_for_all_microbatches_and_steps(name: str) -> None:
    """XLA took 22 s for the backward pass of 512 operators, and again for that of a step's second microbatch."""
    case = make(name)
    (whole,) = split(case.graph, ())
    stage = choose(JAX, "cpu", 1).training(whole, variables_from_module(case.module), OptimizerConfig())
    # Those of stages before this one count, where functions are theirs too.
    shared = (stage._squares, stage._optimizer._update)  # type: ignore[attr-defined]
    before = [each._cache_size() for each in shared]
    for step in range(STEPS):
        for i in range(MICROBATCHES):
            stage.forward(i, case.batch(i), RngKey(0, step, i))
            stage.backward(i, {}, 1.0)
        stage.squared_norm()
        stage.apply(1e-3, 1.0)
    (passes,) = stage._passes.values()  # type: ignore[attr-defined]
    assert [each._cache_size() for each in (passes._forward, passes._backward)] == [1, 1]
    assert all(each._cache_size() - had <= 1 for each, had in zip(shared, before, strict=True))


@pytest.mark.parametrize("kind", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_what_ends_a_step_is_compiled_in_the_first_one(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The second of a short job's steps took three times as long as the others."""
    case = make("chain")
    (whole,) = split(case.graph, ())
    config = OptimizerConfig(kind=kind, momentum=0.9 if kind == "sgd" else 0.0)
    stage = choose(JAX, "cpu", 1).training(whole, variables_from_module(case.module), config)
    stage.forward(0, case.batch(0), RngKey(0, 0, 0))
    stage.backward(0, {}, 1.0)
    # A step is committed once the norm of its gradients is known, and applied in the time of the next.
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        stage.squared_norm(frozenset({whole.graph.variables[0].name}))
        stage.apply(1e-3, 1.0)
    assert [each.getMessage() for each in caplog.records if "Finished XLA" in each.getMessage()] == []


def test_gradients_begin_at_zero_in_each_step() -> None:
    case = make("chain")
    (whole,) = split(case.graph, ())
    stage = choose(JAX, "cpu", 1).training(whole, variables_from_module(case.module), OptimizerConfig())
    found = []
    for _ in range(2):
        stage.forward(0, case.batch(0), RngKey(0, 0, 0))
        stage.backward(0, {}, 1.0)
        found.append(stage.gradients())
        stage.discard()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(not value.any() for value in stage.gradients().values())


def test_a_stage_without_anything_to_train_has_no_residuals() -> None:
    case = make("chain")
    (whole,) = split(case.graph, ())
    frozen = replace(whole.graph, variables=tuple(replace(v, trainable=False) for v in whole.graph.variables))
    variables = variables_from_module(case.module)
    stage = choose(JAX, "cpu", 1).training(replace(whole, graph=frozen), variables, OptimizerConfig())
    made = stage.forward(0, case.batch(0), RngKey(0, 0, 0))
    assert float(made["result/0"]) == pytest.approx(float(case.loss(case.module, case.batch(0)).detach()))
    assert stage._stashes[0].residuals == ([], [])  # type: ignore[attr-defined]
    assert stage.backward(0, {}, 1.0) == {}


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(768, 768) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_calls_end_when_what_they_compute_is_done() -> None:
    """Dispatch is asynchronous: a backward pass ended after 1 ms of 57, and whatever call came next waited for it."""
    module, given = Wide(), {"x": torch.randn(512, 768)}
    graph = capture_module(module, given)
    (whole,) = split(graph, ())
    stage = choose(JAX, "cpu", 1).training(whole, variables_from_module(module), OptimizerConfig())
    for step in range(STEPS):
        for i in range(MICROBATCHES):
            stage.forward(i, given, RngKey(0, step, i))
            stage.backward(i, {}, 1.0)
            assert all(value.is_ready() for value in stage._gradients.values())  # type: ignore[attr-defined]
        stage.squared_norm()
        stage.apply(1e-3, 1.0)
        assert all(value.is_ready() for value in stage._values.values())  # type: ignore[attr-defined]
