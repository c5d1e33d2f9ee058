"""Indices beyond their tables: what torch refuses is no row from the end in JAX, and none that is left out, but not a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_opset_types import complete

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.opset import infer
from fusion.dag.ir.opset_index import INDEXED
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.jax_plane.lacking import LACKING
from fusion.runtime.planes.jax_plane.library import load

pytest.importorskip("jax", reason="the extra jax is not installed")
DEVICE = load("cpu", 1)

import jax  # noqa: E402

from fusion.runtime.planes.jax_plane.arrays import array, tensor  # noqa: E402
from fusion.runtime.planes.jax_plane.in_range import _CHECKS  # noqa: E402
from fusion.runtime.planes.jax_plane.program import Program  # noqa: E402

TABLE, ROW = torch.arange(1.0, 13).view(4, 3), torch.arange(1.0, 5)
HALF = torch.full((2, 3), 0.5)


def at(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def one(op: str, args: Sequence[Any]) -> tuple[Graph, list[torch.Tensor]]:
    """A graph of the operator, and what it is given."""
    given: list[torch.Tensor] = []

    def named(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            given.append(arg)
            return Ref(f"x{len(given) - 1}")
        return tuple(map(named, arg)) if isinstance(arg, tuple) else arg

    named_args = named(tuple(complete(op, tuple(args))))
    types = {
        Ref(f"x{i}"): TensorType(tuple(each.shape), str(each.dtype).removeprefix("torch."))
        for i, each in enumerate(given)
    }
    node = Node("y", op, named_args, infer(op, named_args, types))
    return Graph(tuple(Input(ref.name, t) for ref, t in types.items()), (), (node,), (Ref("y"),)), given


def in_jax(graph: Graph, given: Sequence[torch.Tensor]) -> torch.Tensor:
    program = Program(graph, training=True)
    (found,) = jax.jit(lambda arrays: program.run(arrays, {}, (), None)[0])([array(x, DEVICE) for x in given])
    return tensor(found)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("aten.index_select", (TABLE, 1, at(0, 3))),
        ("aten.index_select", (TABLE, -1, at(-1))),
        ("aten.gather", (ROW, -1, at(9))),
        ("aten.gather", (TABLE, 0, at(0, -1, 2)[None])),
        ("aten.scatter.src", (ROW, 0, at(4), ROW)),
        ("aten.scatter_add", (ROW, 0, at(-1), ROW)),
        ("aten.scatter.value", (ROW, 0, at(-5), 1.0)),
        ("aten.index_add", (ROW, 0, at(4), ROW[:1])),
        ("aten.index.Tensor", (TABLE, (None, at(3)))),
        ("aten.index.Tensor", (TABLE, (at(0, -5),))),
        ("aten.index_put", (ROW, (at(1 << 40),), ROW[:1])),
        ("aten.cross_entropy_loss", (TABLE, at(0, 1, 2, 3))),
        ("aten.cross_entropy_loss", (TABLE, at(0, 1, 2, -1), None, 2)),
        ("aten.nll_loss", (TABLE, at(0, 1, 2, -1))),
        ("aten.nll_loss_nd", (TABLE, at(0, 1, 2, -3), None, 0)),
        ("aten.binary_cross_entropy", (HALF + 1, HALF)),
        ("aten.binary_cross_entropy", (HALF, HALF - 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_torch_refuses_is_not_a_number(op: str, args: tuple[Any, ...]) -> None:
    graph, given = one(op, args)
    with pytest.raises((IndexError, RuntimeError)):
        compile_graph(graph, torch.device("cpu"), training=True).run(given, (), None)
    assert in_jax(graph, given).isnan().all()


def test_rows_that_are_there_are_told_from_those_that_are_not() -> None:
    found = in_jax(*one("aten.embedding", (TABLE, at(0, 4, 3, -1))))
    assert torch.equal(found[[0, 2]], TABLE[[0, 3]]) and found[[1, 3]].isnan().all()


def test_what_is_in_range_or_does_not_count_is_as_in_torch() -> None:
    """An index of several may count from the end; whole numbers made with one beyond are the least."""
    for op, args in (
        ("aten.index.Tensor", (TABLE, (at(-4, 3), at(-3)))),
        ("aten.index_put", (TABLE, (at(-4, 3),), ROW[:3], True)),
        ("aten.index_put", (TABLE, (TABLE > 5,), ROW[:1])),
        ("aten.cross_entropy_loss", (TABLE, at(0, -100, 2, -100))),
        ("aten.cross_entropy_loss", (TABLE, TABLE / 12)),
        ("aten.nll_loss", (TABLE, at(0, -7, 2, 9).clamp(-7, 2), None, 1, -7)),
        ("aten.one_hot", (at(0, 3), 4)),
    ):
        graph, given = one(op, args)
        (wanted,) = compile_graph(graph, torch.device("cpu"), training=True).run(given, (), None)
        torch.testing.assert_close(in_jax(graph, given), wanted)
    assert (in_jax(*one("aten.one_hot", (at(0, 4), 4))) == torch.iinfo(torch.int64).min).all()


def test_every_operator_that_is_looked_at_on_cuda_is_looked_at_here() -> None:
    assert _CHECKS.keys() == {INDEXED[op] for op in INDEXED.keys() - LACKING}
