"""Norms, rotary positions and gates in one call each: those of torch, and each row's the same bits in any company."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import DType, Graph, Input, Node, Ref, TensorType
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.products.fused_rows import fused_rows, gate, rms_norm, rotate, silu

BATCH, SEQUENCE = symbol("batch"), symbol("sequence")
sizes = st.integers(1, 70)


def drawn(seed: int) -> Callable[..., torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=made)


def turned(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    half = heads.shape[3] // 2
    return heads * cosines + torch.cat([-heads[..., half:], heads[..., :half]], -1) * sines


@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 9), sizes, st.integers(0, 2))
def test_heads_turn_by_the_bits_of_the_library(
    batch: int, heads: int, positions: int, half: int, order: int
) -> None:
    made = drawn(half)
    shape = [batch, heads, positions, 2 * half]
    axes = [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)][order]  # as they lie in memory
    x = made(*(shape[axis] for axis in axes)).permute(*(axes.index(axis) for axis in range(4)))
    angles = [made(batch, 1, positions, 2 * half) for _ in range(2)]
    found = rotate(x, *angles)
    assert torch.equal(found, turned(x, *angles))
    alone = [
        rotate(x[:, :, n : n + 1], *(each[:, :, n : n + 1] for each in angles)) for n in range(positions)
    ]
    assert torch.equal(torch.cat(alone, 2), found)


@given(st.integers(1, 5), sizes, st.floats(1e-3, 1e3))
def test_a_rows_norm_does_not_depend_on_the_others(rows: int, width: int, spread: float) -> None:
    made = drawn(width)
    x, weight = spread * made(2, rows, width), made(width)
    found = rms_norm(x, weight, 1e-6)
    expected = functional.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-9)
    for row in range(rows):
        assert torch.equal(rms_norm(x[:, row : row + 1], weight, 1e-6), found[:, row : row + 1])
    assert torch.equal(rms_norm(x.transpose(0, 1), weight, 1e-6), found.transpose(0, 1))
    torch.testing.assert_close(rms_norm(x, weight, None), functional.rms_norm(x, (width,), weight))


@given(st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=40), st.integers(0, 40))
def test_a_gates_number_does_not_depend_on_where_it_lies(numbers: list[float], before: int) -> None:
    x = torch.tensor(numbers)
    other = torch.linspace(-3, 2, len(x))
    found = gate(x, other)
    expected = functional.silu(x.double()) * other.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-30)
    assert torch.equal(silu(x) * other, found), "a cut may lie between them"
    moved = gate(torch.cat([torch.ones(before), x]), torch.cat([torch.ones(before), other]))
    assert torch.equal(moved[before:], found)


def test_what_is_no_number_stays_none_and_what_is_infinite_is_the_librarys() -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38])
    torch.testing.assert_close(gate(x, torch.ones(7)), functional.silu(x), equal_nan=True)
    rows = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(
        rms_norm(rows, torch.ones(2), 1e-6),
        functional.rms_norm(rows, (2,), torch.ones(2), 1e-6),
        equal_nan=True,
    )


def test_several_threads_make_the_same_bits() -> None:
    made = drawn(0)
    x, weight, heads = made(1, 4096, 1024), made(1024), made(1, 64, 4096, 32).transpose(1, 2)
    angles = [made(1, 1, 64, 32) for _ in range(2)]

    def all_of_it() -> list[torch.Tensor]:
        return [rms_norm(x, weight, 1e-6), gate(x, x), rotate(heads, *angles)]

    count = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = all_of_it()
        torch.set_num_threads(3)
        assert all(map(torch.equal, all_of_it(), alone))
    finally:
        torch.set_num_threads(count)


def test_nothing_is_made_of_tensors_that_do_not_belong_together() -> None:
    x = torch.ones(1, 2, 3, 8)
    angles = torch.ones(1, 1, 3, 8)
    for wrong in [
        lambda: rotate(x, angles, angles[:, :, :2]),
        lambda: rotate(x, angles[..., :4], angles[..., :4]),
        lambda: rotate(x[..., :7], angles[..., :7], angles[..., :7]),
        lambda: rotate(x.double(), angles, angles),
        lambda: rms_norm(x, torch.ones(7), 1e-6),
        lambda: rms_norm(x.half(), torch.ones(8), 1e-6),
        lambda: gate(x, x[..., :7]),
        lambda: gate(x, x.double()),
        lambda: silu(x.double()),
    ]:
        with pytest.raises(ValueError, match=r"heads|rows|gate|SiLU"):
            wrong()
    for empty in (rotate(x[:, :, :0], angles[:, :, :0], angles[:, :, :0]), gate(x[:0], x[:0])):
        assert not empty.numel()
    assert not rms_norm(x[:0], torch.ones(8), 1e-6).numel()


def floats(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType((BATCH, shape[0], SEQUENCE, shape[1]) if len(shape) == 2 else shape, dtype)


def layer(width: int = 8, dtype: str = "float32", *, cut: int = 4, heads: int = 1) -> Graph:
    """Rotary positions, a gate and a norm, one behind the other."""
    wide, half = floats(2, width, dtype=dtype), floats(2, cut, dtype=dtype)
    angles = floats(heads, width, dtype=dtype)
    x = Ref("x")
    nodes = [
        Node("straight", "aten.mul.Tensor", (x, Ref("cos")), (wide,)),
        Node("first", "aten.slice.Tensor", (x, 3, 0, cut, 1), (half,)),
        Node("second", "aten.slice.Tensor", (x, 3, cut, 2**63 - 1, 1), (half,)),
        Node("minus", "aten.neg", (Ref("second"),), (half,)),
        Node("turned", "aten.cat", ((Ref("minus"), Ref("first")), -1), (wide,)),
        Node("crossed", "aten.mul.Tensor", (Ref("turned"), Ref("sin")), (wide,)),
        Node("rotated", "aten.add.Tensor", (Ref("straight"), Ref("crossed"), 1), (wide,)),
        Node("silu", "aten.silu", (Ref("rotated"),), (wide,)),
        Node("gated", "aten.mul.Tensor", (x, Ref("silu")), (wide,)),
        Node("normed", "aten.rms_norm", (Ref("gated"), (width,), Ref("weight"), 1e-6), (wide,)),
    ]
    inputs = (Input("x", wide), Input("cos", angles), Input("sin", angles))
    inputs += (Input("weight", TensorType((width,), dtype)),)
    return Graph(inputs, (), tuple(nodes), (Ref("normed"),))


def made_by(graph: Graph) -> dict[str, str]:
    return {name: fused.function.__name__ for name, fused in fused_rows(graph, ()).items()}


def test_a_layer_is_three_calls_and_gives_what_it_gave() -> None:
    graph, made, cpu = layer(), drawn(1), torch.device("cpu")
    assert made_by(graph) == {"rotated": "rotate", "gated": "gate", "normed": "rms_norm"}
    given = [made(1, 2, 5, 8), made(1, 1, 5, 8), made(1, 1, 5, 8), made(8)]
    program = compile_graph(graph, cpu, training=False, fused=fused_rows(graph, ()))
    assert "cat" not in program.source and "silu" not in program.source
    plain = compile_graph(graph, cpu, training=False)
    torch.testing.assert_close(program.run(given, (), None), plain.run(given, (), None))


def test_what_others_read_too_stays() -> None:
    graph = layer()
    seen = Graph(graph.inputs, (), graph.nodes, (*graph.outputs, Ref("turned"), Ref("silu")))
    assert made_by(seen) == {"silu": "silu", "normed": "rms_norm"}
    copy = Node("copy", "aten.neg", (Ref("crossed"),), graph.nodes[0].results)
    read_twice = Graph(graph.inputs, (), (*graph.nodes, copy), graph.outputs)
    assert made_by(read_twice) == {"gated": "gate", "normed": "rms_norm"}
    assert not fused_rows(graph, {"silu", "normed", "first"})


@pytest.mark.parametrize("graph", [layer(cut=2), layer(heads=2)], ids=["quarters", "angles of each head"])
def test_what_only_looks_like_rotary_positions_stays(graph: Graph) -> None:
    assert "rotated" not in made_by(graph)


def test_other_dtypes_are_the_librarys() -> None:
    assert made_by(layer(dtype="bfloat16")) == {}


def test_what_is_rounded_to_half_precision_is_the_librarys() -> None:
    graph = layer()
    to = Node(
        "rounded", "aten.to.dtype", (Ref("normed"), DType("bfloat16")), (floats(2, 8, dtype="bfloat16"),)
    )
    assert made_by(Graph(graph.inputs, (), (*graph.nodes, to), (Ref("rounded"),))) == {}
