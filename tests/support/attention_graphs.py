"""Graphs of small language models around an attention that the test writes."""

from __future__ import annotations

import numpy as np

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import DType, Ref

B, S = symbol("batch"), symbol("sequence")
BOOL, FLOAT = DType("bool"), DType("float32")
HEADS, WIDTH, VOCABULARY = 4, 3, 11
SHAPES = {
    "table": (VOCABULARY, 12), "place": (64, 12), "q": (12, 12), "k": (12, 12), "v": (12, 12),
    "few_k": (6, 12), "few_v": (6, 12), "head": (VOCABULARY, 12),
}  # fmt: skip


def columns_and_rows(b):
    """Positions as (batch, 1, 1, sequence) keys and (batch, 1, sequence, 1) queries."""
    p = b("aten.unsqueeze", Ref("position_ids"), 1)
    return b("aten.unsqueeze", p, 2), b("aten.unsqueeze", p, 3)


def causal_mask(b):
    return b("aten.le.Tensor", *columns_and_rows(b))


def windowed_mask(b, window):
    keys, queries = columns_and_rows(b)
    oldest = b("aten.sub.Tensor", queries, window, 1)
    return b("aten.__and__.Tensor", b("aten.le.Tensor", keys, queries), b("aten.gt.Tensor", keys, oldest))


def model(b, attend, positions="position_ids"):
    """A graph of an embedding, the attention that `attend(b, q, k, v)` builds, a residual connection and a head."""
    x = b("aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    x = b("aten.add.Tensor", x, b("aten.embedding", Ref("place"), Ref(positions), -1, False), 1)
    q, k, v = (heads(b, x, w) for w in "qkv")
    return rest(b, x, attend(b, q, k, v))


def heads(b, x, weight, count=HEADS):
    y = b("aten.view", b("aten.linear", x, Ref(weight), None), (B, S, count, WIDTH))
    return b("aten.transpose.int", y, 1, 2)


def rest(b, x, y):
    y = b("aten.reshape", b("aten.contiguous", b("aten.transpose.int", y, 1, 2)), (B, S, -1))
    return b("aten.linear", b("aten.add.Tensor", x, y, 1), Ref("head"), None)


def additive(make, hidden=-3.4028234663852886e38, shown=0.0):
    return lambda b: b("aten.where.Scalar", make(b), shown, hidden)


def weights(graph, seed=0):
    random = np.random.default_rng(seed)
    return {v.name: random.normal(size=v.type.shape) for v in graph.variables}


def same_in_pieces(graph, cached, execute, length=20, pieces=(7, 1, 1, 4, 7)):
    w, tokens = weights(graph), np.random.default_rng(1).integers(0, VOCABULARY, (1, length))
    whole, cache, at = execute(graph, w, tokens), {}, 0
    for piece in pieces:
        part = execute(cached, w, tokens[:, at : at + piece], at, cache)
        np.testing.assert_allclose(part, whole[:, at : at + piece], rtol=1e-9)
        at += piece
    assert at == length


def embedded(b):
    return b("aten.embedding", Ref("table"), Ref("input_ids"), -1, False)


def sdpa(b, q, k, v, mask=None, is_causal=False, dropout=0.0, scale=None, grouped=False):
    return b("aten.scaled_dot_product_attention", q, k, v, mask, dropout, is_causal, scale, grouped)
