"""Stages of torch and of JAX in turn against plain autograd of one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.captured_once import once
from support.models import Chain
from support.staged import (
    SEED,
    Case,
    even_cuts,
    make,
    norm,
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
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType, Variable
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.peer.plane_choice import JAX, TORCH, choose
from fusion.runtime.planes.plane import Plane, RngKey, TrainingStage

pytest.importorskip("jax", reason="the extra jax is not installed")

CONFIG = OptimizerConfig(learning_rate=3e-3, weight_decay=0.1)


@pytest.fixture(scope="module")
def both() -> tuple[Plane, Plane]:
    return choose(TORCH, "cpu", 1), choose(JAX, "cpu", 1)


def in_turn(
    planes: Sequence[Plane], stages: Sequence[Stage], module: nn.Module, config: OptimizerConfig = CONFIG
) -> list[TrainingStage]:
    variables = variables_from_module(module)
    return [planes[i % len(planes)].training(s, variables, config) for i, s in enumerate(stages)]


class Block(nn.Module):
    """Of a ResNet (arXiv 1512.03385)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm_b(self.b(functional.relu(self.norm_a(self.a(x)))))
        return functional.relu(inner + self.skip(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Block(4, 8, 2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(functional.adaptive_avg_pool2d(self.blocks(x), (1, 1)).flatten(1))


def resnet() -> Case:
    torch.manual_seed(1)
    module = ResNet()

    def batch(i: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(i)
        return {
            "x": torch.randn(4, 1, 12, 12, generator=made),
            "targets": torch.randint(0, 5, (4,), generator=made),
        }

    graph = once("resnet of both planes", lambda: capture_module(module, batch(0), nn.CrossEntropyLoss()))
    return Case(module, graph, batch, lambda m, b: functional.cross_entropy(m(b["x"]), b["targets"]))


@pytest.mark.heavy
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "resnet"])
def test_stages_of_both_planes_in_turn_train_as_one_process(name: str, both: tuple[Plane, Plane]) -> None:
    """GPT-2 with its dropout, tied, and a ResNet with its running statistics, over 4 stages."""
    case = resnet() if name == "resnet" else make(name)
    staged = in_turn(both, split(case.graph, even_cuts(case.graph, 4)), case.module)
    for i in range(2):
        run_microbatch(staged, case.batch(i), RngKey(SEED, 0, i), 0.5)
    share_ties(staged)
    state = {key: value.clone() for key, value in case.module.state_dict().items()}
    _, wanted = own_gradients(case, 2)
    case.module.load_state_dict(state)  # the statistics too
    found = {k: v for stage in staged for k, v in stage.gradients().items()}
    assert found.keys() == wanted.keys()
    assert max(relative(found[each], wanted[each]) for each in wanted) <= 1e-4
    assert norm(staged) == pytest.approx(sum(float(g.norm() ** 2) for g in wanted.values()), rel=1e-5)
    for stage in staged:
        stage.discard()
    losses = list(train(case, staged, CONFIG, range(30), 30))
    assert losses == pytest.approx(list(own_training(case, CONFIG, 30)), rel=1e-3)
    trained = {k: v for stage in staged for k, v in stage.state().items()}
    for key, value in case.module.state_dict().items():
        if "running" in key:
            assert torch.allclose(trained[f"variable/{key}"], value, rtol=1e-3, atol=1e-4), key


@pytest.mark.slow
def test_a_tied_vocabulary_and_experts_are_trained_in_jax(both: tuple[Plane, Plane]) -> None:
    case = make("mixtral")
    staged = in_turn(both[1:], split(case.graph, even_cuts(case.graph, 2)), case.module)
    for i in range(2):
        run_microbatch(staged, case.batch(i), RngKey(SEED, 0, i), 0.5)
    _, wanted = own_gradients(case, 2)
    found = {k: v for stage in staged for k, v in stage.gradients().items()}
    assert max(relative(found[each], wanted[each]) for each in wanted) <= 1e-4


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="adamw"),
        pytest.param(OptimizerConfig(kind="sgd", momentum=0.9), id="momentum", marks=pytest.mark.slow),
        pytest.param(OptimizerConfig(kind="sgd", weight_decay=0.1), id="sgd", marks=pytest.mark.slow),
    ],
)
def test_state_goes_from_one_plane_to_the_other_and_back(
    config: OptimizerConfig, both: tuple[Plane, Plane]
) -> None:
    """A snapshot has the same names, shapes and dtypes whichever plane took it, and either goes on from it."""
    torch.manual_seed(1)
    case = vectors("chain", Chain(), 3)
    stages = split(case.graph, [])
    (one,), (other,) = (in_turn([plane], stages, case.module, config) for plane in both)
    list(train(case, [one], config, range(3), 6))
    list(train(case, [other], config, range(3), 6))
    ours, theirs = one.state(), other.state()
    assert ours.keys() == theirs.keys()
    assert any(key.startswith("optimizer/") for key in ours) == (
        config.kind == "adamw" or config.momentum > 0
    )
    for key, value in ours.items():
        assert (value.shape, value.dtype) == (theirs[key].shape, theirs[key].dtype)
        assert torch.allclose(value, theirs[key], rtol=1e-4, atol=1e-6), key
    other.load_state(ours)
    assert all(torch.equal(value, ours[key]) for key, value in other.state().items())
    one.load_state(other.state())
    losses = [list(train(case, [each], config, range(3, 6), 6)) for each in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_discarded_step_leaves_no_trace_and_a_run_is_the_same_bits_again(both: tuple[Plane, Plane]) -> None:
    torch.manual_seed(1)
    case = vectors("chain", Chain(), 3)
    (stage,) = in_turn(both[1:], split(case.graph, []), case.module)
    before = stage.state()
    first = list(train(case, [stage], CONFIG, range(2), 2))
    stage.load_state(before)
    run_microbatch([stage], case.batch(9), RngKey(SEED, 0, 0), 1.0)
    stage.discard()
    assert list(train(case, [stage], CONFIG, range(2), 2)) == first
    with pytest.raises(ValueError, match="holds no activations of microbatch 1"):
        stage.backward(1, {}, 1.0)


@pytest.mark.slow
def test_running_statistics_follow_commits_only(both: tuple[Plane, Plane]) -> None:
    case = resnet()
    module = case.module
    (stage,) = in_turn(both[1:], split(case.graph, []), module)
    before = stage.state()["variable/norm.running_mean"]
    run_microbatch([stage], case.batch(0), RngKey(0, 0, 0), 1.0)
    assert torch.equal(stage.state()["variable/norm.running_mean"], before)
    stage.discard()
    run_microbatch([stage], case.batch(0), RngKey(0, 0, 0), 1.0)
    stage.apply(0.0, 1.0)
    module.train()
    module(case.batch(0)["x"])
    assert torch.allclose(stage.state()["variable/norm.running_mean"], module.norm.running_mean, atol=1e-6)
    module.eval()
    wanted = float(case.loss(module, case.batch(0)))
    assert float(stage.evaluate(case.batch(0))["result/0"]) == pytest.approx(wanted, rel=1e-5)


def test_what_nothing_depends_on_is_left_alone_as_in_torch(both: tuple[Plane, Plane]) -> None:
    """A parameter without a gradient is not decayed either, and has no state."""
    vector = TensorType((3,), "float32")
    nodes = (
        Node("used", "aten.mul.Tensor", (Ref("x"), Ref("w")), (vector,)),
        Node("cut", "aten.detach", (Ref("v"),), (vector,)),
        Node("both", "aten.add.Tensor", (Ref("used"), Ref("cut"), 1), (vector,)),
        Node("loss", "aten.sum", (Ref("both"), None), (TensorType((), "float32"),)),
    )
    graph = Graph(
        (Input("x", vector),), (Variable("w", vector), Variable("v", vector)), nodes, (Ref("loss"),)
    )
    (stage,) = split(graph, [])
    for plane in both:
        ran = plane.training(stage, {"w": torch.ones(3), "v": torch.ones(3)}, CONFIG)
        ran.forward(0, {"x": torch.ones(3)}, RngKey(0, 0, 0))
        ran.backward(0, {}, 1.0)
        assert set(ran.gradients()) == {"w"}
        ran.apply(0.1, 1.0)
        state = ran.state()
        assert torch.equal(state["variable/v"], torch.ones(3))
        assert not torch.equal(state["variable/w"], torch.ones(3))
        assert {key for key in state if key.startswith("optimizer/v")} == set()


def test_what_does_not_fit_is_named(both: tuple[Plane, Plane]) -> None:
    torch.manual_seed(1)
    case = vectors("chain", Chain(), 3)
    (stage,) = split(case.graph, [])
    variables = variables_from_module(case.module)
    plane = both[1]
    with pytest.raises(JobError, match=r"no layers\.0\.weight"):
        plane.training(stage, {k: v for k, v in variables.items() if k != "layers.0.weight"}, CONFIG)
    ran = plane.training(stage, variables, CONFIG)
    with pytest.raises(ValueError, match="input x"):
        ran.forward(0, {"x": torch.zeros(4, 7), "targets": torch.zeros(4, 3)}, RngKey(0, 0, 0))
    with pytest.raises(ValueError, match="needs an input 'targets'"):
        ran.forward(0, {"x": torch.zeros(4, 6)}, RngKey(0, 0, 0))
    with pytest.raises(JobError, match="belongs to no parameter"):
        ran.load_state({**ran.state(), "optimizer/layers.0.weight/__class__": torch.zeros(1)})
    with pytest.raises(ValueError, match="trains no parameter"):
        ran.gradients(["nothing"])
    with pytest.raises(ValueError, match="shape"):
        ran.set_gradients({"layers.0.weight": torch.zeros(2)})


def test_an_operator_that_there_is_not_is_refused_by_name(both: tuple[Plane, Plane]) -> None:
    made = TensorType((1, 1, 3, 4), "float32")
    node = Node("seen", "fusion.source_attention", (Ref("q"), Ref("q"), Ref("q"), 0, None), (made,))
    (stage,) = split(Graph((Input("q", made),), (), (node,), (Ref("seen"),)), [])
    assert node.op in both[1].lacks
    with pytest.raises(GraphError, match=r"the JAX plane does not run fusion\.source_attention"):
        both[1].training(stage, {}, CONFIG)
