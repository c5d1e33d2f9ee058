"""Positions that a model counts itself come from the input; what only looks like it stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
from support.attention_graphs import model, sdpa, weights

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import DType, Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.caches.kv_cache import cache_attention
from fusion.dag.rewrites.caches.own_positions import use_position_ids
from fusion.runtime.capture.serving_graph import evaluate as computed

B, S = symbol("batch"), symbol("sequence")


def counted(b):
    return b("aten.arange", S, None)


def beginning(b):
    """As BERT does: of a longer row that the model keeps."""
    return b("aten.slice.Tensor", b("aten.arange", 256, None), 0, 0, S, 1)


def beginning_later(b):
    """Where it begins depends on the length."""
    return b("aten.slice.Tensor", b("aten.arange", 256, None), 0, S, S + S, 1)


def counted_from_two(b):
    return b("aten.add.Tensor", counted(b), 2, 1)


def summed(b):
    """As OPT does: a running sum of an attention mask of ones, for each row."""
    ones = b("aten.ones", (B, S), DType("int64"))
    return b("aten.sub.Tensor", b("aten.mul.Tensor", b("aten.cumsum", ones, 1, None), ones), 1, 1)


def doubled(b):
    return b("aten.mul.Tensor", counted(b), 2)


def squared(b):
    return b("aten.mul.Tensor", counted(b), counted(b))


def backwards(b):
    """From the end: another position when more follow."""
    return b("aten.sub.Tensor", b("aten.full", (S,), S, DType("int64")), counted(b), 1)


def capped(b):
    return b("aten.clamp_max", counted(b), 4)


def built(build, count):
    b = build(**SHAPES)
    positions = count(b)
    return b.graph(model(b, lambda b, q, k, v: sdpa(b, q, k, v, is_causal=True), positions.name))


SHAPES = {
    "table": (11, 12), "place": (256, 12), "q": (12, 12), "k": (12, 12), "v": (12, 12), "head": (11, 12),
}  # fmt: skip


@pytest.mark.parametrize("count", [counted, beginning, counted_from_two, summed, doubled, capped])
def test_a_sequence_in_pieces_is_as_the_whole(build, execute, evaluate, count):
    graph = built(build, count)
    cached = cache_attention(graph, evaluate)
    validate(cached)
    assert not any(n.op in ("aten.arange", "aten.cumsum") for n in cached.nodes)
    values = weights(graph)
    tokens = np.random.default_rng(1).integers(0, 11, (2, 9))
    whole = execute(graph, values, tokens)
    cache = {}
    pieces = [execute(cached, values, tokens[:, a:b], a, cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, atol=1e-9)


@pytest.mark.parametrize("count", [squared, backwards, beginning_later])
def test_what_is_no_count_of_positions_stays_and_is_refused(build, evaluate, count):
    graph = built(build, count)
    assert use_position_ids(graph, evaluate) == graph
    with pytest.raises(UnsupportedModel, match=r"depends on the length|makes positions"):
        cache_attention(graph, evaluate)


ROW, SEEN = TensorType((B, S), "int64"), TensorType((B, S), "bool")


def decoder(mask="seen", others=(), symbols=("batch", "sequence", "source")):
    """Counts its tokens that are not 1, and has 0 for those that `mask` leaves out."""
    nodes = (
        Node("ne", "aten.ne.Scalar", (Ref("input_ids"), 1), (SEEN,)),
        Node("seen", "aten.to.dtype", (Ref("ne"), DType("int64")), (ROW,)),
        Node("other", "aten.ne.Scalar", (Ref("input_ids"), 2), (SEEN,)),
        Node("count", "aten.cumsum", (Ref("seen"), 1, None), (ROW,)),
        Node("placed", "aten.mul.Tensor", (Ref("count"), Ref(mask)), (ROW,)),
    )
    inputs = (Input("input_ids", ROW), Input("position_ids", ROW))
    return Graph(inputs, (), nodes, (Ref("placed"), *map(Ref, others)), symbols)


def test_a_decoder_that_counts_tokens_is_given_their_positions(evaluate):
    given = use_position_ids(decoder(), evaluate)
    inputs = {"input_ids": np.array([[5, 1, 7]]), "position_ids": np.array([[4, 5, 6]])}
    (placed,) = computed(given, inputs, {"batch": 1, "sequence": 3})
    assert placed.tolist() == [[5, 0, 7]]  # the padding is none of them, and what follows is where it is


@pytest.mark.parametrize(
    "graph", [decoder(mask="other"), decoder(others=["count"]), decoder(symbols=("batch", "sequence"))]
)
def test_what_counts_other_tokens_or_for_others_stays(evaluate, graph):
    assert use_position_ids(graph, evaluate) == graph
