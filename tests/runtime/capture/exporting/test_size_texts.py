"""What a model's code looks up or compares by a text of a size, or by how it is run, is refused: a graph has what the export did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusion.runtime.capture.capture import capture_module
from fusion.runtime.job.errors import CaptureError


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def captured(function: Callable[[Tensor], Tensor]) -> None:
    capture_module(Model(function), {"x": torch.zeros(3, 4)}, training=True)


def named(x: Tensor) -> Tensor:
    return x * 3 if f"{x.shape[0]}" == "4" else x


def shown(x: Tensor) -> Tensor:
    print(f"{x.shape}", x.shape[0], f"of {x.shape[0]}")
    assert x.shape[1] == 4, f"bad {x.shape}"
    return x


@pytest.mark.parametrize(
    "function",
    [
        named,
        lambda x: x * (3 if str(x.shape) == "torch.Size([4, 4])" else 1),
        lambda x: {"4": torch.tanh}.get(str(x.shape[0]), torch.relu)(x),
        lambda x: {"4": torch.tanh}[f"{x.shape[0]}"](x),
        lambda x: getattr(x, f"_{x.shape[0]}", x),
    ],
)
def test_a_text_of_a_size_is_refused_with_its_line(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"a text of a size that is free, at \S*test_size_texts\.py:\d+, and"
    ):
        captured(function)


def test_one_that_is_printed_or_said_of_an_error_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.SymInt.__repr__
    captured(shown)
    captured(on_cpu)
    assert torch.SymInt.__repr__ is before and " of " in capsys.readouterr().out


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 3 if isinstance(x.shape[0], int) else x,
        lambda x: x if type(x.size(0)) is not int else x + 1,
        lambda x: x.tanh() if torch.compiler.is_compiling() else x.relu(),
        lambda x: x.tanh() if torch.compiler.is_exporting() else x.relu(),
    ],
)
def test_code_that_does_otherwise_while_it_is_captured_is_refused(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(
        CaptureError, match=r"while it is captured .*, at \S*test_size_texts\.py:\d+: ask no size"
    ):
        captured(function)


@pytest.mark.parametrize(
    "function", [lambda x: x * {4: 3.0}.get(x.shape[0], 1.0), lambda x: x if x.shape[0] in {4, 8} else -x]
)
def test_a_lookup_by_a_size_says_so(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        CaptureError, match=r"looks something up by a size that is free, at \S*test_size_texts\.py"
    ):
        captured(function)


def packed(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return x.tanh()


def hooked(x: Tensor) -> Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return x


def on_cpu(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.tanh()


@pytest.mark.parametrize("function", [packed, hooked])
def test_a_hook_on_what_a_backward_pass_reads_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"which no peer runs, at \S*test_size_texts"):
        captured(function)


def seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.randn(4)


def test_seeding_in_a_forward_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"seeds torch's random numbers while it runs, at \S*test_size_texts\.py:\d+: "
    ):
        captured(seeded)
