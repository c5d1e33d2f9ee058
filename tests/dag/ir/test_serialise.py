"""Graphs as bytes: round trips, canonical form, and what happens to bytes and graphs that mean harm."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.dag.ir import serialise
from fusion.dag.ir.dims import Poly, poly, symbol
from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import DType, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import OPSET_VERSION, infer

BATCH, SEQUENCE = symbol("batch"), symbol("sequence")


def float_type(*shape: Any) -> TensorType:
    return TensorType(shape, "float32")


def small_graph() -> Graph:
    """Every sort of argument: values, second results, lists, dtypes, polynomials, infinities."""
    types: dict[Ref, TensorType] = {
        Ref("ids"): TensorType((BATCH, SEQUENCE), "int64"),
        Ref("table"): float_type(16, 8),
        Ref("norm.weight"): float_type(8),
    }
    nodes: list[Node] = []

    def add(name: str, op: str, *args: Any) -> None:
        results = infer(op, args, types)
        nodes.append(Node(name, op, args, results))
        types.update((Ref(name, i), t) for i, t in enumerate(results))

    add("embedding", "aten.embedding", Ref("table"), Ref("ids"), -1, False)
    add("halves", "aten.chunk", Ref("embedding"), 2, -1)
    add("joined", "aten.cat", (Ref("halves", 1), Ref("halves", 0)), -1)
    add("flat", "aten.view", Ref("joined"), (BATCH * SEQUENCE, 8))
    add("norm", "aten.layer_norm", Ref("flat"), (8,), Ref("norm.weight"), None, 1e-5)
    add("double", "aten.to.dtype", Ref("norm"), DType("float64"))
    add("mask", "aten.full", (SEQUENCE, SEQUENCE + 1), -math.inf, None)
    add("sum", "aten.sum", Ref("double"), None)
    return Graph(
        inputs=(Input("ids", types[Ref("ids")]),),
        variables=(
            Variable("table", types[Ref("table")], aliases=("head.weight",)),
            Variable("norm.weight", types[Ref("norm.weight")], trainable=False),
        ),
        nodes=tuple(nodes),
        outputs=(Ref("sum"), Ref("halves", 1)),
    )


def change(graph: Graph, name: str, /, **fields: Any) -> Graph:
    return replace(graph, nodes=tuple(replace(n, **fields) if n.name == name else n for n in graph.nodes))


def raw(graph: Graph) -> list[Any]:
    found: list[Any] = msgpack.unpackb(serialise.encode(graph))
    return found


def refused(data: bytes, message: str | None = None) -> str:
    with pytest.raises(GraphError, match=message) as error:
        serialise.decode(data)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    return text


def test_round_trip_and_name() -> None:
    graph = small_graph()
    data = serialise.encode(graph)
    assert serialise.decode(data) == graph
    assert serialise.encode(serialise.decode(data)) == data
    assert serialise.digest(graph) == serialise.digest(serialise.decode(data))
    assert serialise.digest(change(graph, "norm", args=(*graph.nodes[4].args[:4], 1e-6))) != serialise.digest(
        graph
    )


# -- random graphs -----------------------------------------------------------------------------------------------

NAMES = st.text("abcXYZ019_.:-", min_size=1, max_size=20)
DIMS = st.one_of(
    st.integers(0, 2**12),  # six times stacked by five, two of them have fewer elements than a graph may
    st.builds(
        lambda terms: poly(terms),
        st.lists(
            st.tuples(st.lists(st.sampled_from(["batch", "sequence"]), max_size=3), st.integers(-99, 99)),
            max_size=4,
        ),
    ).filter(lambda d: isinstance(d, Poly)),
)
NUMBERS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    names = draw(st.lists(NAMES, min_size=2, max_size=12, unique=True))
    shape = tuple(draw(st.lists(DIMS, max_size=2)))
    type_ = TensorType(shape, draw(st.sampled_from(["float32", "int64", "bfloat16"])))
    inputs = (Input(names[0], type_),)
    values = [Ref(names[0])]
    nodes = []
    for name in names[1:]:
        made: tuple[str, tuple[Any, ...]] = draw(
            st.one_of(
                st.tuples(st.just("aten.where.Scalar"), st.just(())),
                st.tuples(st.just("aten.stack"), st.just(())),
                st.tuples(
                    st.just("aten.full_like"), st.tuples(NUMBERS, st.sampled_from([None, DType("int64")]))
                ),
                st.tuples(st.just("aten.neg"), st.just(())),
            )
        )
        op, args = made
        types = {Ref(n.name): n.results[0] for n in nodes} | {Ref(names[0]): type_}
        if op == "aten.stack":
            first = draw(st.sampled_from(values))
            args = ((first,) * draw(st.integers(1, 5)), 0)
            if len(types[first].shape) > 6:
                op = "aten.neg"
        if op in ("aten.neg", "aten.where.Scalar"):
            op, args = "aten.neg", (draw(st.sampled_from(values)),)
        elif op == "aten.full_like":
            args = (draw(st.sampled_from(values)), *args)
        nodes.append(Node(name, op, args, infer(op, args, types)))
        values.append(Ref(name))
    return Graph(
        inputs, (), tuple(nodes), tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3)))
    )


@given(graphs())
@settings(max_examples=examples(100), deadline=None)
def test_any_valid_graph_round_trips(graph: Graph) -> None:
    data = serialise.encode(graph)
    again = serialise.decode(data)
    assert again == graph and repr(again) == repr(graph)  # repr tells True from 1 from 1.0
    assert serialise.encode(again) == data


VALID = serialise.encode(small_graph())


@example([(203, 10)])  # a line break in a dtype
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=examples(300), deadline=None)
def test_damaged_bytes_are_refused_or_are_another_valid_graph(damage: list[tuple[int, int]]) -> None:
    data = bytearray(VALID)
    for position, value in damage:
        data[position] = value
    try:
        graph = serialise.decode(bytes(data))
    except GraphError as error:
        assert "\n" not in str(error)
    else:
        assert serialise.encode(graph) == bytes(data)


@given(st.binary(max_size=300))
@settings(max_examples=examples(200), deadline=None)
def test_noise_is_refused(data: bytes) -> None:
    refused(data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**40)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=2)
    ),
    max_leaves=10,
)


@given(st.integers(0, 7), st.integers(0, 7), st.integers(0, 3), JSON)
@settings(max_examples=examples(300), deadline=None)
def test_any_object_in_any_place_is_refused_in_one_line(
    section: int, item: int, field: int, value: Any
) -> None:
    tree = raw(small_graph())
    if isinstance(tree[section], list) and tree[section]:
        target = tree[section][item % len(tree[section])]
        if isinstance(target, list):
            target[field % len(target)] = value
        else:
            tree[section][item % len(tree[section])] = value
    else:
        tree[section] = value
    data = msgpack.packb(tree)
    try:
        graph = serialise.decode(data)
    except GraphError as error:
        assert "\n" not in str(error)
    else:
        assert serialise.encode(graph) == data


# -- hostile bytes -----------------------------------------------------------------------------------------------

HEAD = b"\x98" + msgpack.packb("fusion.graph") + b"\x01\x01\x90"


def node_bytes(*args: Any, op: str = "aten.zeros", name: str = "x", results: Any = None) -> bytes:
    node = msgpack.packb([name, op, list(args), results or [["float32", [2]]]])
    return HEAD + b"\x90\x90\x91" + node + msgpack.packb([[0, 0]])


def test_the_hand_written_bytes_are_otherwise_right() -> None:
    assert serialise.decode(node_bytes([1, 2], None)).nodes[0].op == "aten.zeros"


BILLION = b"\xdd\x3b\x9a\xca\x00"
BOMBS: dict[str, bytes] = {
    "nothing": b"",
    "10^9 inputs": HEAD + BILLION,
    "10^9 variables": HEAD + b"\x90" + BILLION,
    "10^9 nodes": HEAD + b"\x90\x90" + BILLION + b"\x90" * 1000,
    "10^9 arguments": HEAD + b"\x90\x90\x91\x94\xa1x\xaaaten.zeros" + BILLION,
    "10^9 outputs": HEAD + b"\x90\x90\x90" + BILLION,
    "10^9 symbols": b"\x98" + msgpack.packb("fusion.graph") + b"\x01\x01" + BILLION,
    "4 GiB string": HEAD + b"\x91\x92\xdb\xff\xff\xff\xff",
    "4 GiB binary": HEAD + b"\x91\x92\xc6\xff\xff\xff\xff",
    "deep nesting": HEAD + b"\x90\x90\x91" + b"\x91" * 5_000_000,
    "deep nesting in a node": node_bytes(*[None])[:-3] + b"\x91" * 30_000,
    "nested maps": HEAD + b"\x90\x90\x91" + b"\x81\x01" * 1_000_000,
    "millions of lists": HEAD + b"\x90\x90\x91\xdd\x01\x00\x00\x00" + b"\x90" * 2**24,
    "an extension": HEAD + b"\x90\x90\x91\xc7\x04\x01abcd",
    "a timestamp": HEAD + b"\x90\x90\x91\xd6\xffabcd",
    "too long": b"\xc0" * (serialise.MAX_BYTES + 1),
    "only nils": b"\xc0" * serialise.MAX_BYTES,
    "bytes after the end": VALID + b"\xc0",
    "cut short": VALID[:-1],
    "not UTF-8": HEAD + b"\x91\x92\xa2\xff\xfe\x90",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_cost_little(name: str) -> None:
    tracemalloc.start()
    try:
        refused(BOMBS[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(BOMBS[name]) + 8 * 2**20


@pytest.mark.heavy
def test_many_parts_are_refused_before_they_fill_memory() -> None:
    node = msgpack.packb(["x", "aten.zeros", [[1] + [1] * 1000, None], [["float32", [1] * 8]]])
    data = HEAD + b"\x90\x90\xdd" + (200_000).to_bytes(4, "big") + node * 4_500
    tracemalloc.start()
    start = time.process_time()
    try:
        refused(data, "parts")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300 * 2**20
    assert time.process_time() - start < 60


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (node_bytes("import os", None), "string"),
        (node_bytes([1, "import os"], None), "string"),
        (node_bytes([2, "x\nimport os"], None), "sort ints|sort dims|dtype"),
        (node_bytes([1, 2], None, name="x\nimport os"), "not a name"),
        (node_bytes([1, 2], None, op="x\nimport os"), "unknown op"),
        (node_bytes([1, 2], None, op="os.system"), "unknown op"),
        (node_bytes([1, 2], [2, "float33"]), "dtype"),
        (node_bytes([1, 2], None, results=[["float32", [3]]]), "gives"),
        (node_bytes([1, 2], None, results=[["float32", [2]]] * 2), "gives"),
        (node_bytes([1, 2], None, results=[["int64", [2]]]), "gives"),
        (node_bytes([1, 2]), "arguments"),
        (node_bytes([1, 2**63], None), "64 bits"),
        (node_bytes([1, 2**50], None, results=[["float32", [2**50]]]), "too large"),
        (node_bytes([1, *[2**40] * 4], None), "too large"),
        (node_bytes([1, *[1] * 9], None), "dimension or too many|many"),
        (node_bytes([1, [1, 2]], None), "unknown sort"),
        (node_bytes([0, 0, 0], None), "cycle"),
        (node_bytes([0, 5, 0], None), "cycle"),
        (node_bytes([0, -1, 0], None), "cycle"),
        (node_bytes([3, [1, 0]], None), "unknown symbol"),
        (node_bytes([9, 1], None), "unknown sort"),
        (node_bytes({"a": 1}, None), "max_map_len"),
        (node_bytes([True, 2], None), "canonical"),
        (
            node_bytes([1, 2], None).replace(b"\x01\x01\x90", bytes([1, OPSET_VERSION + 1, 0x90]), 1),
            f"needs op-set {OPSET_VERSION + 1}: this peer knows {OPSET_VERSION}",
        ),
        (node_bytes([1, 2], None).replace(b"\x01\x01\x90", b"\x02\x01\x90", 1), "needs form 2: this peer knows 1"),
        (node_bytes([1, 2], None).replace(b"\x01\x01\x90", b"\x01\x00\x90", 1), "of op-set 0"),
        (node_bytes([1, 2], None).replace(b"\x01\x01\x90", b"\x01\xc3\x90", 1), "of op-set True"),
        (node_bytes([1, 2], None).replace(b"\x92\x01\x02", b"\x92\x01\xcc\x02", 1), "canonical"),
    ],
)  # fmt: skip
def test_hostile_nodes(data: bytes, message: str) -> None:
    refused(data, message)


def test_reading_a_later_node_is_a_cycle() -> None:
    x = [["float32", [2]]]
    nodes = [["a", "aten.relu", [[0, 1, 0]], x], ["b", "aten.relu", [[0, 0, 0]], x]]
    refused(msgpack.packb(["fusion.graph", 1, 1, [], [], [], nodes, [[1, 0]]]), "cycle")


def test_heavy_but_allowed_graphs_validate_in_bounded_time() -> None:
    """Joins of a thousand values of intricate sizes that add up to a plain number: the costliest to check."""
    symbols = tuple(f"s{i}" for i in range(8))
    rough = sum((symbol(s) * symbol("s0") for s in symbols), start=symbol("s1") + 1)
    x, y = float_type(rough, 2), float_type(50 - rough, 2)
    joined = float_type(512 * 50, 2)
    nodes = tuple(Node(f"n{i}", "aten.cat", ((Ref("x"), Ref("y")) * 512, 0), (joined,)) for i in range(20))
    graph = Graph((Input("x", x), Input("y", y)), (), nodes, (Ref("n1"),), symbols)
    start = time.process_time()
    serialise.validate(graph)
    assert time.process_time() - start < 10


def test_sums_of_many_monomials_are_refused() -> None:
    """Each input is plain, their sum would have hundreds of terms and every further addition cost as much."""
    symbols = tuple(f"s{i}" for i in range(8))
    inputs = tuple(
        Input(f"x{a}{b}{c}", float_type(symbol(f"s{a}") * symbol(f"s{b}") * symbol(f"s{c}")))
        for a in range(8) for b in range(8) for c in range(8)
    )  # fmt: skip
    node = Node("all", "aten.cat", (tuple(Ref(i.name) for i in inputs), 0), (float_type(1),))
    with pytest.raises(GraphError, match="intricate"):
        serialise.validate(Graph(inputs, (), (node,), (Ref("all"),), symbols))


# -- invalid graphs ----------------------------------------------------------------------------------------------


def with_inputs(*inputs: Input) -> Callable[[Graph], Graph]:
    return lambda g: replace(g, inputs=(*g.inputs, *inputs))


def with_variable(**fields: Any) -> Callable[[Graph], Graph]:
    return lambda g: replace(g, variables=(replace(g.variables[0], **fields), *g.variables[1:]))


INVALID: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "two of a name": (with_inputs(Input("table", float_type(1))), "used twice"),
    "a node named like a variable": (lambda g: change(g, "sum", name="table"), "used twice"),
    "an alias in use": (with_variable(aliases=("norm.weight",)), "used twice"),
    "a line break in a name": (with_inputs(Input("x\nimport os", float_type(1))), "not a name"),
    "a trailing line break": (with_inputs(Input("x\n", float_type(1))), "not a name"),
    "no name": (with_inputs(Input("", float_type(1))), "not a name"),
    "a long name": (with_inputs(Input("x" * 257, float_type(1))), "not a name"),
    "letters from elsewhere": (with_inputs(Input("ｘ", float_type(1))), "not a name"),
    "the name of an edge": (with_inputs(Input("halves/1", float_type(1))), "kept for"),
    "a hostile alias": (with_variable(aliases=("x;y",)), "not a name"),
    "an unknown symbol": (with_inputs(Input("x", float_type(symbol("other")))), "unknown symbols"),
    "a hostile symbol": (lambda g: replace(g, symbols=("batch", "sequence", "x\ny")), "symbol"),
    "blocks of what is no size": (
        lambda g: replace(g, symbols=("batch", "sequence", "other_0_over_4")),
        "counts blocks of what is no symbol",
    ),
    "blocks in another spelling": (
        lambda g: replace(g, symbols=("batch", "sequence", "batch_00_over_4")),
        "counts blocks of what is no symbol",
    ),
    "blocks of a size taken once": (
        lambda g: replace(g, symbols=("batch", "sequence", "batch_times_1_0_over_4")),
        "counts blocks of what is no symbol",
    ),
    "many symbols": (lambda g: replace(g, symbols=tuple(f"s{i}" for i in range(9))), "symbols"),
    "a variable that no machine holds": (with_variable(type=float_type(2**37)), "elements"),
    "a variable of no fixed size": (with_variable(type=float_type(BATCH, 8)), "variable"),
    "an unknown dtype": (with_inputs(Input("x", TensorType((1,), "object"))), "dtype"),
    "a huge dimension": (with_inputs(Input("x", float_type(2**41))), "dimension"),
    "a negative dimension": (with_inputs(Input("x", float_type(-1))), "dimension"),
    "a boolean dimension": (with_inputs(Input("x", float_type(True))), "dimension"),
    "a huge tensor": (with_inputs(Input("x", float_type(2**40, 2**40))), "elements"),
    "a high rank": (with_inputs(Input("x", float_type(*[1] * 9))), "rank"),
    "a long polynomial": (with_inputs(Input("x", float_type(Poly(tuple(((), 1) for _ in range(17)))))), "terms"),
    "a high degree": (with_inputs(Input("x", float_type(Poly(((("batch",) * 5, 1),))))), "degree"),
    "a huge coefficient": (with_inputs(Input("x", float_type(Poly(((("batch",), 2**60),))))), "coefficient"),
    "a constant polynomial": (with_inputs(Input("x", float_type(Poly((((), 3),))))), "constant"),
    "an unsorted polynomial": (with_inputs(Input("x", float_type(Poly(((("sequence",), 1), (("batch",), 1)))))), "normal form"),
    "a doubled monomial": (with_inputs(Input("x", float_type(Poly(((("batch",), 1), (("batch",), 1)))))), "normal form"),
    "an empty polynomial": (with_inputs(Input("x", float_type(Poly(())))), "constant"),
    "an unknown op": (lambda g: change(g, "sum", op="aten.system"), "unknown op"),
    "a string": (lambda g: change(g, "sum", args=("x", None)), "sort str"),
    "bytes": (lambda g: change(g, "sum", args=(b"x", None)), "sort bytes"),
    "code": (lambda g: change(g, "sum", args=(print, None)), "sort builtin"),
    "NaN": (lambda g: change(g, "mask", args=((SEQUENCE, SEQUENCE + 1), math.nan, None)), "NaN"),
    "a list in a list in a list": (lambda g: change(g, "sum", args=((((1,),),), None)), "list in a list"),
    "a value of nothing": (lambda g: change(g, "sum", args=(Ref("ghost"), None)), "not defined"),
    "a result that is not there": (lambda g: change(g, "joined", args=((Ref("halves", 2),), -1)), "not defined"),
    "a forward reference": (lambda g: replace(g, nodes=g.nodes[::-1]), "not defined"),
    "reading itself": (lambda g: change(g, "sum", args=(Ref("sum"), None)), "not defined"),
    "a wrong shape": (lambda g: change(g, "flat", results=(float_type(BATCH * SEQUENCE, 9),)), "gives"),
    "no results": (lambda g: change(g, "sum", results=()), "results"),
    "no outputs": (lambda g: replace(g, outputs=()), "outputs"),
    "an output of nothing": (lambda g: replace(g, outputs=(Ref("ghost"),)), "output"),
    "too many nodes": (lambda g: replace(g, nodes=g.nodes * 25_001), "nodes"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_graphs_are_refused_in_one_line(name: str) -> None:
    make, message = INVALID[name]
    graph = make(small_graph())
    for refuse in (serialise.validate, serialise.encode):
        with pytest.raises(GraphError, match=message) as error:
            refuse(graph)
        assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_two_nodes_cannot_share_a_cache() -> None:
    x = float_type(BATCH, 2, SEQUENCE, 4)
    nodes = tuple(
        Node(name, "fusion.cached_attention", (Ref("x"), Ref("x"), Ref("x"), slot, None, None), (x,))
        for name, slot in (("a", 0), ("b", 0))
    )
    with pytest.raises(GraphError, match="slot"):
        serialise.validate(Graph((Input("x", x),), (), nodes, (Ref("b"),)))
