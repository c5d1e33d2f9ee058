"""The KV cache changes nothing where it is accepted, and whatever could change something is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.attention_graphs import (
    BOOL,
    FLOAT,
    HEADS,
    SHAPES,
    VOCABULARY,
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
    sdpa,
    weights,
    windowed_mask,
)

from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Ref
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.caches.kv_cache import cache_attention
from fusion.dag.rewrites.last_position import last_position


def masked(make):
    return lambda b, q, k, v: sdpa(b, q, k, v, make(b))


def cached_nodes(graph):
    return [n for n in graph.nodes if n.op == "fusion.cached_attention"]


ACCEPTED = {
    "is_causal": (partial(sdpa, is_causal=True), None),
    "boolean": (masked(causal_mask), None),
    "added": (masked(additive(causal_mask)), None),
    "added with -inf": (masked(additive(causal_mask, -float("inf"))), None),
    "window": (masked(partial(windowed_mask, window=5)), 5),
    "window added": (masked(additive(partial(windowed_mask, window=9))), 9),
    "window beyond short lengths": (masked(partial(windowed_mask, window=700)), 700),
    "window too large to try": (masked(partial(windowed_mask, window=4096)), 4096),
    "scaled": (partial(sdpa, is_causal=True, scale=0.3), None),
    "scaled window": (masked(lambda b: scaled_window(b, 0.5, 3)), 6),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_gives_the_same_in_pieces(name, build, evaluate, execute):
    attend, window = ACCEPTED[name]
    b = build(**SHAPES)
    graph = b.graph(model(b, attend))
    cached = cache_attention(graph, evaluate)
    validate(cached)
    (node,) = cached_nodes(cached)
    assert node.args[3] == 0 and node.args[5] == window
    assert not any(len([d for d in t.shape if d == S]) > 1 for t in cached.types.values())
    same_in_pieces(graph, cached, execute)


def test_a_window_that_never_fills_is_left_out(build, evaluate):
    b = build(**SHAPES)
    graph = b.graph(model(b, masked(partial(windowed_mask, window=4096))))
    for longest, window in ((4096, None), (4097, 4096), (None, 4096)):
        assert cached_nodes(cache_attention(graph, evaluate, longest))[0].args[5] == window


def packed_mask(b):
    """Causal within documents, that start where positions do not go up by one: how exports write it."""
    first = b("aten.sub.Tensor", b("aten.slice.Tensor", Ref("position_ids"), 1, 0, 1, 1), 1, 1)
    ahead = b("aten.expand", first, (B, S))
    fresh = b("aten.eq.Tensor", ahead, Ref("position_ids"))
    other = b("aten.unsqueeze", b("aten.unsqueeze", fresh, 1), 2)
    return b("aten.__and__.Tensor", causal_mask(b), b("aten.eq.Tensor", other, other))


def test_a_mask_that_reduces_to_causal_for_one_sequence_is_recognised(build, evaluate, execute):
    b = build(**SHAPES)
    graph = b.graph(model(b, masked(packed_mask)))
    same_in_pieces(graph, cache_attention(graph, evaluate), execute)


def test_masks_are_evaluated_once(build, evaluate):
    b = build(**SHAPES)
    mask = causal_mask(b)
    x = b("aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    for _ in range(3):
        q, k, v = (heads(b, x, w) for w in "qkv")
        x = b(
            "aten.tanh", b("aten.reshape", b("aten.transpose.int", sdpa(b, q, k, v, mask), 1, 2), (B, S, 12))
        )
    graph = b.graph(b("aten.linear", x, Ref("head"), None))
    calls = []

    def counted(graph, inputs, sizes):
        calls.append(sizes["sequence"])
        return evaluate(graph, inputs, sizes)

    cached = cache_attention(graph, counted)
    assert [n.args[3] for n in cached_nodes(cached)] == [0, 1, 2]
    assert len(calls) < 40


def repeat_kv(b, x, times=2):
    shape = (B, HEADS // times, times, S, WIDTH)
    return b("aten.reshape", b("aten.expand", b("aten.unsqueeze", x, 2), shape), (B, HEADS, S, WIDTH))


@pytest.mark.parametrize("spelling", ["repeat_kv", "enable_gqa"])
def test_grouped_queries_cache_the_few_heads(spelling, build, evaluate, execute):
    b = build(**SHAPES)
    x = b("aten.embedding", Ref("table"), Ref("input_ids"), -1, False)
    q, k, v = heads(b, x, "q"), heads(b, x, "few_k", 2), heads(b, x, "few_v", 2)
    if spelling == "repeat_kv":
        y = sdpa(b, q, repeat_kv(b, k), repeat_kv(b, v), causal_mask(b))
    else:
        y = sdpa(b, q, k, v, causal_mask(b), grouped=True)
    graph = b.graph(rest(b, x, y))
    cached = cache_attention(graph, evaluate)
    (node,) = cached_nodes(cached)
    assert [cached.types[r].shape[1] for r in node.args[:3]] == [HEADS, 2, 2]
    same_in_pieces(graph, cached, execute)


def test_heads_repeated_in_another_order_are_cached_as_they_are(build, evaluate, execute):
    b = build(**SHAPES)
    x = b("aten.embedding", Ref("table"), Ref("input_ids"), -1, False)

    def tiled(y):  # head h is a copy of h % 2, not of h // 2
        y = b("aten.expand", b("aten.unsqueeze", y, 1), (B, 2, 2, S, WIDTH))
        return b("aten.reshape", y, (B, HEADS, S, WIDTH))

    q, k, v = heads(b, x, "q"), tiled(heads(b, x, "few_k", 2)), tiled(heads(b, x, "few_v", 2))
    graph = b.graph(rest(b, x, sdpa(b, q, k, v, is_causal=True)))
    cached = cache_attention(graph, evaluate)
    assert cached.types[cached_nodes(cached)[0].args[1]].shape[1] == HEADS
    same_in_pieces(graph, cached, execute)


def alibi(b):
    keys, queries = columns_and_rows(b)
    distance = b("aten.to.dtype", b("aten.sub.Tensor", keys, queries, 1), FLOAT)
    return b("aten.add.Tensor", b("aten.mul.Tensor", distance, 0.25), additive(causal_mask)(b), 1)


def chunked(b, size):
    keys, queries = columns_and_rows(b)
    together = b("aten.eq.Tensor", b("fusion.div_floor", keys, size), b("fusion.div_floor", queries, size))
    return b("aten.__and__.Tensor", b("aten.le.Tensor", keys, queries), together)


def chunks_unless(b, size, early):
    sinks = b("aten.lt.Scalar", columns_and_rows(b)[0], early)
    return b("aten.__and__.Tensor", causal_mask(b), b("aten.__or__.Tensor", chunked(b, size), sinks))


@pytest.mark.parametrize("make", [lambda mask: mask, additive], ids=["boolean", "added"])
@pytest.mark.parametrize("size", [6, 1000, 8192])
def test_a_position_sees_its_own_chunk(make, size, build, execute, evaluate):
    def attend(b, q, k, v):
        mask = make(partial(chunked, size=size))(b)
        return sdpa(b, sdpa(b, q, k, v, mask), k, v, mask)

    b = build(**SHAPES)
    graph = b.graph(model(b, attend))
    cached = cache_attention(graph, evaluate)
    validate(cached)
    assert [n.op for n in cached.nodes if "cached" in n.op] == ["fusion.cached_attention_selected"] * 2
    assert [n.args[0] for n in cached.nodes if n.op == "aten.arange" and n.args[0] != S] == [size]
    same_in_pieces(graph, cached, execute)
    assert len(cached_nodes(cache_attention(graph, evaluate, size))) == 2  # of texts of one chunk


def with_sinks(b, window, sinks):
    keys, queries = columns_and_rows(b)
    near = b("aten.gt.Tensor", keys, b("aten.sub.Tensor", queries, window, 1))
    seen = b("aten.__or__.Tensor", near, b("aten.lt.Scalar", keys, sinks))
    return b("aten.__and__.Tensor", b("aten.le.Tensor", keys, queries), seen)


def by_token(b):
    """Hides a padding token."""
    kept = b("aten.gt.Scalar", b("aten.unsqueeze", b("aten.unsqueeze", Ref("input_ids"), 1), 2), 0)
    return b("aten.__and__.Tensor", causal_mask(b), kept)


def by_place(b):
    """Two thresholds that are both too large to try."""
    keys, queries = columns_and_rows(b)
    near = b("aten.gt.Tensor", keys, b("aten.sub.Tensor", queries, 4096, 1))
    late = b("aten.gt.Scalar", queries, 100000)
    return b("aten.__and__.Tensor", b("aten.le.Tensor", keys, queries), b("aten.__or__.Tensor", near, late))


def window_of_blocks(b, size, blocks):
    """A threshold at size * blocks positions, which is no number of the graph."""
    keys, queries = (b("fusion.div_floor", p, size) for p in columns_and_rows(b))
    near = b("aten.lt.Scalar", b("aten.sub.Tensor", queries, keys, 1), blocks)
    return b("aten.__and__.Tensor", causal_mask(b), near)


def scaled_window(b, scale, limit):
    keys, queries = columns_and_rows(b)
    distance = b("aten.to.dtype", b("aten.sub.Tensor", queries, keys, 1), FLOAT)
    near = b("aten.lt.Scalar", b("aten.mul.Scalar", distance, scale), limit)
    return b("aten.__and__.Tensor", b("aten.le.Tensor", keys, queries), near)


REFUSED = {
    "both directions": (sdpa, "sees later positions"),
    "a mask of ones": (masked(lambda b: b("aten.ones", (S, S), BOOL)), "neither causal"),
    "later positions": (masked(lambda b: b("aten.ge.Tensor", *columns_and_rows(b))), "neither causal"),
    "not itself": (masked(lambda b: b("aten.lt.Tensor", *columns_and_rows(b))), "neither causal"),
    "ALiBi": (masked(alibi), "adds to the scores"),
    "a mild mask": (masked(additive(causal_mask, hidden=-20.0)), "adds to the scores"),
    "a shifted mask": (masked(additive(causal_mask, shown=1.0)), "adds to the scores"),
    "chunks and a window": (masked(lambda b: b("aten.__and__.Tensor", chunked(b, 6), windowed_mask(b, 4))), "neither causal"),
    "chunks and sinks": (masked(lambda b: chunks_unless(b, 6, 2)), "neither causal"),
    "chunks of several sizes": (masked(lambda b: b("aten.__and__.Tensor", chunked(b, 6), chunked(b, 4))), "neither causal"),
    "long chunks up to a place": (masked(lambda b: chunks_unless(b, 8192, 100000)), "scales positions"),
    "chunks too large to keep": (masked(partial(chunked, size=100000)), "sees chunks of"),
    "sinks": (masked(partial(with_sinks, window=6, sinks=2)), "neither causal"),
    "sinks and a long window": (masked(partial(with_sinks, window=4096, sinks=4)), "neither causal"),
    "blocks": (masked(partial(window_of_blocks, size=8, blocks=3)), "neither causal"),
    "large blocks": (masked(partial(window_of_blocks, size=64, blocks=50)), "scales positions"),
    "a scaled distance": (masked(partial(scaled_window, scale=0.01, limit=50)), "scales positions"),
    "two large thresholds": (masked(by_place), "several large numbers"),
    "tokens": (masked(by_token), "depends on input_ids"),
    "weights": (masked(lambda b: b("aten.add.Tensor", additive(causal_mask)(b), Ref("bias"), 1)), "depends on bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_refused(name, build, evaluate):
    attend, why = REFUSED[name]
    b = build(**SHAPES, bias=(1,))
    graph = b.graph(model(b, attend))
    with pytest.raises(UnsupportedModel, match=why) as refusal:
        cache_attention(graph, evaluate)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 200


def attended(b, x):
    q, k, v = (heads(b, x, w) for w in "qkv")
    return rest(b, x, sdpa(b, q, k, v, is_causal=True))


def table_of_positions(b):
    return b("aten.add.Tensor", embedded(b), b("aten.slice.Tensor", Ref("place"), 0, 0, S, 1), 1)


def by_length(b):
    return b("aten.mul.Tensor", embedded(b), S)


def running_total(b):
    return b("aten.cumsum", embedded(b), 1, None)


def average(b):
    return b("aten.sub.Tensor", embedded(b), b("aten.mean.dim", embedded(b), (1,), True, None), 1)


def backwards(b):
    return b("aten.flip", embedded(b), (1,))


def previous(b):
    return b("aten.roll", embedded(b), (1,), (1,))


def scrambled(b):
    return b("aten.transpose.int", b("aten.reshape", embedded(b), (B, 12, S)), 1, 2)


def convolved(b):
    x = b("aten.transpose.int", embedded(b), 1, 2)
    return b("aten.transpose.int", b("aten.conv1d", x, Ref("kernel"), None, (1,), (1,), (1,), 1), 1, 2)


def softmax_over_positions(b):
    return b("aten.softmax.int", embedded(b), 1, None)


def gathered(b):
    order = b("aten.expand", b("aten.unsqueeze", Ref("position_ids"), 2), (B, S, 12))
    return b("aten.gather", embedded(b), 1, order)


def interleaved(b):
    flat = b("aten.reshape", b("aten.transpose.int", embedded(b), 0, 1), (B * S, 12))
    return b("aten.reshape", flat, (B, S, 12))


@pytest.mark.parametrize(
    "make",
    [table_of_positions, by_length, running_total, average, backwards, previous, scrambled, convolved,
     softmax_over_positions, gathered, interleaved],
)  # fmt: skip
def test_whatever_else_reaches_across_positions_is_refused(make, build, evaluate):
    b = build(**SHAPES, kernel=(12, 12, 3))
    with pytest.raises(UnsupportedModel, match="no KV cache for this model"):
        cache_attention(b.graph(attended(b, make(b))), evaluate)


def test_positions_merged_with_the_batch_stay_apart(build, evaluate, execute):
    b = build(**SHAPES)
    flat = b("aten.reshape", embedded(b), (-1, 12))
    x = b("aten.reshape", b("aten.linear", flat, Ref("q"), None), (B, S, 12))
    graph = b.graph(attended(b, x))
    same_in_pieces(graph, cache_attention(graph, evaluate), execute)


def test_positions_merged_with_what_belongs_to_them_stay_apart(build, evaluate, execute):
    b = build(**SHAPES)
    x = b("aten.mul.Tensor", b("aten.reshape", embedded(b), (B, S * 12)), 2)
    graph = b.graph(attended(b, b("aten.reshape", x, (B, S, 12))))
    same_in_pieces(graph, cache_attention(graph, evaluate), execute)


def test_dropout_in_attention_is_refused(build, evaluate):
    b = build(**SHAPES)
    q, k, v = (heads(b, embedded(b), w) for w in "qkv")
    y = b("fusion.dropout_attention", q, k, v, None, 0.5, True, None, False)
    with pytest.raises(UnsupportedModel):
        cache_attention(b.graph(rest(b, embedded(b), y)), evaluate)


def test_an_output_without_positions_is_refused(build, evaluate):
    b = build(**SHAPES)
    graph = b.graph(b("aten.tanh", Ref("head")))
    with pytest.raises(UnsupportedModel, match="no dimension for the sequence"):
        cache_attention(graph, evaluate)


def test_last_position_gives_the_last_logits_only(build, evaluate, execute):
    b = build(**SHAPES)
    logits = b("aten.mul.Tensor", b("aten.tanh", model(b, partial(sdpa, is_causal=True))), 30.0)
    graph = b.graph(logits)
    short = last_position(cache_attention(graph, evaluate))
    validate(short)
    names = [n.name for n in short.nodes]
    assert short.types[short.outputs[0]].shape == (B, 1, VOCABULARY)
    # before the head and its cap, and before the residual's two readers
    assert [n.op for n in short.nodes[names.index("last_position") + 1 :]] == [
        "aten.linear",
        "aten.tanh",
        "aten.mul.Tensor",
    ]
    w, tokens = weights(graph), np.random.default_rng(2).integers(0, VOCABULARY, (1, 9))
    whole, cache = execute(graph, w, tokens), {}
    np.testing.assert_allclose(execute(short, w, tokens[:, :8], 0, cache), whole[:, 7:8], rtol=1e-9)
    np.testing.assert_allclose(execute(short, w, tokens[:, 8:], 8, cache), whole[:, 8:], rtol=1e-9)
    assert last_position(short) == short


def test_last_position_of_a_graph_without_cache(build, execute):
    b = build(**SHAPES)
    graph = b.graph(model(b, masked(causal_mask)))
    short = last_position(graph)
    validate(short)
    w, tokens = weights(graph), np.random.default_rng(2).integers(0, VOCABULARY, (2, 9))
    np.testing.assert_allclose(execute(short, w, tokens), execute(graph, w, tokens)[:, -1:], rtol=1e-9)


def test_last_position_leaves_what_others_read(build, evaluate):
    b = build(**SHAPES)
    x = b("aten.linear", embedded(b), Ref("q"), None)
    y = b("aten.add.Tensor", x, b("aten.linear", x, Ref("k"), None), 1)
    short = last_position(b.graph(y))
    assert short.nodes[-1].name == "last_position" and short.outputs == (Ref("last_position"),)
