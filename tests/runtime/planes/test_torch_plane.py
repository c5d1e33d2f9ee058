"""Stages of generated code against plain autograd of the module that they were captured from."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from support.devices import DEVICES
from support.models import Chain
from support.staged import (
    SEED,
    even_cuts,
    make,
    own_gradients,
    own_training,
    relative,
    run_microbatch,
    share_ties,
    train,
    vectors,
)
from torch import nn
from torch.nn import functional

from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.stage import Stage
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.plane import RngKey
from fusion.runtime.planes.torch_plane import TorchTrainingStage


def planes(
    stages: Sequence[Stage], module: nn.Module, config: OptimizerConfig, device: str
) -> list[TorchTrainingStage]:
    return [TorchTrainingStage(s, variables_from_module(module), config, device) for s in stages]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("stages", "microbatches"),
    [(1, 1), (2, 3), *(pytest.param(*each, marks=pytest.mark.heavy) for each in [(3, 8), (4, 2)])],
)
@pytest.mark.parametrize("name", ["chain", "diamond", "tied", "dropout", "gpt2"])
def test_gradients_are_those_of_one_process(name: str, stages: int, microbatches: int, device: str) -> None:
    compare_gradients(name, stages, microbatches, device)


@pytest.mark.heavy
def test_gradients_of_attention_that_is_written_out_are_those_of_one_process() -> None:
    compare_gradients("gemma2", 3, 2, "cpu")


def compare_gradients(name: str, stages: int, microbatches: int, device: str) -> None:
    case = make(name)
    staged = planes(split(case.graph, even_cuts(case.graph, stages)), case.module, OptimizerConfig(), device)
    loss = 0.0
    for i in range(microbatches):
        loss += run_microbatch(staged, case.batch(i), RngKey(SEED, 0, i), 1 / microbatches) / microbatches
    share_ties(staged)
    wanted_loss, wanted = own_gradients(case, microbatches)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    found = {k: v for plane in staged for k, v in plane.gradients().items()}
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        assert relative(found[parameter], gradient) <= 1e-5, parameter


@pytest.mark.heavy
def test_experts_are_trained_as_in_one_process() -> None:
    """Gradients, and losses of some steps, of a Mixtral over three stages, against the model's own experts."""
    case = make("mixtral")
    assert [node.op for node in case.graph.nodes].count("fusion.expert_linear") == 4
    config = OptimizerConfig(learning_rate=3e-3)
    staged = planes(split(case.graph, even_cuts(case.graph, 3)), case.module, config, "cpu")
    for i in range(2):
        run_microbatch(staged, case.batch(i), RngKey(SEED, 0, i), 1 / 2)
    _, wanted = own_gradients(case, 2)
    found = {k: v for plane in staged for k, v in plane.gradients().items()}
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        assert relative(found[parameter], gradient) <= 1e-5, parameter
    for plane in staged:
        plane.discard()
    losses = list(train(case, staged, config, range(10), 10))
    assert losses == pytest.approx(list(own_training(case, config, 10)), rel=1e-5)


def test_a_skip_edge_goes_straight_to_each_stage_that_reads_it() -> None:
    case = make("diamond")
    stages = split(case.graph, even_cuts(case.graph, 4))
    assert any(max(e.consumers) - e.producer >= 2 for s in stages for e in s.sends)


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_any_cut_gives_the_same_loss_and_gradients(name: str) -> None:
    case = make(name)
    config = OptimizerConfig()
    key = RngKey(SEED, 3, 0)
    whole = planes(split(case.graph, []), case.module, config, "cpu")
    loss = run_microbatch(whole, case.batch(0), key, 1.0)
    wanted = whole[0].gradients()
    choose = random.Random(0)
    for _ in range(6):
        cuts = sorted(choose.sample(range(1, len(case.graph.nodes)), choose.randint(1, 4)))
        staged = planes(split(case.graph, cuts), case.module, config, "cpu")
        assert run_microbatch(staged, case.batch(0), key, 1.0) == pytest.approx(loss, rel=1e-6)
        share_ties(staged)
        for plane in staged:
            for parameter, gradient in plane.gradients().items():
                assert relative(gradient, wanted[parameter]) <= 1e-5, (cuts, parameter)


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(learning_rate=3e-3, weight_decay=0.1, schedule="cosine", warmup_steps=5),
        OptimizerConfig(kind="sgd", learning_rate=0.1, momentum=0.9, clip_norm=0.5, schedule="linear"),
    ],
    ids=["adamw", "sgd"],
)
@pytest.mark.heavy
def test_losses_of_fifty_steps_are_those_of_one_process(config: OptimizerConfig) -> None:
    case = make("dropout")
    staged = planes(split(case.graph, even_cuts(case.graph, 3)), case.module, config, "cpu")
    losses = list(train(case, staged, config, range(50), 50))
    wanted = list(own_training(case, config, 50))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "config", [OptimizerConfig(), OptimizerConfig(kind="sgd", momentum=0.9)], ids=["adamw", "sgd"]
)
def test_state_carries_a_run_on_bit_for_bit(config: OptimizerConfig) -> None:
    case = make("dropout")
    stages = split(case.graph, even_cuts(case.graph, 2))
    first = planes(stages, case.module, config, "cpu")
    list(train(case, first, config, range(3), 6))
    second = planes(stages, case.module, config, "cpu")
    for old, new in zip(first, second, strict=True):
        new.load_state(old.state())
    assert list(train(case, first, config, range(3, 6), 6)) == list(
        train(case, second, config, range(3, 6), 6)
    )
    for old, new in zip(first, second, strict=True):
        a, b = old.state(), new.state()
        assert a.keys() == b.keys() and any(k.startswith("optimizer/") for k in a)
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_state_is_the_stages_own_memory_and_stays_as_it_is() -> None:
    case, config = make("dropout"), OptimizerConfig()
    (plane,) = planes(split(case.graph, []), case.module, config, "cpu")
    list(train(case, [plane], config, range(1), 3))
    held = plane.state()
    where = {key: value.data_ptr() for key, value in held.items()}
    copies = {key: value.clone() for key, value in held.items()}
    list(train(case, [plane], config, range(1, 2), 3))
    assert all(torch.equal(value, copies[key]) for key, value in held.items())
    assert any(not torch.equal(value, held[key]) for key, value in plane.state().items())
    at_two = {key: value.clone() for key, value in plane.state().items()}
    plane.load_state(held)
    assert all(torch.equal(value, copies[key]) for key, value in {**held, **plane.state()}.items())
    # Nobody holds what was given: nothing is copied.
    del held
    moved = {key: value.data_ptr() for key, value in plane.state().items()}
    list(train(case, [plane], config, range(1, 2), 3))
    assert {key: value.data_ptr() for key, value in plane.state().items()} == moved != where
    assert all(torch.equal(value, at_two[key]) for key, value in plane.state().items())


def test_a_discarded_step_leaves_no_trace() -> None:
    config = OptimizerConfig()
    case = make("dropout")
    stages = split(case.graph, even_cuts(case.graph, 2))
    clean_run, disturbed = (
        planes(stages, case.module, config, "cpu"),
        planes(stages, case.module, config, "cpu"),
    )
    run_microbatch(disturbed, case.batch(9), RngKey(SEED, 0, 0), 1.0)
    disturbed[0].forward(1, case.batch(9), RngKey(SEED, 0, 1))
    for plane in disturbed:
        plane.discard()
    assert list(train(case, clean_run, config, range(2), 2)) == list(
        train(case, disturbed, config, range(2), 2)
    )
    with pytest.raises(ValueError, match="holds no activations of microbatch 1"):
        disturbed[0].backward(1, {}, 1.0)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(
            functional.max_pool2d(functional.relu(self.norm(self.convolution(x))), 2).mean((2, 3))
        )


def test_running_statistics_follow_commits_only() -> None:
    torch.manual_seed(0)
    module = Normalised()
    batch = {"x": torch.randn(4, 2, 6, 6), "targets": torch.tensor([0, 2, 1, 0])}
    graph = capture_module(module, batch, nn.CrossEntropyLoss())
    (plane,) = planes(split(graph, []), module, OptimizerConfig(), "cpu")
    before = plane.state()["variable/norm.running_mean"]
    run_microbatch([plane], batch, RngKey(0, 0, 0), 1.0)
    assert torch.equal(plane.state()["variable/norm.running_mean"], before)
    plane.discard()
    assert torch.equal(plane.state()["variable/norm.running_mean"], before)
    run_microbatch([plane], batch, RngKey(0, 0, 0), 1.0)
    plane.apply(0.0, 1.0)
    module.train()
    module(batch["x"])
    assert torch.equal(plane.state()["variable/norm.running_mean"], module.norm.running_mean)
    module.eval()
    wanted = functional.cross_entropy(module(batch["x"]), batch["targets"])
    assert float(plane.evaluate(batch)["result/0"]) == pytest.approx(float(wanted), rel=1e-6)


def test_evaluation_drops_nothing_out_and_keeps_no_graph() -> None:
    case = make("dropout")
    (plane,) = planes(split(case.graph, []), case.module, OptimizerConfig(), "cpu")
    found = plane.evaluate(case.batch(0))["result/0"]
    case.module.eval()
    assert float(found) == pytest.approx(float(case.loss(case.module, case.batch(0))), rel=1e-6)
    assert not found.requires_grad


def test_what_does_not_fit_is_named() -> None:
    case = make("chain")
    (stage,) = split(case.graph, [])
    variables = variables_from_module(case.module)
    with pytest.raises(JobError, match=r"no layers\.0\.weight"):
        TorchTrainingStage(
            stage, {k: v for k, v in variables.items() if k != "layers.0.weight"}, OptimizerConfig()
        )
    with pytest.raises(JobError, match=r"layers\.0\.weight"):
        TorchTrainingStage(stage, {**variables, "layers.0.weight": torch.zeros(2, 2)}, OptimizerConfig())
    plane = TorchTrainingStage(stage, variables, OptimizerConfig())
    with pytest.raises(ValueError, match="input x"):
        plane.forward(0, {"x": torch.zeros(4, 7), "targets": torch.zeros(4, 3)}, RngKey(0, 0, 0))
    with pytest.raises(ValueError, match="input x"):
        plane.forward(0, {"x": torch.zeros(4), "targets": torch.zeros(4, 3)}, RngKey(0, 0, 0))
    with pytest.raises(ValueError, match="needs an input 'targets'"):
        plane.forward(0, {"x": torch.zeros(4, 6)}, RngKey(0, 0, 0))
    with pytest.raises(JobError, match="belongs to no parameter"):
        plane.load_state({**plane.state(), "optimizer/layers.0.weight/__class__": torch.zeros(1)})


def test_frozen_parameters_get_no_gradient_and_stay() -> None:
    case_module = Chain()
    case_module.layers[0].weight.requires_grad_(False)
    case = vectors("frozen", case_module, 3)
    (plane,) = planes(split(case.graph, []), case.module, OptimizerConfig(), "cpu")
    before = plane.state()["variable/layers.0.weight"]
    run_microbatch([plane], case.batch(0), RngKey(0, 0, 0), 1.0)
    assert "layers.0.weight" not in plane.gradients()
    plane.apply(0.1, 1.0)
    assert torch.equal(plane.state()["variable/layers.0.weight"], before)
