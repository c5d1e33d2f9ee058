"""Positions that run singly, a fixed number at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.families import made

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.planes.cuda.cuda_decoding import CudaDecodingStage
from fusion.runtime.planes.cuda.fixed_batch import ROWS, batches
from fusion.runtime.planes.cuda.row_attention import MAX_HEAD_WIDTH, MAX_KINDS, is_supported
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

POSITIONS = 96


@given(st.lists(st.integers(1, 70), max_size=12), st.integers(1, 40))
def test_each_position_comes_once_and_in_order(lengths: list[int], rows: int) -> None:
    found = [*batches(lengths, rows)]
    counts = [sum(part.count for part in batch) for batch in found]
    assert all(count == rows for count in counts[:-1]) and all(0 < count <= rows for count in counts)
    come = [(part.piece, part.first + i) for batch in found for part in batch for i in range(part.count)]
    assert come == [(piece, i) for piece, length in enumerate(lengths) for i in range(length)]


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_of_fixed_batches_each_piece_gets_what_it_would_get_alone(family: str) -> None:
    """On a CPU, beside a stage that runs the pieces as they come."""
    graph, module = made(family, positions=POSITIONS)
    variables = variables_from_module(module)
    cuts = split(graph, [len(graph.nodes) // 2])
    fixed = [CudaDecodingStage(stage, variables, "cpu") for stage in cuts]
    other = [TorchDecodingStage(stage, variables) for stage in cuts]
    chance = random.Random(3)
    at = dict.fromkeys(range(5), 0)
    for stage in (*fixed, *other):
        for name in at:
            stage.open(str(name), POSITIONS)
    for _ in range(6):
        turn = {name: chance.choice([1, 3, 15]) for name in at if chance.random() < 0.8}
        singly = {name for name in turn if at[name] and chance.random() < 0.7}
        ids = {name: torch.randint(0, 256, (1, count)) for name, count in turn.items()}
        found = []
        for stages in (fixed, other):
            values = {
                name: {"input_ids": ids[name], "position_ids": torch.arange(at[name], at[name] + count)[None]}
                for name, count in turn.items()
            }
            for stage in stages:
                pieces = [
                    Piece(str(name), at[name], values[name], name in singly, count if name in singly else 1)
                    for name, count in turn.items()
                ]
                for name, given_ in zip(turn, stage.run(pieces), strict=True):
                    values[name].update(given_)
            found.append(values)
        for name in turn:
            assert found[0][name].keys() == found[1][name].keys()
            for key, value in found[1][name].items():
                torch.testing.assert_close(found[0][name][key], value, rtol=1e-4, atol=1e-4)
            at[name] += turn[name]
    assert max(at.values()) > ROWS


def attention(heads: int, width: int, window: int | None = None) -> tuple[Node, TensorType]:
    shape = TensorType((1, heads, symbol("sequence"), width), "float32")
    args = (Ref("x"), Ref("x"), Ref("x"), 0, None, window)
    return Node("n", "fusion.cached_attention", args, (shape,)), shape


def of_windows(windows: range) -> Graph:
    """An attention node for each of these windows."""
    node, shape = attention(2, 64)
    nodes = [
        replace(node, name=f"n{window}", args=(*node.args[:3], window, None, window)) for window in windows
    ]
    return Graph((Input("x", shape),), (), tuple(nodes), (Ref(nodes[-1].name),))


def test_kernels_are_compiled_for_few_kinds_of_attention_and_heads_of_a_usual_width() -> None:
    """A model may be a stranger's, and to compile one takes a second or more."""
    assert is_supported(of_windows(range(1, MAX_KINDS + 1)))
    assert not is_supported(of_windows(range(1, MAX_KINDS + 2)))
    for width, there in ((MAX_HEAD_WIDTH, True), (MAX_HEAD_WIDTH + 1, False), (1 << 20, False)):
        node, shape = attention(2, width)
        assert is_supported(Graph((Input("x", shape),), (), (node,), (Ref("n"),))) == there
