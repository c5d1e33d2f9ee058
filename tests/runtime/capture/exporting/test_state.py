"""What a model would remember from run to run, or ask of values, is refused with its line: none of it is left out without a word."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fusion.dag.ir.opset_pointwise import KEEP
from fusion.dag.ir.validation import validate
from fusion.runtime.capture.capture import capture_module
from fusion.runtime.job.errors import CaptureError


class Part(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("table", torch.arange(3.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.steps, self.seen, self.running = 0, list[torch.Tensor](), torch.zeros(3)

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


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return x * min(1.0, m.steps / 100)


def counted_for_later(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return x if m.steps < 1000 else -x


def made(m: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "scale"):
        m.scale = nn.Parameter(torch.ones(3))
    return x * m.scale


def listed(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.seen.append(x.detach().mean(0))
    return x - torch.stack(m.seen).mean(0)


def kept(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.running = 0.5 * m.running + 0.5 * x.detach().mean(0)
    return x - m.running


def averaged_weight(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.frozen.mul_(0.9).add_(m.layer.bias, alpha=0.1)
    return x * m.frozen


def switched(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.layer.requires_grad_(False)
    return x * m.layer.bias


def switched_by_attribute(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.layer.bias.requires_grad = False
    return x * m.layer.bias


def clamped(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.layer.weight.data.clamp_(-1, 1)
    return x


def doubled_unseen(m: Any, x: torch.Tensor) -> torch.Tensor:
    x.detach()[0].mul_(2)
    return x


DRAWS = "draws from {}'s random numbers, at .*: draw with torch"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (counted, "does not compute the same each time it runs, at .*: a graph has no place"),
        (listed, "reads what it has made the last time it ran"),
        (kept, "reads what it has made the last time it ran"),
        (lambda m, x: x if random.random() < 0.5 else -x, DRAWS.format("Python")),
        (lambda m, x: x * float(np.random.beta(0.4, 0.4)), DRAWS.format("NumPy")),
        (switched, "switches requires_grad of a parameter"),
        (switched_by_attribute, "switches requires_grad of a parameter"),
        (clamped, "writes to what is detached, with aten.clamp_, to a value that has a gradient"),
        (doubled_unseen, "writes to what is detached, with aten.mul_.Tensor"),
        (put, "sets .data of a tensor"),
        (lambda m, x: x / len(x), r"takes len\(\) of a tensor whose first size is free"),
        (lambda m, x: x[x > 0], "the size of a value follows from what is in a tensor: use torch.where or a mask"),
        (lambda m, x: torch.where(x > 0, x, torch.nan), r"a constant is not a number \(NaN\)"),
        (lambda m, x: nn.functional.ctc_loss(x, x.long(), (3,), (3,)), r"ctc_loss, .*: give it log_probs \(time, batch, classes\)"),
    ],
)  # fmt: skip
def test_it_is_refused_with_its_line(function: Callable[[Any, torch.Tensor], Any], why: str) -> None:
    with pytest.raises(CaptureError, match=why) as refused:
        capture_module(nn.Sequential(Part(function)), {"input": torch.zeros(2, 6)}, training=True)
    assert "test_state.py:" in str(refused.value)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (averaged, "sets its buffer 0.mean anew each time it runs, at .*"),
        (halved, "sets its buffer 0.mean anew each time it runs, at .*"),
        (averaged_weight, r"writes to 0\.frozen each time it runs, .*only where self\.training is set"),
    ],
)
def test_a_write_is_kept_in_training_alone(function: Callable[[Any, torch.Tensor], Any], why: str) -> None:
    module, given = nn.Sequential(Part(function)), {"input": torch.zeros(2, 6)}
    graph = capture_module(module, given, training=True)
    assert [str(node.args[0]) for node in graph.nodes if node.op == KEEP] == [
        "0.frozen" if function is averaged_weight else "0.mean"
    ]
    with pytest.raises(CaptureError, match=why):
        capture_module(module, given, training=False)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Part(counted_for_later), r"sets its 0\.steps anew each time it runs"),
        (Part(lambda m, x: torch.where(x > 0, x, torch.tensor([1.0, torch.nan, 2.0]))), r"a constant of .* is not a number \(NaN\)"),
        (Part(made), r"makes its parameter 0\.scale while it runs"),
        (nn.LazyLinear(3), r"0\.weight has no shape before the module runs"),
    ],
)  # fmt: skip
def test_what_no_line_stands_for_is_named(part: nn.Module, why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        capture_module(nn.Sequential(part), {"input": torch.zeros(2, 6)}, training=True)


@pytest.mark.parametrize(
    ("layer", "inputs", "why"),
    [
        (nn.Embedding(4, 6, max_norm=1.0), torch.tensor([1, 2, 3]), "the model's 0 has a max_norm, .*: leave it out"),
        (nn.EmbeddingBag(4, 6, max_norm=1.0), torch.ones(3, 2).long(), "the model's 0 has a max_norm"),
    ],
)  # fmt: skip
def test_an_embedding_that_changes_its_table_is_named(
    layer: nn.Module, inputs: torch.Tensor, why: str
) -> None:
    with pytest.raises(CaptureError, match=why):
        capture_module(nn.Sequential(layer), {"input": inputs}, training=True)


def test_a_write_to_a_copy_that_is_detached_is_no_write_to_what_it_is_of() -> None:
    def function(_: Any, x: torch.Tensor) -> torch.Tensor:
        own = x.clone().detach()
        own[:, 0].mul_(2)
        return x + own

    graph = capture_module(nn.Sequential(Part(function)), {"input": torch.zeros(2, 6)}, training=True)
    assert "aten.mul.Tensor" in {node.op for node in graph.nodes}


def cached(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A table that is made once, what a later run does not read, and a write to what is given."""
    if not m.seen:
        m.seen.append(torch.arange(3.0))
    m.running = x.mul_(2)
    return x * m.seen[0]


def test_what_no_later_run_reads_is_not_state() -> None:
    random.seed(1)
    first, _ = random.random(), random.seed(1)
    graph = capture_module(nn.Sequential(Part(cached)), {"input": torch.zeros(2, 6)}, training=True)
    assert len(graph.nodes) > 2
    assert random.random() == first


def test_what_another_thread_draws_is_not_the_models() -> None:
    ended = threading.Event()

    def draw() -> None:  # as the loop of a peer does beside the launch of a job
        while not ended.wait(0.0005):
            random.random()

    other = threading.Thread(target=draw)
    other.start()
    try:
        capture_module(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), {"input": torch.zeros(2, 6)}, training=True)
        with pytest.raises(CaptureError, match=DRAWS.format("Python")):
            capture_module(
                Part(lambda m, x: x if random.random() < 2 else -x), {"x": torch.zeros(2, 6)}, training=True
            )
    finally:
        ended.set()
        other.join()


def without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        made = m.layer.bias * 2
    return x - made.clone()


def test_inference_mode_takes_no_gradient() -> None:
    graph = capture_module(
        nn.Sequential(Part(without_gradients)), {"input": torch.zeros(2, 6)}, training=True
    )
    assert "aten.detach" in {node.op for node in graph.nodes}


def test_a_buffer_that_is_moved_or_made_again_is_not_state() -> None:
    graph = capture_module(nn.Sequential(Part(moved)), {"input": torch.zeros(2, 6)}, training=True)
    assert {"0.mean"} < {variable.name for variable in graph.variables}


@functools.cache
def table_of(size: int) -> torch.Tensor:
    return torch.arange(size) / size


def test_what_is_kept_outside_of_the_module_is_named() -> None:
    module = nn.Sequential(Part(lambda m, x: x * table_of(x.shape[1])))
    capture_module(module, {"input": torch.zeros(2, 6)}, training=True)
    with pytest.raises(CaptureError, match="kept outside of it"):
        capture_module(module, {"input": torch.zeros(2, 6)}, training=False)


class Kept(nn.Module):
    """Reads its parameters through what `keep` makes of it when it is made."""

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))
        self.kept = keep(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        return made + self.kept(made) if callable(self.kept) else made


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda m: lambda x: m.layer(x), "layer.weight"),
        (lambda m: lambda x, layer=m.layer: layer(x), "layer.weight"),
        (lambda m: m.layer.register_forward_hook(lambda _, __, made: made * m.scale), "scale"),
    ],
)
def test_a_parameter_that_a_function_has_kept_is_refused_rather_than_frozen(
    keep: Callable[[Any], Any], name: str
) -> None:
    with pytest.raises(
        CaptureError,
        match=rf"reads {name} through a function .*, at \S*test_state\.py:\d+: read it from self",
    ):
        capture_module(Kept(keep), {"x": torch.zeros(2, 3)}, training=True)


def test_a_method_that_a_module_keeps_is_its_copy_s() -> None:
    module = Kept(lambda m: m.layer.forward)
    graph = capture_module(module, {"x": torch.zeros(2, 3)}, training=True)
    assert [node.op for node in graph.nodes] == ["aten.linear", "aten.linear", "aten.add.Tensor"]
    assert {v.name for v in graph.variables if v.trainable} >= {"layer.weight", "layer.bias"}


def test_an_input_with_the_name_of_a_parameter_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.x

    with pytest.raises(CaptureError, match="a parameter or buffer x, and its inputs an array x: rename"):
        capture_module(Scaled(), {"x": torch.zeros(2, 3)}, training=True)


class Averaging(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(made.mean(0), alpha=0.1)
        return made - self.mean


def test_a_model_that_keeps_an_average_may_have_a_loss_of_each_sample() -> None:
    def loss(made: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (nn.functional.cross_entropy(made, labels, reduction="none") * made[:, 0]).mean()

    example = {"x": torch.zeros(2, 3), "labels": torch.zeros(2, dtype=torch.int64)}
    graph = capture_module(Averaging(), example, loss, loss_inputs=("labels",))
    validate(graph)
    (each,) = (node for node in graph.nodes if node.op == "aten.cross_entropy_loss")
    assert str(each.results[0]) == "float32[batch]"


def test_a_parameter_that_a_loss_reads_beside_what_forward_returns_is_refused() -> None:
    module = nn.Linear(3, 3)

    def loss(made: torch.Tensor) -> torch.Tensor:
        return made.square().mean() + module.weight.square().sum()

    with pytest.raises(CaptureError, match=r"reads weight .*test_state\.py:\d+: .*let forward return it"):
        capture_module(module, {"input": torch.zeros(2, 3)}, loss, loss_inputs=())
