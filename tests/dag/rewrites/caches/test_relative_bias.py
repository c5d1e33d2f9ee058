"""A bias by distance from a table is recognised by its values; what only looks like one is refused."""

from __future__ import annotations

import pytest
from support.attention_graphs import SHAPES, S, causal_mask, model, sdpa

from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Ref
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.caches.kv_cache import cache_attention

LONGEST = 40
ROWS = 8


def distance(b):
    """(sequence, sequence): how far each key is before each query, 0 for later ones."""
    p = b("aten.arange", S, None)
    far = b("aten.sub.Tensor", b("aten.unsqueeze", p, 1), b("aten.unsqueeze", p, 0), 1)
    return b("aten.maximum", far, b("aten.sub.Tensor", far, far, 1))


def bucket(b):
    return b("aten.clamp_max", distance(b), 5)


def by_place(b):
    """Another one for each query."""
    p = b("aten.unsqueeze", b("aten.arange", S, None), 1)
    return b("aten.clamp_max", b("aten.mul.Tensor", distance(b), p), 5)


def looked_up(b, index, dims=(2, 0, 1)):
    rows = b("aten.embedding", Ref("rows"), index, -1, False)
    return b("aten.unsqueeze", b("aten.permute", rows, dims), 0)


def graph_with(build, make):
    b = build(**SHAPES, rows=(ROWS, 4))

    def attend(b, q, k, v):
        mask = b("aten.where.ScalarOther", causal_mask(b), make(b), -3.4028234663852886e38)
        return sdpa(b, q, k, v, mask)

    return b.graph(model(b, attend))


def test_buckets_are_those_of_the_distances(build, evaluate):
    cached = cache_attention(graph_with(build, lambda b: looked_up(b, bucket(b))), evaluate, LONGEST)
    validate(cached)
    (node,) = [n for n in cached.nodes if "attention" in n.op]
    assert node.op == "fusion.cached_attention_relative"
    assert node.args[3] == Ref("rows") and node.args[-1] == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda b: looked_up(b, bucket(b), (2, 1, 0)),  # query and key the other way round
        lambda b: looked_up(b, by_place(b)),
        lambda b: b("aten.mul.Tensor", looked_up(b, bucket(b)), 2.0),
    ],
    ids=["turned", "by place", "scaled"],
)
def test_what_only_looks_like_it_is_refused(build, evaluate, make):
    with pytest.raises(UnsupportedModel, match="no KV cache"):
        cache_attention(graph_with(build, make), evaluate, LONGEST)


def test_where_nothing_says_how_long_a_sequence_is_it_is_refused(build, evaluate):
    with pytest.raises(UnsupportedModel):
        cache_attention(graph_with(build, lambda b: looked_up(b, bucket(b))), evaluate)
