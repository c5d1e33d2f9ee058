"""Eager attention to what a session is given to read: keys and values are made once, and what hides a part of them is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.attention_graphs import FLOAT, HEADS, SHAPES, VOCABULARY, WIDTH, B, S, embedded, rest, weights

from fusion.dag.cutting.cuts import split
from fusion.dag.cutting.source import SOURCE_ATTENTION_SCORED, SOURCE_IDS, halves
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Input, Ref, TensorType
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.caches.kv_cache import cache_attention

N = symbol("source")
LEAST = -3.4028234663852886e38
LONGEST = 64


def heads(b, x, weight, length, count=HEADS):
    y = b("aten.view", b("aten.linear", x, Ref(weight), None), (B, length, count, WIDTH))
    return b("aten.transpose.int", y, 1, 2)


def translated(build, attend):
    """A model of one attention, as `attend(b, q, k, v)` writes it, of the sequence to embedded source tokens."""
    b = build(**SHAPES, sinks=(HEADS,))
    given = Input(SOURCE_IDS, TensorType((B, N), "int64"))
    b.inputs = (*b.inputs, given)
    b.types[Ref(SOURCE_IDS)] = given.type
    read = b("aten.embedding", Ref("table"), Ref(SOURCE_IDS), -1, False)
    x = embedded(b)
    q, k, v = heads(b, x, "q", S), heads(b, read, "k", N), heads(b, read, "v", N)
    return b.graph(rest(b, x, attend(b, q, k, v)))


def scores(b, q, k, scale=0.3):
    return b("aten.mul.Tensor", b("aten.matmul", q, b("aten.transpose.int", k, -1, -2)), scale)


def weighted(b, s, v):
    return b("aten.matmul", b("aten.softmax.int", s, -1, None), v)


def queries(b):
    """(1, 1, sequence, 1)"""
    return b("aten.reshape", b("aten.arange", S, None), (1, 1, S, 1))


def shown(b, least=0):
    """(batch, 1, sequence, source): whether a query is not before the position `least`."""
    return b("aten.expand", b("aten.ge.Scalar", queries(b), least), (B, 1, S, N))


def near(b, reach=5):
    """The first positions of the source."""
    keys = b("aten.reshape", b("aten.arange", N, None), (1, 1, 1, N))
    return b("aten.expand", b("aten.lt.Scalar", keys, reach), (B, 1, S, N))


def plain(b, q, k, v):
    return weighted(b, scores(b, q, k), v)


def masked(b, q, k, v, make=shown):
    mask = b("aten.where.Scalar", make(b), 0.0, LEAST)
    return weighted(b, b("aten.add.Tensor", scores(b, q, k), mask, 1), v)


def filled(b, q, k, v, make=shown):
    hidden = b("aten.logical_not", make(b))
    return weighted(b, b("aten.masked_fill.Scalar", scores(b, q, k), hidden, LEAST), v)


def capped(b, q, k, v):
    s = b("aten.tanh", b("aten.div.Tensor", scores(b, q, k), 2.0))
    return weighted(b, b("aten.mul.Tensor", s, 2.0), v)


def merged(b, q, k, v):
    """With heads as part of the batch."""
    q = b("aten.reshape", b("aten.mul.Tensor", q, 0.3), (B * HEADS, S, WIDTH))
    k, v = (b("aten.reshape", x, (B * HEADS, N, WIDTH)) for x in (k, v))
    s = b("aten.bmm", q, b("aten.transpose.int", k, 1, 2))
    return b("aten.reshape", b("aten.bmm", b("aten.softmax.int", s, 2, FLOAT), v), (B, HEADS, S, WIDTH))


def with_sinks(b, q, k, v):
    sinks = b("aten.expand", b("aten.reshape", Ref("sinks"), (1, -1, 1, 1)), (B, -1, S, -1))
    w = b("aten.softmax.int", b("aten.cat", (scores(b, q, k), sinks), -1), -1, None)
    return b("aten.matmul", b("aten.slice.Tensor", w, 3, 0, -1, 1), v)


def scores_read_twice(b, q, k, v):
    s = scores(b, q, k)
    return weighted(b, b("aten.add.Tensor", s, b("aten.tanh", s), 1), v)


def by_token(b, q, k, v):
    kept = b("aten.to.dtype", b("aten.reshape", Ref(SOURCE_IDS), (B, 1, 1, N)), FLOAT)
    return weighted(b, b("aten.add.Tensor", scores(b, q, k), kept, 1), v)


RECOGNISED = {
    "scores, scale": (plain, (0.3, None)),
    "a mask that hides nothing": (masked, (0.3, None)),
    "filled where nothing is": (filled, (0.3, None)),
    "capped": (capped, (0.3, 2.0)),
    "heads in the batch": (merged, (1.0, None)),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_keys_and_values_are_made_once(name, build, evaluate):
    attend, (scale, cap) = RECOGNISED[name]
    graph = translated(build, attend)
    cached = cache_attention(graph, evaluate, LONGEST, LONGEST)
    validate(cached)
    (node,) = (n for n in cached.nodes if n.op == SOURCE_ATTENTION_SCORED)
    assert np.allclose(node.args[4], scale) and node.args[5] == cap
    [both] = map(halves, split(cached, ()))
    assert all("source" not in str(t) for n in both.decode.graph.nodes for t in n.results)

    w, draw = weights(graph), np.random.default_rng(1)
    known = {SOURCE_IDS: draw.integers(0, VOCABULARY, (2, 9))}
    tokens, positions = draw.integers(0, VOCABULARY, (2, 6)), np.tile(np.arange(6), (2, 1))
    (whole,) = run(evaluate, graph, w, known, tokens, positions)
    for at in range(6):
        part = slice(at, at + 1)
        (found,) = run(evaluate, cached, w, known, tokens[:, part], positions[:, part])
        np.testing.assert_allclose(found, whole[:, part], rtol=1e-9)


def run(evaluate, graph, w, known, tokens, positions):
    sizes = {"batch": 2, "sequence": tokens.shape[1], "source": known[SOURCE_IDS].shape[1]}
    return evaluate(graph, {**w, **known, "input_ids": tokens, "position_ids": positions}, sizes, {})


REFUSED = {
    "a mask over a part of the source": (partial(masked, make=near), "hides a part of the source"),
    "a fill over a part of the source": (partial(filled, make=near), "hides a part of the source"),
    "a mask over some positions": (
        partial(masked, make=partial(shown, least=3)), "hides a part of the source",
    ),
    "sinks": (with_sinks, "sinks beside the source"),
    "scores read twice": (scores_read_twice, "reads the encoder in another way"),
    "a bias by token": (by_token, "reads the encoder in another way"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_see_all_of_the_source_is_refused(name, build, evaluate):
    attend, why = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=why) as refusal:
        cache_attention(translated(build, attend), evaluate, LONGEST, LONGEST)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 200


def test_values_of_the_sequence_beside_keys_of_the_source_are_refused(build, evaluate):
    """What is multiplied with scores for the source has to be made of the source alone."""

    def attend(b, q, k, v):
        first = b("aten.slice.Tensor", q, 2, 0, 1, 1)
        return weighted(b, scores(b, q, k), b("aten.add.Tensor", v, first, 1))

    with pytest.raises(UnsupportedModel, match="no KV cache for this model"):
        cache_attention(translated(build, attend), evaluate, LONGEST, LONGEST)
