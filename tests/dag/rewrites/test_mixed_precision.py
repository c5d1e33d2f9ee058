"""Half precision with float32 weights: which operators compute in what, and that variables and losses stay float32."""

from __future__ import annotations

import pytest

from fusion.dag.cutting.costs import cast_once, node_costs
from fusion.dag.cutting.memory import MemoryConfig, measure_memory
from fusion.dag.ir.graph import DType, Ref
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.mixed_precision import mixed_precision

from .conftest import Builder

SIZES = {"batch": 2, "sequence": 8}


def model():
    """A table, a norm, a product, a power, a residual, a table of rotations that needs no gradient, and a loss."""
    b = Builder(table=(16, 8), norm=(8,), weight=(8, 8), scale=(8,))
    x = b("aten.embedding", Ref("table"), Ref("input_ids"), -1, False, name="x")
    y = b("aten.layer_norm", x, (8,), Ref("norm"), None, 1e-5, name="normed")
    y = b("aten.linear", y, Ref("weight"), None, name="product")
    y = b("aten.add.Tensor", x, y, 1, name="residual")
    places = b("aten.to.dtype", Ref("position_ids"), DType("float32"), name="places")
    turns = b("aten.matmul", b("aten.unsqueeze", places, -1), b("aten.unsqueeze", places, -2), name="turns")
    z = b("aten.mul.Tensor", y, Ref("scale"), name="scaled")
    logits = b("aten.linear", z, Ref("table"), None, name="logits")
    loss = b("aten.cross_entropy_loss", b("aten.reshape", logits, (-1, 16)), b("aten.reshape", Ref("input_ids"), (-1,)), None, 1, -100, 0.0, name="loss")  # fmt: skip
    return b.graph(loss, turns)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_products_are_halved_and_norms_losses_and_what_is_not_learned_are_not(half):
    graph = model()
    mixed = mixed_precision(graph, half)
    validate(mixed)
    assert mixed.variables == graph.variables
    dtypes = {node.name: node.results[0].dtype for node in mixed.nodes}
    assert {name: dtypes[name] for name in ("product", "residual", "logits")} == dict.fromkeys(("product", "residual", "logits"), half)  # fmt: skip
    assert {dtypes[name] for name in ("x", "normed", "turns", "scaled", "loss")} == {"float32"}
    assert [mixed.types[ref].dtype for ref in mixed.outputs] == ["float32", "float32"]
    names = {node.name for node in graph.nodes}
    assert [node.name for node in mixed.nodes if node.name in names] == [node.name for node in graph.nodes]


def test_a_weight_is_cast_for_each_reader_and_counts_once_a_step():
    mixed = mixed_precision(model(), "bfloat16")
    once = cast_once(mixed)
    assert {ref.name for ref in once} == {"weight:bfloat16", "table:bfloat16"}
    costs = dict(zip((node.name for node in mixed.nodes), node_costs(mixed, SIZES), strict=True))
    assert all(costs[ref.name].moved_bytes == 0 for ref in once)
    bounds = (0, len(mixed.nodes))
    full, half = (measure_memory(g, (0, len(g.nodes)), SIZES, True, MemoryConfig()) for g in (model(), mixed))
    assert half.static_bytes[0, 1] == full.static_bytes[0, 1] + 2 * (8 * 8 + 16 * 8)
    assert half.kept_bytes[0, 1] < full.kept_bytes[0, 1] and bounds[1] > len(model().nodes)


@pytest.mark.parametrize(
    ("half", "number"), [("float16", -1e9), ("float16", -(10**9)), ("bfloat16", -3.4028234663852886e38)]
)
def test_what_half_precision_does_not_hold_fills_float32(half, number):
    b = Builder(table=(16, 8), weight=(8, 8))
    x = b("aten.linear", b("aten.embedding", Ref("table"), Ref("input_ids"), -1, False), Ref("weight"), None)
    hidden = b("aten.gt.Scalar", Ref("position_ids"), 3)
    filled = [
        b("aten.masked_fill.Scalar", x, b("aten.unsqueeze", hidden, -1), value, name=name)
        for name, value in (("large", number), ("small", -1e4), ("endless", -float("inf")))
    ]
    mixed = mixed_precision(b.graph(*filled), half)
    validate(mixed)
    dtypes = {node.name: node.results[0].dtype for node in mixed.nodes}
    assert [dtypes[name] for name in ("large", "small", "endless")] == ["float32", half, half]
