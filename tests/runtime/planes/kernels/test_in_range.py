"""Indices beyond their tables: on CUDA a step or an answer fails, and not the process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from support.devices import DEVICES
from test_opset_types import SAMPLES, complete, in_framework
from torch.utils._pytree import tree_map_only

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.opset_index import INDEXED, IndexKind
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.kernels.in_range import _CLAMPS, in_range
from fusion.runtime.planes.torch_ops import torch_call

CPU = torch.device("cpu")
aten = torch.ops.aten
TABLE, ROW = torch.arange(1.0, 13).view(4, 3), torch.arange(1.0, 5)
HALF = torch.full((2, 3), 0.5)


def test_every_kind_of_index_is_known() -> None:
    assert _CLAMPS.keys() == set(INDEXED.values()) == set(get_args(IndexKind))


@pytest.mark.parametrize("op", sorted(INDEXED))
def test_indices_within_their_tables_give_the_same_bits(op: str) -> None:
    mine = [sample for sample in SAMPLES if sample[0] == op]
    assert mine
    for _, *given in mine:
        torch.manual_seed(0)
        target, args, named = torch_call(op, tuple(in_framework(op, tuple(given), "cpu")), CPU)
        made = target(*args, **named)
        assert torch.equal(in_range(op, target)(*args, **named), made) and not made.isnan().any()


def at(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


STRAYED: list[tuple[str, Callable[..., torch.Tensor], tuple[Any, ...]]] = [
    ("aten.index_select", aten.index_select, (TABLE, 1, at(0, 3))),
    ("aten.index_select", aten.index_select, (TABLE, 1, at(-1))),
    ("aten.gather", aten.gather, (ROW, -1, at(9))),
    ("aten.scatter.src", aten.scatter.src, (ROW, 0, at(4), ROW)),
    ("aten.scatter_add", aten.scatter_add, (ROW, 0, at(4), ROW)),
    ("aten.scatter.value", aten.scatter.value, (ROW, 0, at(-5), 1.0)),
    ("aten.index_add", aten.index_add, (ROW, 0, at(4), ROW[:1])),
    ("aten.index.Tensor", aten.index.Tensor, (TABLE, [None, at(3)])),
    ("aten.index.Tensor", aten.index.Tensor, (TABLE, [at(-5)])),
    ("aten.index_put", aten.index_put, (ROW, [at(1 << 40)], ROW[:1])),
    ("aten.cross_entropy_loss", aten.cross_entropy_loss, (TABLE, at(0, 1, 2, 3), None, 1, -100)),
    ("aten.nll_loss_nd", aten.nll_loss_nd, (TABLE, at(0, 1, 2, -3), None, 0, -100)),
    ("aten.binary_cross_entropy", aten.binary_cross_entropy, (HALF + 1, HALF)),
    ("aten.binary_cross_entropy", aten.binary_cross_entropy, (HALF * math.nan, HALF)),
    ("aten.binary_cross_entropy", aten.binary_cross_entropy, (HALF, HALF - 1)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", STRAYED, ids=lambda case: case[0])
def test_what_is_made_with_one_beyond_is_not_a_number(
    case: tuple[str, Callable[..., torch.Tensor], Any], device: str
) -> None:
    op, function, args = case
    assert in_range(op, function)(*tree_map_only(torch.Tensor, lambda t: t.to(device), args)).isnan().all()


def test_rows_that_are_there_are_told_from_those_that_are_not() -> None:
    found = in_range("aten.embedding", torch.embedding)(TABLE, at(0, 4, 3, -1), -1, False, False)
    assert torch.equal(found[[0, 2]], TABLE[[0, 3]]) and found[[1, 3]].isnan().all()
    with pytest.raises(IndexError, match="without rows"):
        in_range("aten.embedding", torch.embedding)(TABLE[:0], at(0), -1, False, False)


def test_targets_that_do_not_count_may_be_anything_and_whole_numbers_are_the_least() -> None:
    loss = in_range("aten.cross_entropy_loss", aten.cross_entropy_loss)
    args = TABLE, at(0, -100, 2, -100), None, 1, -100
    assert torch.equal(loss(*args), aten.cross_entropy_loss(*args))
    hot = in_range("aten.one_hot", aten.one_hot)(at(0, 4), 4)
    assert (hot == torch.iinfo(torch.int64).min).all()


@pytest.mark.parametrize("training", [True, False])
def test_code_for_cuda_is_kept_in_range(training: bool) -> None:
    """This graph makes no tensor of its own, so a CPU can run the code."""
    codes = [compile_graph(looked_up(), torch.device(d), training=training) for d in ("cuda", "cpu")]
    (found,) = codes[0].run([TABLE, at(1, 4)], (), None)
    assert found[0].tolist() == [4.0, 5.0, 6.0] and found[1].isnan().all()
    with pytest.raises(IndexError):
        codes[1].run([TABLE, at(1, 4)], (), None)


def looked_up() -> Graph:
    args = tuple(complete("aten.embedding", (Ref("table"), Ref("ids"))))
    node = Node("node", "aten.embedding", args, (TensorType((2, 3), "float32"),))
    inputs = Input("table", TensorType((4, 3), "float32")), Input("ids", TensorType((2,), "int64"))
    return Graph(inputs, (), (node,), (Ref("node"),))


@pytest.mark.parametrize("device", [each for each in DEVICES if each != "cpu"])
def test_a_gpu_computes_on(device: str) -> None:
    program = compile_graph(looked_up(), torch.device(device), training=False)
    for _ in range(2):
        (found,) = program.run([TABLE.to(device), at(1, 1 << 40).to(device)], (), None)
        assert found.cpu()[0].tolist() == [4.0, 5.0, 6.0] and found[1].isnan().all()
