"""In half precision: what torch computes in float32 and then rounds does not overflow here either, nor lose more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.opset import infer
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.jax_plane.library import load

pytest.importorskip("jax", reason="the extra jax is not installed")
DEVICE = load("cpu", 1)

import jax  # noqa: E402

from fusion.dag.cutting.cuts import split  # noqa: E402
from fusion.runtime.planes.jax_plane.arrays import array, tensor  # noqa: E402
from fusion.runtime.planes.jax_plane.jax_decoding import JaxDecodingStage  # noqa: E402
from fusion.runtime.planes.jax_plane.program import Program  # noqa: E402
from fusion.runtime.planes.plane import Piece  # noqa: E402
from fusion.runtime.planes.torch_decoding import TorchDecodingStage  # noqa: E402

RANDOM = torch.Generator().manual_seed(0)
LARGE = 30 + torch.randn(1, 2, 5, 128, generator=RANDOM)  # products of two rows are beyond what float16 holds
PLANE = torch.arange(1600.0).remainder(5).view(1, 1, 40, 40)
HEADS = TensorType((1, 2, symbol("sequence"), 128), "float16")


def one(op: str, x: torch.Tensor, *args: Any) -> Graph:
    type_ = TensorType(tuple(x.shape), str(x.dtype).removeprefix("torch."))
    node = Node("y", op, (Ref("x"), *args), infer(op, (Ref("x"), *args), {Ref("x"): type_}))
    return Graph((Input("x", type_),), (), (node,), (Ref("y"),))


@pytest.mark.parametrize(
    ("op", "x", "args"),
    [
        ("aten.linalg_vector_norm", torch.full((40,), 300.0).half(), (2, (0,), False, None)),
        ("aten.var.correction", torch.arange(70_000).remainder(5).half(), ((0,), 1, False)),
        ("aten.std.dim", torch.arange(70_000).remainder(5).half(), ((0,), True, False)),
        ("aten.rms_norm", torch.full((4, 8), 0.03).half(), ((8,), None, None)),
        ("aten.rms_norm", torch.full((4, 8), 0.03).bfloat16(), ((8,), None, None)),
        ("aten.avg_pool2d", PLANE.bfloat16(), ((40, 40), (40, 40), (0, 0), False, True, None)),
        ("aten.avg_pool2d", PLANE.half(), ((40, 39), (40, 39), (1, 0), False, False, None)),
        ("aten.cumsum", torch.ones(1000).bfloat16(), (0, None)),
        ("aten.cumprod", torch.full((200,), 1.01).half(), (0, None)),
        ("aten.softmax.int", torch.zeros(70_000).half(), (0, None)),
        ("aten.scaled_dot_product_attention", LARGE.half(), (Ref("x"), Ref("x"), None, 0.0, True, None, False)),
    ],
)  # fmt: skip
def test_an_operator_is_as_exact_as_in_torch(op: str, x: torch.Tensor, args: tuple[Any, ...]) -> None:
    graph = one(op, x, *args)
    (wanted,) = compile_graph(graph, torch.device("cpu"), training=True).run([x], [], None)
    program = Program(graph, training=True)
    (found,) = jax.jit(lambda x: program.run([x], {}, (), None)[0])(array(x, DEVICE))
    assert wanted.isfinite().all()
    torch.testing.assert_close(tensor(found), wanted)


def test_attention_to_a_cache_does_not_overflow() -> None:
    args = (Ref("x"), Ref("x"), Ref("x"), 0, None, None)
    node = Node("y", "fusion.cached_attention", args, (HEADS,))
    graph = Graph((Input("x", HEADS),), (), (node,), (Ref("y"),), ("sequence",))
    (stage,) = split(graph, ())
    found = []
    for made in (TorchDecodingStage(stage, {}), JaxDecodingStage(stage, {}, DEVICE)):
        made.open("a", 8)
        found += [
            value for result in made.run([Piece("a", 0, {"x": LARGE.half()})]) for value in result.values()
        ]
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1], found[0])
