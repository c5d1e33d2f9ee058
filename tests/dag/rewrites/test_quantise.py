"""Large matrices of products and look-ups are stored quantised; what only looks alike stays as it is."""

from __future__ import annotations

import pytest

from fusion.dag.cutting.costs import node_costs
from fusion.dag.cutting.memory import MemoryConfig, measure_memory
from fusion.dag.ir.graph import DType, Ref
from fusion.dag.ir.opset import needed_version
from fusion.dag.ir.serialise import decode, encode, validate
from fusion.dag.rewrites.end_to_end import end_to_end
from fusion.dag.rewrites.quantise import Layout, quantise, store_matrices

IDS, POSITIONS, TABLE, UP, HEAD = (Ref(n) for n in ("input_ids", "position_ids", "table", "up", "head"))
WIDE, ROWS = 128, 96
SIZES = {"batch": 1, "sequence": 1}


def model(build, **more):
    """input_ids -> table -> up -> head, each large enough; `more` variables beside them."""
    b = build(**{"table": (ROWS, WIDE), "up": (WIDE, WIDE), "head": (ROWS, WIDE), "bias": (WIDE,), **more})
    x = b("aten.embedding", TABLE, IDS, -1, False, name="x")
    y = b("aten.linear", x, UP, Ref("bias"), name="y")
    return b, x, y


def plain(b, y):
    return b.graph(b("aten.linear", y, HEAD, None, name="logits"))


def ops(graph):
    return {node.name: node.op for node in graph.nodes}


def test_int8_takes_products_and_tables(build):
    b, _, y = model(build)
    found = quantise(plain(b, y), "int8")
    validate(found.graph)
    assert decode(encode(found.graph)) == found.graph and needed_version(found.graph) == 2
    assert ops(found.graph) == {
        "x": "fusion.embedding_int8",
        "y": "fusion.linear_int8",
        "logits": "fusion.linear_int8",
    }
    types = {v.name: str(v.type) for v in found.graph.variables}
    assert types["up:int8"] == "int8[128, 128]" and types["up:scales"] == "float16[128, 4]"
    assert types["bias"] == "float32[128]" and "up" not in types and len(types) == 7
    assert [source.variable.name for source in found.sources] == ["table", "up", "head"]
    assert end_to_end(found.graph) is not None
    assert quantise(found.graph, "int8").sources == ()


def test_int4_keeps_tables_and_the_head_in_int8(build):
    b, _, y = model(build)
    found = quantise(plain(b, y), "int4").graph
    validate(found)
    assert ops(found) == {
        "x": "fusion.embedding_int8",
        "y": "fusion.linear_int4",
        "logits": "fusion.linear_int8",
    }
    types = {v.name: str(v.type) for v in found.variables}
    assert types["up:int4"] == "uint8[128, 64]" and types["up:minimums"] == "float16[128, 4]"


def test_costs_and_memory_count_what_is_stored(build):
    b, _, y = model(build)
    graph = plain(b, y)
    stored = {kind: quantise(graph, kind).graph for kind in ("int8", "int4")}
    before = {n.name: c for n, c in zip(graph.nodes, node_costs(graph, SIZES), strict=True)}["y"]
    for kind, bits in (("int8", 8.5), ("int4", 5.0)):
        costs = {n.name: c for n, c in zip(stored[kind].nodes, node_costs(stored[kind], SIZES), strict=True)}
        matrix = WIDE * WIDE * bits / 8
        assert costs["y"].family == "contraction"
        assert costs["y"].moved_bytes == matrix + 3 * 4 * WIDE
        assert costs["y"].forward_flops == before.forward_flops
        assert costs["x"].moved_bytes == 2 * 4 * WIDE
    static = {
        kind: measure_memory(g, (0, 3), SIZES, False, MemoryConfig()).static_bytes[0, 1]
        for kind, g in {"float": graph, **stored}.items()
    }
    tables, matrix = 2 * ROWS * WIDE, WIDE * WIDE
    assert static["float"] == 4 * (tables + matrix + WIDE)
    assert static["int8"] == (tables + matrix) * 8.5 / 8 + 4 * WIDE
    assert static["int4"] == tables * 8.5 / 8 + matrix * 5 / 8 + 4 * WIDE


def test_a_tied_head_is_one_tensor(build):
    b, _, y = model(build)
    found = quantise(b.graph(b("aten.linear", y, TABLE, None, name="logits")), "int4").graph
    nodes = {n.name: n for n in found.nodes}
    assert nodes["x"].args[0] == nodes["logits"].args[1] == Ref("table:int8")


def test_addmm_is_turned_round(build):
    b, _, y = model(build, conv=(WIDE, 64), added=(64,), row=(1, 64))
    flat = b("aten.reshape", y, (-1, WIDE))
    b("aten.addmm", Ref("added"), flat, Ref("conv"), 1, 1, name="z")
    found = quantise(b.graph(Ref("z")), "int8")
    validate(found.graph)
    (node,) = [n for n in found.graph.nodes if n.name == "z"]
    assert node.op == "fusion.linear_int8" and node.args == (
        flat, Ref("conv:int8"), Ref("conv:scales"), None, Ref("added"),
    )  # fmt: skip
    (source,) = [s for s in found.sources if s.variable.name == "conv"]
    assert source.transposed and source.shape == (64, WIDE)


LOOKS_ALIKE = {
    "read as numbers too": lambda b, y: b("aten.linear", b("aten.mul.Tensor", y, b("aten.sum", Ref("w"), None)), Ref("w"), None),
    "scaled product": lambda b, y: b("aten.addmm", Ref("added"), b("aten.reshape", y, (-1, WIDE)), Ref("w"), 1, 0.5),
    "a bias of rows": lambda b, y: b("aten.addmm", Ref("rows"), b("aten.reshape", y, (-1, WIDE)), Ref("w"), 1, 1),
    "both ways round": lambda b, y: b("aten.addmm", Ref("added"), b("aten.reshape", b("aten.linear", y, Ref("w"), None), (-1, WIDE)), Ref("w"), 1, 1),
    "not a variable": lambda b, y: b("aten.linear", y, b("aten.neg", Ref("w")), None),
    "its own input": lambda b, y: b("aten.linear", Ref("w"), Ref("w"), None),
    "an output": lambda b, y: (b("aten.linear", y, Ref("w"), None), Ref("w"))[1],
    "too small": lambda b, y: b("aten.linear", y, Ref("small"), None),
    "groups that do not divide": lambda b, y: b("aten.linear", b("aten.slice.Tensor", y, 2, 0, 120, 1), Ref("odd"), None),
    "three dimensions": lambda b, y: b("aten.matmul", y, Ref("cube")),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS_ALIKE)
def test_what_only_looks_alike_stays(build, name):
    more = {"w": (WIDE, WIDE), "added": (WIDE,), "rows": (1, WIDE), "small": (16, WIDE), "odd": (WIDE, 120)}
    b, _, y = model(build, **more, cube=(1, WIDE, WIDE))
    z = LOOKS_ALIKE[name](b, y)
    if b.types[z].shape == ():
        z = b("aten.neg", z)
    graph = b.graph(z, y)
    found = quantise(graph, "int8").graph
    validate(found)
    kept = {v.name for v in graph.variables} - {"table", "up"}
    assert kept <= {v.name for v in found.variables}
    assert {n.op for n in found.nodes if n.name not in ("x", "y")} <= {n.op for n in graph.nodes}


def by_softmax(b, y):
    return b("aten.softmax.int", b("aten.reshape", y, (-1, ROWS)), -1, None)


def in_groups(b, y):
    y = b("aten.add.Tensor", b("aten.sigmoid", y), Ref("shift"), 1)
    return b("aten.view", b("aten.to.dtype", y, DType("float64")), (-1, 8, 12))


@pytest.mark.parametrize("scored", [lambda b, y: y, by_softmax, in_groups])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_matrix_that_experts_are_chosen_by_stays(build, kind, scored):
    b, _, y = model(build, router=(ROWS, WIDE), shift=(ROWS,))
    chosen = b("aten.topk", scored(b, b("aten.linear", y, Ref("router"), None)), 2, -1, True, True)
    logits = b("aten.linear", y, HEAD, None, name="logits")
    found = quantise(b.graph(logits, Ref(chosen.name, 1)), kind)
    validate(found.graph)
    assert [source.variable.name for source in found.sources] == ["table", "up", "head"]


def test_a_matrix_whose_largest_numbers_alone_are_read_is_stored(build):
    b, _, y = model(build, more=(ROWS, WIDE))
    largest = b("aten.max.dim", b("aten.linear", y, Ref("more"), None), -1, True)
    found = quantise(b.graph(b("aten.linear", y, HEAD, None), largest), "int8")
    assert [source.variable.name for source in found.sources] == ["table", "up", "head", "more"]


def test_names_that_are_taken_or_too_long_stay(build):
    long = "l" * 250
    b, _, y = model(build, **{"up:scales": (3,), long: (WIDE, WIDE)})
    z = b("aten.linear", y, Ref(long), None)
    found = quantise(b.graph(b("aten.linear", z, HEAD, None)), "int8")
    validate(found.graph)
    assert {source.variable.name for source in found.sources} == {"table", "head"}


def test_matrices_are_stored_as_somebody_chooses(build):
    b, _, y = model(build)
    layouts = {"up": Layout("int4", group=16, scales="float32"), "head": Layout("int8", minimums=True)}
    found = store_matrices(plain(b, y), lambda variable, uses: layouts.get(variable.name))
    validate(found.graph)
    types = {v.name: str(v.type) for v in found.graph.variables}
    assert types["up:int4"] == "uint8[128, 64]" and types["up:scales"] == "float32[128, 8]"
    assert types["head:minimums"] == "float16[96, 4]" and "up:minimums" not in types
    assert types["table"] == "float32[96, 128]"
