"""Attention that a model writes out gets a cache, whatever it is written with, and what only looks like one gets none."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.attention_graphs import (
    FLOAT,
    HEADS,
    SHAPES,
    WIDTH,
    B,
    S,
    additive,
    causal_mask,
    columns_and_rows,
    embedded,
    heads,
    model,
    rest,
    same_in_pieces,
    windowed_mask,
)

from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import DType, Ref
from fusion.dag.ir.opset import spec
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.caches.kv_cache import cache_attention

LEAST = -3.4028234663852886e38
LONGEST = 64
SLOPES = (0.5, 0.25, 0.125, 0.0625)
SCORED = "fusion.cached_attention_scored"


def scores(b, q, k):
    return b("aten.matmul", q, b("aten.transpose.int", k, -1, -2))


def weighted(b, s, v):
    return b("aten.matmul", b("aten.softmax.int", s, -1, None), v)


def masked(b, s, make=causal_mask):
    return b("aten.add.Tensor", s, additive(make)(b), 1)


def eager(b, q, k, v, make=causal_mask):
    return weighted(b, masked(b, b("aten.mul.Tensor", scores(b, q, k), 0.3), make), v)


def scaled_before(b, q, k, v):
    return weighted(b, masked(b, scores(b, b("aten.mul.Tensor", q, 0.3), k)), v)


def filled(b, q, k, v):
    """With the mask the other way round, and a floor under the scores."""
    hidden = b("aten.logical_not", causal_mask(b))
    s = b("aten.masked_fill.Scalar", b("aten.div.Tensor", scores(b, q, k), 2.0), hidden, LEAST)
    return weighted(b, b("aten.maximum", s, b("aten.full", (), LEAST, FLOAT)), v)


def padded(b, q, k, v, least=0):
    """FSMT's: what hides padding, of which there is none, or the keys before `least`."""
    keys = b("aten.reshape", b("aten.arange", S, None), (1, 1, 1, S))
    s = masked(b, b("aten.mul.Tensor", scores(b, q, k), 0.3))
    return weighted(b, b("aten.masked_fill.Scalar", s, b("aten.lt.Scalar", keys, least), LEAST), v)


def masked_twice(b, q, k, v):
    s = b("aten.where.ScalarOther", windowed_mask(b, 5), scores(b, q, k), LEAST)
    return weighted(b, masked(b, s), v)


def capped(b, q, k, v, cap=2.0, within=2.0):
    s = b("aten.div.Tensor", b("aten.mul.Tensor", scores(b, q, k), 0.4), within)
    return weighted(b, masked(b, b("aten.mul.Tensor", b("aten.tanh", s), cap)), v)


def slopes(b):
    ones = (b("aten.full", (1,), slope, FLOAT) for slope in SLOPES)
    return b("aten.reshape", b("aten.cat", tuple(ones), 0), (1, HEADS, 1, 1))


def for_each_key(b):
    return b("aten.mul.Tensor", b("aten.to.dtype", columns_and_rows(b)[0], FLOAT), slopes(b))


def by_key(b, q, k, v):
    """Bloom's ALiBi: the place of the key alone."""
    return weighted(b, masked(b, b("aten.add.Tensor", scores(b, q, k), for_each_key(b), 1)), v)


def by_distance(b, q, k, v, power=1):
    keys, queries = columns_and_rows(b)
    distance = b("aten.to.dtype", b("aten.sub.Tensor", keys, queries, 1), FLOAT)
    distance = b("aten.pow.Tensor_Scalar", distance, power) if power > 1 else distance
    bias = b("aten.mul.Tensor", distance, slopes(b))
    s = b("aten.add.Tensor", b("aten.mul.Tensor", scores(b, q, k), 0.5), bias, 1)
    return weighted(b, masked(b, s), v)


def from_the_end(b, q, k, v):
    """MPT's: the last positions of a table."""
    place = b("aten.reshape", b("aten.arange.start", 1 - LONGEST, 1, FLOAT), (1, 1, 1, LONGEST))
    table = b("aten.mul.Tensor", place, slopes(b))
    bias = b("aten.slice.Tensor", table, 3, LONGEST - S, None, 1)
    return weighted(b, masked(b, b("aten.add.Tensor", scores(b, q, k), bias, 1)), v)


def merged(b, q, k, v):
    """With heads as part of the batch."""
    q, k, v = (b("aten.reshape", x, (B * HEADS, S, WIDTH)) for x in (q, k, v))
    bias = b("aten.reshape", b("aten.expand", for_each_key(b), (B, HEADS, 1, S)), (B * HEADS, 1, S))
    s = b("aten.baddbmm", bias, q, b("aten.transpose.int", k, 1, 2), 1.0, 0.5)
    s = masked(b, b("aten.reshape", s, (B, HEADS, S, S)))
    w = b("aten.reshape", b("aten.softmax.int", s, 3, FLOAT), (B * HEADS, S, S))
    return b("aten.reshape", b("aten.bmm", w, v), (B, HEADS, S, WIDTH))


def fused_with_bias(b, q, k, v):
    """Falcon's: what hides positions is put into the bias."""
    hidden = b("aten.logical_not", causal_mask(b))
    bias = b("aten.masked_fill.Scalar", for_each_key(b), hidden, LEAST)
    return b("aten.scaled_dot_product_attention", q, k, v, bias, 0.0, False, None, False)


def with_sinks(b, q, k, v):
    """GPT-OSS's: one key more, without a value."""
    sinks = b("aten.expand", b("aten.reshape", Ref("sinks"), (1, -1, 1, 1)), (B, -1, S, -1))
    s = b("aten.cat", (masked(b, scores(b, q, k)), sinks), -1)
    s = b("aten.sub.Tensor", s, b("aten.amax", s, (-1,), True), 1)
    w = b("aten.slice.Tensor", b("aten.softmax.int", s, -1, None), 3, 0, -1, 1)
    return b("aten.matmul", w, v)


def without_largest(b, q, k, v):
    """MiMo's: a softmax does not see what is taken from a whole row."""
    s = masked(b, b("aten.mul.Tensor", scores(b, q, k), 0.3))
    return weighted(b, b("aten.sub.Tensor", s, b("aten.amax", s, (-1,), True), 1), v)


def sinks_as_a_factor(b, q, k, v, *, of=None, times=None):
    """Granite's: the share of the weights that one key more would have left to the others."""
    s = masked(b, b("aten.mul.Tensor", scores(b, q, k), 0.3))
    total = b("aten.logsumexp", s if of is None else of(b, s), (-1,), False)
    less = b("aten.sub.Tensor", total, b("aten.reshape", Ref("sinks"), (1, HEADS, 1)), 1)
    share = b("aten.unsqueeze", b("aten.sigmoid", less), -1)
    share = share if times is None else b("aten.mul.Tensor", share, times)
    return b("aten.mul.Tensor", weighted(b, s, v), share)


RECOGNISED = {
    "the largest taken": (without_largest, {"scale": 0.3}),
    "sinks as a factor": (sinks_as_a_factor, {"scale": 0.3, "sinks": Ref("sinks")}),
    "scores, scale, mask": (eager, {"scale": 0.3}),
    "a window": (partial(eager, make=partial(windowed_mask, window=5)), {"window": 5}),
    "scaled before": (scaled_before, {"scale": 1.0}),
    "filled": (filled, {"scale": 0.5}),
    "masked twice": (masked_twice, {"window": 5}),
    "a mask that hides nothing": (padded, {"scale": 0.3, "window": None}),
    "capped": (capped, {"softcap": 2.0, "scale": 0.4, "slopes": None}),
    "capped higher than it is divided": (partial(capped, cap=3.0), {"softcap": 3.0}),
    "a bias by key": (by_key, {"slopes": None}),
    "a bias by distance": (by_distance, {"slopes": SLOPES, "bias": None}),
    "a bias from a table": (from_the_end, {"slopes": SLOPES, "bias": None}),
    "heads in the batch": (merged, {"scale": 0.5}),
    "fused": (fused_with_bias, {"scale": WIDTH**-0.5}),
    "sinks": (with_sinks, {"sinks": Ref("sinks")}),
}


def arguments(node):
    return dict(zip((p.name for p in spec(node.op).parameters), node.args, strict=True))


@pytest.mark.parametrize("name", RECOGNISED)
def test_what_is_recognised_gives_the_same_in_pieces(name, build, evaluate, execute):
    attend, wanted = RECOGNISED[name]
    b = build(**SHAPES, sinks=(HEADS,))
    graph = b.graph(model(b, attend))
    cached = cache_attention(graph, evaluate, LONGEST)
    validate(cached)
    (node,) = (n for n in cached.nodes if n.op == SCORED)
    found = arguments(node)
    for key, value in wanted.items():
        if isinstance(value, (float, tuple)):
            assert np.allclose(found[key], value)
        else:
            assert found[key] == value
    assert not any(len([d for d in t.shape if d == S]) > 1 for t in cached.types.values())
    same_in_pieces(graph, cached, execute)


def test_grouped_heads_are_cached_before_they_are_repeated(build, evaluate, execute):
    b = build(**SHAPES)
    x = embedded(b)
    shape = (B, 2, 2, S, WIDTH)

    def repeated(y):
        wide = b("aten.expand", b("aten.unsqueeze", y, 2), shape)
        return b("aten.reshape", wide, (B, HEADS, S, WIDTH))

    q, k, v = heads(b, x, "q"), repeated(heads(b, x, "few_k", 2)), repeated(heads(b, x, "few_v", 2))
    graph = b.graph(rest(b, x, capped(b, q, k, v)))
    cached = cache_attention(graph, evaluate, LONGEST)
    (node,) = (n for n in cached.nodes if n.op == SCORED)
    assert [cached.types[r].shape[1] for r in node.args[:3]] == [HEADS, 2, 2]
    same_in_pieces(graph, cached, execute)


def other_axis(b, q, k, v):
    return b("aten.matmul", b("aten.softmax.int", masked(b, scores(b, q, k)), -2, None), v)


def read_twice(b, q, k, v):
    s = masked(b, scores(b, q, k))
    return weighted(b, b("aten.add.Tensor", s, b("aten.tanh", s), 1), v)


def weights_read_twice(b, q, k, v):
    w = b("aten.softmax.int", masked(b, scores(b, q, k)), -1, None)
    return b("aten.matmul", b("aten.mul.Tensor", w, w), v)


def mask_scaled(b, q, k, v):
    """What is hidden would be capped: it is not hidden after that."""
    s = b("aten.tanh", b("aten.div.Tensor", masked(b, scores(b, q, k)), 2.0))
    return weighted(b, b("aten.mul.Tensor", s, 2.0), v)


def almost_causal(b):
    """All before it, but for the very first position from the 30th on."""
    keys, queries = columns_and_rows(b)
    first = b("aten.lt.Scalar", keys, 1)
    late = b("aten.gt.Scalar", queries, 30)
    kept = b("aten.logical_not", b("aten.__and__.Tensor", first, late))
    return b("aten.__and__.Tensor", causal_mask(b), kept)


def staircase(b, q, k, v):
    """A slope up to a distance, and none beyond."""
    keys, queries = columns_and_rows(b)
    distance = b("aten.clamp_max", b("aten.sub.Tensor", queries, keys, 1), 20)
    bias = b("aten.mul.Tensor", b("aten.to.dtype", distance, FLOAT), slopes(b))
    return weighted(b, masked(b, b("aten.add.Tensor", scores(b, q, k), bias, 1)), v)


def by_token(b, q, k, v):
    kept = b("aten.unsqueeze", b("aten.unsqueeze", Ref("input_ids"), 1), 2)
    s = b("aten.add.Tensor", scores(b, q, k), b("aten.to.dtype", kept, FLOAT), 1)
    return weighted(b, masked(b, s), v)


def learned(b, q, k, v):
    bias = b("aten.reshape", Ref("sinks"), (1, HEADS, 1, 1))
    return weighted(b, masked(b, b("aten.add.Tensor", scores(b, q, k), bias, 1)), v)


def first_dropped(b, q, k, v):
    """The one more key comes first, and so does what is dropped."""
    sinks = b("aten.expand", b("aten.reshape", Ref("sinks"), (1, -1, 1, 1)), (B, -1, S, -1))
    w = b("aten.softmax.int", b("aten.cat", (sinks, masked(b, scores(b, q, k))), -1), -1, None)
    return b("aten.matmul", b("aten.slice.Tensor", w, 3, 1, None, 1), v)


def sinks_and_slopes(b, q, k, v):
    """What a softmax does not see of slopes, sinks would."""
    keys, queries = columns_and_rows(b)
    distance = b("aten.to.dtype", b("aten.sub.Tensor", keys, queries, 1), FLOAT)
    s = b("aten.add.Tensor", scores(b, q, k), b("aten.mul.Tensor", distance, slopes(b)), 1)
    sinks = b("aten.expand", b("aten.reshape", Ref("sinks"), (1, -1, 1, 1)), (B, -1, S, -1))
    w = b("aten.softmax.int", b("aten.cat", (masked(b, s), sinks), -1), -1, None)
    return b("aten.matmul", b("aten.slice.Tensor", w, 3, 0, -1, 1), v)


REFUSED = {
    "sinks of other scores": (
        partial(sinks_as_a_factor, of=lambda b, s: b("aten.mul.Tensor", s, 2.0)), "not recognised",
    ),
    "another factor": (partial(sinks_as_a_factor, times=0.5), "not recognised"),
    "sinks and slopes": (sinks_and_slopes, "has sinks"),
    "no mask": (lambda b, q, k, v: weighted(b, scores(b, q, k), v), "sees later positions"),
    "a mask of keys": (partial(padded, least=1), "neither causal"),
    "almost causal": (partial(eager, make=almost_causal), "neither causal"),
    "softmax over queries": (other_axis, "not recognised"),
    "scores read twice": (read_twice, "not recognised"),
    "weights read twice": (weights_read_twice, "not recognised"),
    "a capped mask": (mask_scaled, "not recognised"),
    "a bias that is no slope": (partial(by_distance, power=2), "not a slope"),
    "a slope that ends": (staircase, "not a slope"),
    "a bias by token": (by_token, "not recognised"),
    "a learned bias": (learned, "not recognised"),
    "the first weight dropped": (first_dropped, "not recognised"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_looks_like_attention_is_refused(name, build, evaluate):
    attend, why = REFUSED[name]
    b = build(**SHAPES, sinks=(HEADS,))
    graph = b.graph(model(b, attend))
    with pytest.raises(UnsupportedModel, match=why) as refusal:
        cache_attention(graph, evaluate, LONGEST)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 200


def test_a_bias_in_few_bits_is_kept_as_it_is(build, evaluate):
    """From position 256 on a bfloat16 is no slope: what the graph makes of each position is cached, not a number."""
    b = build(**SHAPES)
    half = DType("bfloat16")

    def attend(b, q, k, v):
        bias = b("aten.mul.Tensor", b("aten.to.dtype", columns_and_rows(b)[0], half), 0.3)
        s = b("aten.add.Tensor", scores(b, q, k), b("aten.to.dtype", bias, FLOAT), 1)
        return weighted(b, masked(b, s), v)

    cached = cache_attention(b.graph(model(b, attend)), evaluate, 4096)
    (node,) = (n for n in cached.nodes if n.op == SCORED)
    found = arguments(node)
    assert found["slopes"] is None and isinstance(found["bias"], Ref)
    assert half in [n.args[1] for n in cached.nodes if n.op == "aten.to.dtype"]
