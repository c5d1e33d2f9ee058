"""A mask of the highest few along a size that is free; whatever else is made of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.runtime.capture import exporting
from fusion.runtime.capture.capture import capture_language_model, variables_from_module
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

MOST = 5


def highest(x: Tensor, most: int = MOST) -> Any:
    return x.topk(min(most, x.shape[-1]), dim=-1)


def mask(x: Tensor) -> Tensor:
    places = highest(x).indices.to(torch.int32)
    hidden = places.new_ones(x.shape, dtype=torch.bool).scatter(-1, places.long(), False)
    return x.masked_fill(hidden, 0.0)


class Pairs(nn.Module):
    """`function` of a number for each two positions, summed."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Embedding(97, 16)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.table(input_ids) + torch.sin(position_ids.unsqueeze(-1) * torch.arange(1.0, 17.0))
        return self.function(x @ x.mT).sum(-1, keepdim=True)


def captured(function: Callable[[Tensor], Tensor]) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    module = Pairs(function)
    return capture_language_model(module, training=False, maximum_sequence=64), module


@pytest.mark.parametrize("length", [2, MOST - 1, MOST, MOST + 1, 40])
def test_masks_are_those_of_the_model_at_every_length(length: int) -> None:
    graph, module = captured(mask)
    ids = torch.randint(0, 97, (2, length))
    positions = torch.arange(length).expand(2, -1)
    program = compile_graph(graph, torch.device("cpu"), training=False)
    variables = variables_from_module(module)
    given = {"input_ids": ids, "position_ids": positions}
    (found,) = program.run(
        [given[n] for n in program.inputs], [variables[v.name] for v in graph.variables], None
    )
    torch.testing.assert_close(found, module(ids, positions))


def test_a_number_that_no_size_falls_below_is_itself() -> None:
    for most, wanted in ((2, 2), (64, "sequence")):
        graph, _ = captured(lambda x, most=most: highest(x, most).values)  # type: ignore[misc]
        (node,) = (n for n in graph.nodes if n.op == "aten.topk")
        assert str(node.args[1]) == str(wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.gather(-1, highest(x).indices),
        lambda x: highest(x).values,
        lambda x: highest(x)[1],
        lambda x: x.scatter(-1, highest(x).indices, x),
        lambda x: x.scatter(-1, highest(x).indices[..., :1], 0.0),
        lambda x: x.topk(min(MOST, x.shape[1]), dim=-1, largest=False).indices,
        lambda x: x[..., : min(MOST, x.shape[-1])],
        lambda x: x * min(MOST, x.shape[-1]),
    ],
    ids=["gathered", "values", "unpacked", "numbers scattered", "some of the places", "lowest", "a slice", "a factor"],
)  # fmt: skip
def test_whatever_else_is_made_of_them_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"test_topk_masks\.py") as refusal:
        captured(function)
    assert "\n" not in str(refusal.value)


def test_everything_is_put_back() -> None:
    captured(mask)
    assert "min" not in globals() and exporting.__name__ not in torch.topk.__module__
    assert torch.ones(3).topk(2).values.shape == (2,)
