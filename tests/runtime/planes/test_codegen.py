"""Generated code holds nothing but our own identifiers, operators from the table, and plain constants."""

from __future__ import annotations

import linecache
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from torch import fx

from fusion.dag.ir.dims import poly, symbol
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import OPSET
from fusion.runtime.planes.codegen import compile_graph
from fusion.runtime.planes.torch_ops import _CALLS, _DISPATCHED, STATEFUL

CPU = torch.device("cpu")
BATCH, SEQUENCE = symbol("batch"), symbol("sequence")
VECTOR = TensorType((BATCH, 3), "float32")


def graph(x: str = "x", w: str = "w", node: str = "y", op: str = "aten.mul.Tensor", *more: Any) -> Graph:
    args = (Ref(x), Ref(w), *more)
    return Graph(
        (Input(x, VECTOR),),
        (Variable(w, TensorType((3,), "float32")),),
        (Node(node, op, args, (VECTOR,)),),
        (Ref(node),),
    )


HOSTILE = [
    "x\nimport os",
    "v0",
    "self",
    "__class__",
    "x'); import os; os.system('touch /tmp/owned') #",
    '"""',
    "\\",
    "lambda: 0",
    "torch",
    "é\u202e",
    "",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_reaches_the_source(name: str) -> None:
    program = compile_graph(graph(name, f"{name}.w", f"{name}.y"), CPU, training=True)
    assert program.source == compile_graph(graph(), CPU, training=True).source
    (found,) = program.run([torch.full((2, 3), 2.0)], [torch.arange(3.0)], None)
    assert found.tolist() == [[0.0, 2.0, 4.0]] * 2


def test_what_was_compiled_does_not_stay_in_the_process() -> None:
    """But for who holds it: a peer compiles the stages of job after job."""
    kept = fx.graph_module._loader.eval_cache
    before = len(linecache.cache), len(kept)
    for _ in range(10):
        compile_graph(graph(), CPU, training=True)
    assert (len(linecache.cache), len(kept)) == before


@settings(max_examples=examples(50))
@given(st.lists(st.text(), min_size=3, max_size=3, unique=True), st.floats() | st.integers() | st.booleans())
def test_the_source_is_made_of_known_words(names: list[str], constant: float) -> None:
    g = graph(*names)
    g = replace(
        g,
        nodes=(*g.nodes, Node("z", "aten.add.Tensor", (Ref(names[2]), constant, 1), (VECTOR,))),
        outputs=(Ref("z"),),
    )
    source = compile_graph(g, CPU, training=False).source
    words = set(re.findall(r"[A-Za-z_]\w*", source))
    assert words <= {"def", "forward", "self", "return", "None", "inf", "nan", "True", "False", "e"} | {
        w for w in words if re.fullmatch(r"v\d+|e\d*", w)
    }


class Number(int):
    def __repr__(self) -> str:
        return "__import__('os').getpid()"


class Text(str):
    pass


@pytest.mark.parametrize(
    "constant",
    [
        "import os",
        Text("x"),
        b"x",
        Number(3),
        object(),
        {"a": 1},
        [1, 2],
        1j,
        DType("float32; import os"),
        (1, ("x",)),
    ],
)
def test_only_plain_constants_become_code(constant: Any) -> None:
    with pytest.raises(GraphError):
        compile_graph(graph("x", "w", "y", "aten.add.Tensor", constant), CPU, training=True)


@pytest.mark.parametrize(
    "op", ["os.system", "aten.mul", "torch.load", "aten.__class__", "fusion.nothing", "", "eval"]
)
def test_an_unknown_op_is_refused(op: str) -> None:
    with pytest.raises(GraphError, match="unknown op"):
        compile_graph(graph("x", "w", "y", op), CPU, training=True)


def test_a_value_is_defined_before_it_is_read() -> None:
    g = graph()
    late = replace(g, nodes=(Node("a", "aten.relu", (Ref("y"),), (VECTOR,)), *g.nodes))
    with pytest.raises(GraphError, match="not defined before it"):
        compile_graph(late, CPU, training=True)
    with pytest.raises(GraphError, match="not defined before it"):
        compile_graph(replace(g, outputs=(Ref("y", 1),)), CPU, training=True)


def test_every_operator_of_the_op_set_has_a_spelling() -> None:
    missing = [n for n in OPSET if n not in _CALLS and n not in _DISPATCHED and n not in STATEFUL]
    assert missing == []
    unknown = [n for n in (*_CALLS, *STATEFUL) if n not in OPSET]
    assert unknown == []


def test_sizes_are_read_from_the_inputs() -> None:
    rows = TensorType((poly([(("batch", "sequence"), 1)]), 2), "float32")
    back = (symbol("batch"), symbol("sequence"), 2)
    g = Graph(
        (Input("ids", TensorType((BATCH, SEQUENCE), "int64")), Input("x", rows)),
        (),
        (Node("y", "aten.view", (Ref("x"), back), (TensorType(back, "float32"),)),),
        (Ref("y"),),
    )
    program = compile_graph(g, CPU, training=False)
    for batch, length in ((2, 3), (3, 2), (1, 6), (1, 1)):
        ids = torch.zeros(batch, length, dtype=torch.int64)
        (found,) = program.run([ids, torch.zeros(batch * length, 2)], [], None)
        assert found.shape == (batch, length, 2)
    with pytest.raises(ValueError, match="input x is"):
        program.run([torch.zeros(2, 3, dtype=torch.int64), torch.zeros(5, 2)], [], None)
    with pytest.raises(ValueError, match="input ids is"):
        program.run([torch.zeros(2, 3), torch.zeros(6, 2)], [], None)
    with pytest.raises(GraphError, match="tells the size"):
        compile_graph(replace(g, inputs=g.inputs[1:]), CPU, training=False)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_the_least_integer_over_minus_one_wraps_around(dtype: str) -> None:
    """As sums do: the processor's own division would end the process."""
    kind = TensorType((BATCH,), dtype)
    for other in (Ref("w"), -1):
        nodes = (Node("y", "fusion.div_trunc", (Ref("x"), other), (kind,)),)
        g = Graph((Input("x", kind), Input("w", kind)), (), nodes, (Ref("y"),))
        program = compile_graph(g, CPU, training=False)
        least = torch.iinfo(getattr(torch, dtype)).min
        x = torch.tensor([least, -7, 7] * 20).to(getattr(torch, dtype))
        (found,) = program.run([x, torch.full_like(x, -1)], [], None)
        assert found.dtype == x.dtype and found.tolist() == [least, 7, -7] * 20


def test_bytes_are_divided_by_255_as_by_any_other_number() -> None:
    """What -1 is to bytes."""
    kind = TensorType((3,), "uint8")
    nodes = (Node("y", "fusion.div_trunc", (Ref("x"), Ref("w")), (kind,)),)
    program = compile_graph(
        Graph((Input("x", kind), Input("w", kind)), (), nodes, (Ref("y"),)), CPU, training=False
    )
    given = torch.tensor([[249, 255, 9], [255, 255, 2]], dtype=torch.uint8)
    (found,) = program.run([given[0], given[1]], [], None)
    assert found.tolist() == [0, 1, 4]


@pytest.mark.parametrize("op", ["aten.scatter.src", "aten.scatter_add"])
def test_what_is_not_read_of_a_source_has_a_gradient_of_zero(op: str) -> None:
    kind = TensorType((3, 4), "float32")
    args = (Ref("x"), 1, Ref("index"), Ref("source"))
    inputs = (Input("x", kind), Input("index", TensorType((2, 1), "int64")), Input("source", kind))
    program = compile_graph(
        Graph(inputs, (), (Node("y", op, args, (kind,)),), (Ref("y"),)), CPU, training=True
    )
    x, source = torch.zeros(3, 4), torch.arange(12.0).view(3, 4).requires_grad_()
    (found,) = program.run([x, torch.tensor([[1], [3]]), source], [], None)
    assert found.nonzero().tolist() == [[1, 3]] and found[1, 3] == 4
    found.sum().backward()
    assert source.grad is not None and source.grad.nonzero().tolist() == [[0, 0], [1, 0]]
