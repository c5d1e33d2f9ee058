"""What torch asks or leaves out while it exports a model: none of it refuses a model without need, or trains another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._decomp import decomposition_table
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.capture.lowering import decompose
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -gradient


class Inner(nn.Module):
    """A function of what a layer gives."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.function(self.first(x)))
        return made


def hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def slope(x: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return found


reverse = Reversed.apply  # as torch's documents write it


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: Reversed.apply(x), r"Reversed is a torch.autograd.Function with a backward of its own, .*:63: write"),
        (lambda x: reverse(x), "Reversed is a torch.autograd.Function"),
        (hooked, r"changes a gradient with a hook, .*, at \S*test_torch_calls.py:\d+"),
        (slope, r"takes a gradient while it runs, .*, at \S*test_torch_calls.py:\d+"),
    ],
)  # fmt: skip
def test_gradients_of_a_model_s_own_are_refused_for_training(function: Callable[..., Any], why: str) -> None:
    given = {"x": torch.zeros(2, 6)}
    with pytest.raises(CaptureError, match=why):
        capture_module(Inner(function), given, training=True)
    assert Reversed.apply(torch.ones(1)).item() == 1  # as it was
    if function is not slope and function is not hooked:
        assert capture_module(Inner(function).eval(), given).nodes


@pytest.mark.parametrize("kind", ["backward_hook", "pre_hook", "parameter", "accumulated"])
def test_backward_hooks_are_refused_for_training(kind: str) -> None:
    module = Inner(torch.tanh)
    match kind:
        case "backward_hook":
            module.last.register_full_backward_hook(lambda *_: None)
        case "pre_hook":
            module.last.register_full_backward_pre_hook(lambda *_: None)
        case "parameter":
            module.last.weight.register_hook(lambda gradient: 2 * gradient)
        case _:
            module.last.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(CaptureError, match=r"^last(\.weight)? has a backward hook, which no peer runs"):
        capture_module(module, {"x": torch.zeros(2, 6)}, training=True)


def gradients(graph: Graph, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    program = compile_graph(graph, torch.device("cpu"), training=True)
    values = variables_from_module(module)
    leaves = [values[name].clone().requires_grad_() for name in program.variables]
    program.run([x], leaves, None)[0].square().sum().backward()
    named = dict(zip(program.variables, leaves, strict=True))
    return [named[name].grad for name, _ in module.named_parameters()]  # type: ignore[misc]


def held(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x.sin()


def copied(x: torch.Tensor, how: AbstractContextManager[Any] | None = None) -> torch.Tensor:
    made = torch.zeros_like(x)
    with how or nullcontext():
        made[:, 1:] = x.sin()[:, 1:]
    return made


@pytest.mark.parametrize(
    "function",
    [
        lambda x: checkpoint(torch.tanh, x, use_reentrant=True),
        lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
        lambda x: x + (x.round() - x).data,
        lambda x: torch.einsum("bi,bj,ij->bi", x, x, torch.eye(4)),
        lambda x: torch.distributions.Normal(x, 1 + x.square()).log_prob(x.detach()),
        lambda x: x + held(x) * torch.logaddexp(x, 2 * x),  # taken apart by torch
        lambda x: held(x) * copied(x),  # made functional by torch
        lambda x: x * copied(x, torch.no_grad()),
    ],
)
def test_gradients_are_those_of_the_module(function: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    module, x = Inner(function), torch.randn(3, 6)
    graph = capture_module(module, {"x": torch.zeros(2, 6)}, training=True)
    module(x).square().sum().backward()
    for found, parameter in zip(gradients(graph, module, x), module.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


def test_a_decoder_of_torch_takes_its_mask_as_it_is() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.core = nn.TransformerDecoder(layer, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ahead = nn.Transformer.generate_square_subsequent_mask(5)
            made: torch.Tensor = self.core(x, x, tgt_mask=ahead)
            return made

    torch.manual_seed(1)
    module, x = Decoder(), torch.randn(3, 5, 8)
    graph = capture_module(module, {"x": torch.zeros(2, 5, 8)}, training=True)
    module(x).square().sum().backward()
    for found, parameter in zip(gradients(graph, module, x), module.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5)


def test_a_loss_that_cannot_be_captured_is_named_by_its_line() -> None:
    def loss(made: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(made, targets[:, 0]) + torch.linalg.eigvalsh(targets).mean()

    given = {"x": torch.zeros(2, 6), "targets": torch.zeros(2, 2, 2)}
    with pytest.raises(CaptureError, match=r"no operator aten\.linalg_\w+.*, at \S*test_torch_calls\.py:\d+"):
        capture_module(Inner(torch.tanh), given, loss)


def packed(x: torch.Tensor) -> torch.Tensor:
    lengths = torch.ones(x.shape[0], dtype=torch.int64)
    return pack_padded_sequence(x[:, None], lengths, batch_first=True).data


def cast_within(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ torch.ones(4, 4)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (packed, r"packs sequences, at \S*test_torch_calls\.py:\d+: give the layer the padded ones"),
        (lambda x: x * torch.distributions.Beta(0.4, 0.4).sample(), r"a gamma, beta or Dirichlet distribution, at \S*py:\d+: give what is drawn"),
        (lambda x: x * float(x.detach().numpy().max()), r"out of torch, with numpy\(\), at \S*py:\d+: no graph has"),
        (lambda x: x * x.detach().abs().multinomial(1), r"aten\.multinomial, .*py:\d+: draw with torch.rand"),
        (cast_within, r"autocast on inside its forward, at \S*test_torch_calls\.py:\d+: leave it out"),
        (lambda x: x * x.argmax(1).bincount().sum(), r"aten\.bincount, .*py:\d+: say of how many numbers, with minlength"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_write(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        capture_module(Inner(function), {"x": torch.zeros(2, 6)}, training=True)


def test_what_torch_cannot_take_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**decomposition_table, **torch.export.default_decompositions()}  # torch's own writes in place
    monkeypatch.setattr(decompose, "_decompositions", lambda: own)

    def scattered(x: torch.Tensor) -> torch.Tensor:
        return x + torch.diagonal_scatter(x[:, :, None] * x[:, None], x, 0, 1, 2).sum()

    with pytest.raises(CaptureError, match="torch cannot take the model's operators apart: "):
        capture_module(Inner(scattered), {"x": torch.zeros(2, 6)}, training=True)


class Converted(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.layer = dtype, nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer.to(x.device, self.dtype)(x.to(self.dtype))
        return made


def test_a_layer_that_is_converted_to_what_it_is_stays_as_it_is() -> None:
    given = {"x": torch.zeros(2, 6)}
    graph = capture_module(Converted(torch.float32), given)
    assert graph.variable_names == {"layer.weight", "layer.bias"}
    with pytest.raises(
        CaptureError, match=r"converts parameters of its own .*, at \S*test_torch_calls.py:\d+: "
    ):
        capture_module(Converted(torch.float64), given)
