"""Against the framework: what counts as a view is one, and, of parts of a tensor in its own order, nothing else is."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.dag.cutting.costs import storages
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Arg, Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.opset import infer

B, S = symbol("batch"), symbol("sequence")


def views(shape: Any, *steps: tuple[Any, ...]) -> bool:
    """Whether the last of the steps, each of the one before, looks at the memory of the first value."""
    types, at, nodes = {Ref("x"): TensorType(shape, "float32")}, Ref("x"), []
    for i, (op, *more) in enumerate(steps):
        args: tuple[Arg, ...] = (at, *more)
        node = Node(f"n{i}", op, args, infer(op, args, types))
        types.update((Ref(node.name, j), t) for j, t in enumerate(node.results))
        nodes.append(node)
        at = Ref(node.name)
    graph = Graph((Input("x", types[Ref("x")]),), (), tuple(nodes), (at,))
    return storages(graph)[at] == Ref("x")


def test_the_heads_of_a_split_projection_are_views() -> None:
    part = ("aten.split.Tensor", 12, 2)
    heads = ("aten.view", (B, S, 3, 4))
    assert views((B, S, 36), part, heads)
    assert views((B, S, 36), part, heads, ("aten.select.int", 2, 1), ("aten.reshape", (B * S, 4)))
    assert views((B, S, 36), part, ("aten.reshape", (B * S, 12)))
    assert not views((B, S, 36), part, ("aten.reshape", (B * S * 12,)))
    assert not views((B, S, 36), part, heads, ("aten.transpose.int", 1, 2), ("aten.reshape", (-1,)))
    assert views((B, S, 36), ("aten.slice.Tensor", 0, 1, None, 1), ("aten.flatten.using_ints", 0, -1))
    assert not views((B, S, 36), ("aten.slice.Tensor", 1, 1, None, 1), ("aten.flatten.using_ints", 0, 1))
    assert not views((B, S, 36), part, ("aten.contiguous",))
    assert views((2, 1, 2), ("aten.select.int", 1, 0), ("aten.reshape", (4,)))
    assert not views((2, 2, 2), ("aten.select.int", 1, 0), ("aten.reshape", (4,)))


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_a_reshape_of_parts_copies_where_the_framework_does(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    x = at = torch.zeros(shape)
    steps: list[tuple[Any, ...]] = []
    exact = True  # steps above 1 may leave what is whole by chance
    for _ in range(data.draw(st.integers(1, 5))):
        dim = data.draw(st.integers(0, max(0, at.dim() - 1)))
        kind = data.draw(st.sampled_from(["slice", "select", "reshape", "unsqueeze", "squeeze"]))
        if kind == "slice" and at.dim():
            start = data.draw(st.integers(0, at.shape[dim] - 1))
            end = data.draw(st.integers(start + 1, at.shape[dim]))
            step = data.draw(st.sampled_from([1, 1, 1, 2]))
            exact &= step == 1
            at = at[(slice(None),) * dim + (slice(start, end, step),)]
            steps.append(("aten.slice.Tensor", dim, start, end, step))
        elif kind == "select" and at.dim():
            at = at.select(dim, 0)
            steps.append(("aten.select.int", dim, 0))
        elif kind == "squeeze":
            at = at.squeeze()
            steps.append(("aten.squeeze",))
        elif kind == "unsqueeze" and at.dim() < 7:
            at = at.unsqueeze(dim)
            steps.append(("aten.unsqueeze", dim))
        else:
            sizes, left = [], at.numel()
            while left > 1:
                sizes.append(data.draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
                left //= sizes[-1]
            if len(sizes) > 7:
                continue
            at = at.reshape(sizes)
            steps.append(("aten.reshape", tuple(sizes)))
        looks = at.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        ours = views(shape, *steps)
        assert looks or not ours
        assert ours == looks or not exact
        if not looks:
            return
