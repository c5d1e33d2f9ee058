"""Experts as they are exported become one op a product, and may be cut apart; what only looks alike stays, or is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Ref
from fusion.dag.ir.opset import needed_version
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.clean import clean
from fusion.dag.rewrites.end_to_end import end_to_end
from fusion.dag.rewrites.expert_groups import Part, group_experts, part_of
from fusion.dag.rewrites.experts import EXPERT_LINEAR, name_experts, require_named_experts
from fusion.dag.rewrites.positions import require_separate_positions
from fusion.dag.rewrites.quantise import quantise

B, S = symbol("batch"), symbol("sequence")
EXPERTS, CHOSEN, HIDDEN, INNER, VOCABULARY = 5, 2, 6, 4, 11
SHAPES = {
    "table": (VOCABULARY, HIDDEN), "router": (EXPERTS, HIDDEN), "head": (VOCABULARY, HIDDEN),
    "up": (EXPERTS, 2 * INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER),
    "up_t": (EXPERTS, HIDDEN, 2 * INNER), "down_t": (EXPERTS, INNER, HIDDEN),
    "up_bias": (EXPERTS, 2 * INNER), "down_bias": (EXPERTS, HIDDEN),
}  # fmt: skip


def product(b, rows, ids, weight, bias, transposed):
    matrix = b("aten.index.Tensor", Ref(weight), (ids,))
    if transposed:
        y = b("aten.bmm", b("aten.unsqueeze", rows, 1), matrix)
    else:
        y = b("aten.bmm", matrix, b("aten.unsqueeze", rows, -1))
    y = b("aten.squeeze.dim", y, 1 if transposed else -1)
    return y if bias is None else b("aten.add.Tensor", y, b("aten.index.Tensor", Ref(bias), (ids,)), 1)


def gate(b, y):
    halves = b("aten.chunk", y, 2, -1)
    return b("aten.mul.Tensor", b("aten.tanh", halves), Ref(halves.name, 1))


def layer(b, *, transposed=False, biased=False, between=gate, after=lambda b, y: y, hidden=HIDDEN):
    """Embedding, a layer of experts as transformers' batched_mm writes it, a residual, a head."""
    x = b("aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    flat = b("aten.reshape", x, (-1, hidden))
    scores = b("aten.topk", b("aten.linear", flat, Ref("router"), None), CHOSEN, -1, True, True)
    rows = b("aten.repeat_interleave.self_int", flat, CHOSEN, 0)
    ids = b("aten.reshape", Ref(scores.name, 1), (-1,))
    end = "_t" if transposed else ""
    y = product(b, rows, ids, f"up{end}", "up_bias" if biased else None, transposed)
    y = product(b, between(b, y), ids, f"down{end}", "down_bias" if biased else None, transposed)
    y = b("aten.mul.Tensor", after(b, y), b("aten.unsqueeze", b("aten.reshape", scores, (-1,)), -1))
    y = b("aten.sum.dim_IntList", b("aten.reshape", y, (-1, CHOSEN, hidden)), (1,), False, None)
    y = b("aten.add.Tensor", x, b("aten.reshape", y, (B, S, hidden)), 1)
    return clean(b.graph(b("aten.linear", y, Ref("head"), None)))


def weights(graph):
    made = np.random.default_rng(0)
    values = {name: made.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    parts = {v.name: part for v in graph.variables if (part := part_of(v.name)) is not None}
    return {**values, **{n: values[p.name][p.start : p.stop] for n, p in parts.items()}}


TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (2, 7))


def products(graph):
    return [node for node in graph.nodes if node.op == EXPERT_LINEAR]


@pytest.mark.parametrize(("transposed", "biased"), [(False, False), (True, True), (False, True)])
def test_the_exported_form_becomes_one_op_a_product(build, execute, transposed, biased):
    graph = layer(build(**SHAPES), transposed=transposed, biased=biased)
    with pytest.raises(UnsupportedModel, match="copied for each position"):
        require_named_experts(graph)
    named = name_experts(graph)
    validate(named)
    require_named_experts(named)
    assert len(products(named)) == 2
    assert not {"aten.bmm", "aten.index.Tensor"} & {node.op for node in named.nodes}
    assert needed_version(named) == 2
    np.testing.assert_allclose(
        execute(named, weights(named), TOKENS), execute(graph, weights(graph), TOKENS), atol=1e-5
    )
    require_separate_positions(named)
    assert end_to_end(named) is not None


def other_ids(b, y):
    """A second look-up, by ids that are not the first one's."""
    ids = b("aten.reshape", Ref("input_ids"), (-1,))
    ids = b("aten.repeat_interleave.self_int", ids, CHOSEN, 0)
    return b("aten.add.Tensor", y, b("aten.index.Tensor", Ref("table"), (ids,)), 1)


def test_a_bias_by_other_ids_is_not_the_product_s(build, execute):
    graph = layer(build(**SHAPES), after=other_ids)
    named = name_experts(graph)
    assert [node.args[3] for node in products(named)] == [None, None]
    assert "aten.index.Tensor" in {node.op for node in named.nodes}
    np.testing.assert_allclose(
        execute(named, weights(named), TOKENS), execute(graph, weights(graph), TOKENS), atol=1e-5
    )


@pytest.mark.parametrize("groups", [2, 3, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_in_groups_add_up_to_the_layer(build, execute, groups, biased):
    whole = name_experts(layer(build(**SHAPES), transposed=biased, biased=biased))
    grouped = group_experts(whole, groups)
    validate(grouped)
    count = min(groups, EXPERTS)
    assert len(products(grouped)) == 2 * count
    ups = [part_of(v.name) for v in grouped.variables if v.name.startswith("up_t:" if biased else "up:")]
    assert [p.start for p in ups] == [0, *(p.stop for p in ups[:-1])]
    assert ups[-1].stop == EXPERTS and len(ups) == count
    np.testing.assert_allclose(
        execute(grouped, weights(grouped), TOKENS), execute(whole, weights(whole), TOKENS), atol=1e-5
    )
    require_separate_positions(grouped)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("biased", [False, True])
def test_quantised_experts_go_in_groups_as_others_do(build, kind, biased):
    """Of 32 columns, and so large that they are worth it."""
    turned = "_t" if biased else ""
    wide = {
        **SHAPES, "table": (VOCABULARY, 64), "router": (EXPERTS, 64), "head": (VOCABULARY, 64),
        f"up{turned}": (EXPERTS, 64, 64), f"down{turned}": (EXPERTS, 32, 64) if biased else (EXPERTS, 64, 32),
        "up_bias": (EXPERTS, 64), "down_bias": (EXPERTS, 64),
    }  # fmt: skip
    graph = name_experts(layer(build(**wide), transposed=biased, biased=biased, hidden=64))
    found = quantise(graph, kind)
    validate(found.graph)
    linear = f"{EXPERT_LINEAR}_{kind}"
    assert [n.op for n in found.graph.nodes].count(linear) == 2 and not products(found.graph)
    shapes = {source.variable.name: source.shape for source in found.sources}
    assert shapes[f"up{turned}"] == (EXPERTS, 64, 64) and shapes[f"down{turned}"] == (EXPERTS, 64, 32)
    assert {source.transposed for source in found.sources} == {biased}
    require_separate_positions(found.graph)
    assert end_to_end(found.graph) is not None
    grouped = group_experts(found.graph, 2)
    validate(grouped)
    in_groups = [node for node in grouped.nodes if node.op == linear]
    assert [(node.args[6], node.args[7]) for node in in_groups] == [(0, 5), (0, 5), (2, 5), (2, 5)]
    parts = {str(p) for v in grouped.variables if (p := part_of(v.name)) is not None}
    stored = [f"up{turned}:{kind}", f"up{turned}:scales", *(["up_bias"] if biased else [])]
    stored += [f"up{turned}:minimums"] if kind == "int4" else []
    assert {f"{name}:{span}" for name in stored for span in ("0-2", "2-5")} <= parts
    require_separate_positions(grouped)


def test_one_row_a_position_crosses_between_groups(build):
    grouped = group_experts(name_experts(layer(build(**SHAPES))), 2)
    second = products(grouped)[2]
    before = grouped.node_index[second.args[0].name]  # the rows are repeated in each group
    assert before in legal_cuts(grouped)
    first, last = split(grouped, [before])
    assert [v.name for v in last.graph.variables if ":" in v.name] == ["up:2-5", "down:2-5"]
    crossing = {str(edge.type) for edge in first.sends}
    assert crossing == {
        "float32[batch, sequence, 6]",  # the residual
        "float32[batch*sequence, 6]",  # the layer's input, and the first group's sum
        "int64[2*batch*sequence]",
        "float32[2*batch*sequence, 1]",
    }
    assert end_to_end(last.graph) is not None


def across_rows(b, y):
    return gate(b, b("aten.softmax.int", y, 0, None))


def test_a_layer_that_looks_across_rows_stays_whole(build):
    graph = name_experts(layer(build(**SHAPES), between=across_rows))
    assert len(products(graph)) == 2
    assert group_experts(graph, 2) == graph


def test_a_layer_whose_weights_something_else_reads_stays_whole(build):
    def also(b, y):
        scale = b("aten.sum.dim_IntList", Ref("down"), (0, 2), False, None)
        return b("aten.mul.Tensor", y, scale)

    graph = name_experts(layer(build(**SHAPES), after=also))
    assert len(products(graph)) == 2
    assert group_experts(graph, 2) == graph


def test_parts_are_named_so_that_they_can_be_found():
    assert part_of(str(Part("model.experts.up", 3, 5))) == Part("model.experts.up", 3, 5)
    assert part_of("constant:table") is None and part_of("model.experts.up") is None
