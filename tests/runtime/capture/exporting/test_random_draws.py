"""What a model draws: numbers of the distributions that it asked for, from a job's seed alone, and their middle in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.models import SameMasks
from torch import nn
from torch.nn import functional

from fusion.dag.cutting.cuts import split
from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.capture.exporting.torch_calls import patched_torch
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.job.manifest import OptimizerConfig
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.dropout import Masks
from fusion.runtime.planes.plane import RngKey
from fusion.runtime.planes.torch_plane import TorchTrainingStage

ROWS, WIDTH = 200, 50
KEY = RngKey(3, 0, 0)


class Drawing(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def drawn(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[RngKey | None], torch.Tensor]:
    """What it gives with a key, or without one in evaluation."""
    x = torch.ones(ROWS, WIDTH)
    graph = serialise.decode(serialise.encode(capture_module(Drawing(function), {"x": x}, training=True)))
    names = [node.name for node in graph.nodes if node.op.startswith("fusion.dropout")]

    def run(key: RngKey | None) -> torch.Tensor:
        program = compile_graph(graph, torch.device("cpu"), training=key is not None)
        return program.run([x], [], None if key is None else Masks(key, names))[0]

    return run


def truth(size: torch.Tensor) -> torch.Tensor:
    return torch.full_like(size, 0.3)


@pytest.mark.parametrize(
    ("function", "mean", "deviation", "middle"),
    [
        (lambda x: torch.randn_like(x), 0.0, 1.0, 0.0),
        (lambda x: torch.randn(x.shape[0], WIDTH), 0.0, 1.0, 0.0),
        (lambda x: torch.rand_like(x), 0.5, 12**-0.5, 0.5),
        (lambda x: torch.randint(0, 10, (x.shape[0], WIDTH)).float(), 4.5, 8.25**0.5, 5.0),
        (lambda x: torch.randint_like(x, 4), 1.5, 1.25**0.5, 2.0),
        (lambda x: torch.bernoulli(truth(x)), 0.3, 0.21**0.5, 0.0),
        (lambda x: x.new_empty(x.shape).bernoulli_(0.3), 0.3, 0.21**0.5, 0.3),
        (lambda x: torch.empty_like(x).normal_(2.0, 3.0), 2.0, 3.0, 2.0),
        (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 16**0.5 * 12**-0.5, 1.0),
        (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5, 0.5 * 0.6931472),
        (lambda x: torch.distributions.Normal(x, 2 * x).rsample(), 1.0, 2.0, 1.0),
    ],
)
def test_numbers_are_of_their_distribution(
    function: Callable[[torch.Tensor], torch.Tensor], mean: float, deviation: float, middle: float
) -> None:
    run = drawn(function)
    found = run(KEY)
    assert float(found.mean()) == pytest.approx(mean, abs=0.04 * deviation)
    assert float(found.std()) == pytest.approx(deviation, rel=0.04)
    assert len(found.unique()) > 2 or set(found.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(found, run(KEY))  # a stage that runs again
    assert not torch.equal(found, run(RngKey(3, 0, 1)))
    assert run(None).unique().tolist() == pytest.approx([middle], rel=1e-5)


@pytest.mark.parametrize(
    ("function", "mean", "deviation"),
    [
        (lambda x: x * torch.rand(size=x.shape), 0.5, 12**-0.5),
        (lambda x: x * torch.randn(size=(x.shape[0], WIDTH)), 0.0, 1.0),
        (lambda x: x * torch.randint(10, size=x.shape), 4.5, 8.25**0.5),
        (lambda x: x * torch.randint(high=10, size=x.shape), 4.5, 8.25**0.5),
        (lambda x: torch.randint_like(input=x, high=4), 1.5, 1.25**0.5),
        (lambda x: torch.rand_like(input=x), 0.5, 12**-0.5),
    ],
)
def test_arguments_by_name_are_those_by_place(
    function: Callable[[torch.Tensor], torch.Tensor], mean: float, deviation: float
) -> None:
    """A size by name was passed over: one number was drawn for all elements."""
    found = drawn(function)(KEY)
    assert float(found.mean()) == pytest.approx(mean, abs=0.04 * deviation)
    assert float(found.std()) == pytest.approx(deviation, rel=0.04)


def test_what_is_drawn_has_the_dtype_that_torch_gives_it() -> None:
    x = torch.ones(2, 4, 5, dtype=torch.bfloat16)
    for function in (functional.dropout1d, functional.dropout2d, lambda x: x * x.bernoulli(0.3)):
        graph = capture_module(Drawing(function), {"x": x}, training=True)
        assert graph.types[graph.outputs[0]].dtype == "bfloat16"


def test_every_number_of_a_wide_range_may_be_drawn() -> None:
    found = drawn(lambda x: x * torch.randint(0, 1 << 20, x.shape))(KEY).long()
    assert set((found % 16).unique().tolist()) == set(range(16))
    assert float(found.float().mean()) == pytest.approx(1 << 19, rel=0.03)
    assert int(found.min()) >= 0 and int(found.max()) < 1 << 20


def test_an_order_that_is_drawn_is_one() -> None:
    run = drawn(lambda x: x[:, 0] * torch.randperm(x.shape[0]))
    found = run(KEY)
    assert found.sort().values.tolist() == list(range(ROWS)) and torch.equal(found, run(KEY))
    assert int((found == torch.arange(ROWS)).sum()) < 10 and not torch.equal(found, run(RngKey(3, 0, 1)))
    assert run(None).tolist() == list(range(ROWS))


def test_whole_channels_are_dropped() -> None:
    found = drawn(lambda x: functional.dropout1d(x.reshape(-1, 10, 5), 0.4))(KEY)
    kept = found.amax(-1)
    assert torch.equal(kept, found.amin(-1))
    assert sorted(kept.unique().tolist()) == pytest.approx([0.0, 1 / 0.6])
    assert float((kept > 0).float().mean()) == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.randn(WIDTH, generator=torch.Generator()),
        lambda x: x + torch.rand_like(x, generator=torch.Generator()),
        lambda x: x + x.bernoulli(0.3, generator=torch.Generator()),
    ],
)
def test_a_generator_of_the_model_s_own_is_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"a generator of its own, at \S*test_random_draws.py:\d+: leave it out"
    ):
        drawn(function)


def test_a_tensor_to_draw_into_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        into = torch.zeros_like(x)
        torch.rand(ROWS, WIDTH, out=into)
        return x + into

    with pytest.raises(
        CaptureError, match=r"with out=, at \S*test_random_draws.py:\d+: use what the function"
    ):
        drawn(function)


def test_dropout_that_drops_nothing_is_left_out() -> None:
    module = nn.Sequential(
        nn.AlphaDropout(0.5), nn.Dropout2d(0.5), nn.FeatureAlphaDropout(0.5), nn.Dropout3d(0.5)
    )
    given = {"x": torch.zeros(2, 3, 2, 2)}
    assert capture_module(Drawing(module.eval()), given, training=False).nodes == ()
    for lacking, name in ((module[:1], "alpha_dropout"), (module[2:], "feature_alpha_dropout")):
        with pytest.raises(CaptureError, match=rf"no operator aten\.{name}"):
            capture_module(Drawing(lacking), given, training=True)


class Variational(nn.Module):
    """Noise in the middle, paths that are dropped, and a step of a diffusion in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(3, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        hidden = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        path = x.new_empty(x.shape[0], 1).bernoulli_(0.8).div_(0.8)
        return path * self.decode(hidden), mean


def noisy_loss(made: Sequence[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    step = torch.randint(1, 10, (target.shape[0], 1))
    return ((made[0] - target + step * torch.randn_like(target)) ** 2).mean() + made[1].square().mean()


def run(graph: Graph, module: nn.Module, cuts: Sequence[int], batch: dict[str, Any]) -> Any:
    planes = [
        TorchTrainingStage(s, variables_from_module(module), OptimizerConfig()) for s in split(graph, cuts)
    ]
    values = dict(batch)
    for plane in planes:
        values.update(plane.forward(0, values, KEY))
    arrived: dict[str, torch.Tensor] = {}
    for plane in reversed(planes):
        mine = {e.name: arrived[e.name] for e in plane.stage.sends if e.needs_gradient}
        for name, gradient in plane.backward(0, mine, 1.0).items():
            arrived[name] = arrived[name] + gradient if name in arrived else gradient
    return values["result/0"], {n: g for plane in planes for n, g in plane.gradients().items()}


def test_stages_draw_what_one_process_draws() -> None:
    torch.manual_seed(1)
    module, batch = Variational(), {"x": torch.randn(4, 6), "target": torch.randn(4, 6)}
    graph = trained_graph(capture_module(module, batch, noisy_loss, loss_inputs=["target"]))
    with patched_torch(module.eval()), SameMasks(graph, KEY):
        loss = noisy_loss(module(batch["x"]), batch["target"])
    loss.backward()
    drawing = [i for i, node in enumerate(graph.nodes) if node.op == "fusion.dropout"]
    assert len(drawing) == 4
    for cuts in ([], [drawing[0]], [drawing[1], drawing[2] + 1], [drawing[0] + 1, drawing[3]]):
        found, gradients = run(graph, module, cuts, batch)
        torch.testing.assert_close(found, loss.detach())
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


def test_dropout_stays_whole_beside_what_is_taken_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.pad(functional.dropout(x, 0.25, True)[:, None], (1, 1), mode="reflect")

    graph = capture_module(Drawing(function), {"x": torch.ones(2, WIDTH)}, training=True)
    assert [node.args[1] for node in graph.nodes if node.op == "fusion.dropout"] == [0.25]
