"""Keys that an indexer selects are looked up in a cache; what only looks like such a selection is refused."""

from __future__ import annotations

import pytest
from support.attention_graphs import (
    BOOL,
    HEADS,
    SHAPES,
    WIDTH,
    B,
    S,
    causal_mask,
    embedded,
    model,
    same_in_pieces,
    sdpa,
    windowed_mask,
)

from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import DType, Ref
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.caches.kv_cache import cache_attention

COUNT = 5
SELECTION, SELECTED = "fusion.cached_selection", "fusion.cached_attention_selected"
INDEXER = {"iq": (HEADS * WIDTH, 12), "ik": (WIDTH, 12), "iw": (HEADS, 12)}


def scores(b, above="aten.relu"):
    """(batch, sequence, sequence), as DeepSeek-V3.2 writes them."""
    place = b("aten.embedding", Ref("place"), Ref("position_ids"), -1, False)
    x = b("aten.add.Tensor", embedded(b), place, 1)  # no two keys are as good
    query = b("aten.reshape", b("aten.linear", x, Ref("iq"), None), (B, S, HEADS, WIDTH))
    key = b("aten.transpose.int", b("aten.linear", x, Ref("ik"), None), -1, -2)
    product = b("aten.matmul", query, b("aten.unsqueeze", key, 1))
    each = b(above, b("aten.mul.Tensor", product, 0.5))
    weights = b("aten.unsqueeze", b("aten.linear", x, Ref("iw"), None), -2)
    return b("aten.squeeze.dim", b("aten.matmul", weights, each), -2)


def hidden(b, s, make=causal_mask):
    seen = b("aten.select.int", make(b), 1, 0)
    return b("aten.masked_fill.Scalar", s, b("aten.bitwise_not", seen), float("-inf"))


def places(b, s, count=COUNT, best=True, again=0):
    """Of the first `count`, and of the first again for the rest."""
    order = Ref(b("aten.topk", s, S, -1, best, True).name, 1)
    early = b("aten.lt.Scalar", b("aten.arange", S, None), count)
    return b("aten.where.self", early, order, b("aten.slice.Tensor", order, 2, again, again + 1 or None, 1))


def selected(b, index, base="aten.ones", value=False):
    """(batch, 1, sequence, sequence): whether a key is selected."""
    mask = b("aten.scatter.value", b(base, (B, S, S), BOOL), -1, index, value)
    mask = b("aten.unsqueeze", mask, 1)
    return mask if value else b("aten.bitwise_not", mask)


def attending(make_index, see=causal_mask, **base):
    def attend(b, q, k, v):
        return sdpa(b, q, k, v, b("aten.__and__.Tensor", see(b), selected(b, make_index(b), **base)))

    return attend


def graph_with(build, attend, layers=1):
    b = build(**SHAPES, **INDEXER)
    return b.graph(model(b, attend))


def ops_of(graph):
    return [node.op for node in graph.nodes if node.op.startswith("fusion.cached")]


@pytest.mark.parametrize("base", [{}, {"base": "aten.zeros", "value": True}], ids=["hidden", "shown"])
def test_selected_keys_are_those_of_the_whole(build, execute, evaluate, base):
    graph = graph_with(build, attending(lambda b: places(b, hidden(b, scores(b))), **base))
    cached = cache_attention(graph, evaluate, 64)
    validate(cached)
    assert ops_of(cached) == [SELECTION, SELECTED]
    same_in_pieces(graph, cached, execute)
    # They matter: one key less is another answer.
    fewer = cache_attention(
        graph_with(build, attending(lambda b: places(b, hidden(b, scores(b)), COUNT - 1), **base)),
        evaluate,
        64,
    )
    with pytest.raises(AssertionError):
        same_in_pieces(graph, fewer, execute)


def test_a_mask_of_numbers_that_hides_what_is_not_selected(build, execute, evaluate):
    def attend(b, q, k, v):
        least = -3.4028234663852886e38
        shown = b("aten.where.Scalar", causal_mask(b), 0.0, least)
        index = places(b, b("aten.add.Tensor", scores(b), b("aten.select.int", shown, 1, 0), 1))
        mask = b("aten.bitwise_not", selected(b, index))
        return sdpa(b, q, k, v, b("aten.masked_fill.Scalar", shown, mask, least))

    graph = graph_with(build, attend)
    cached = cache_attention(graph, evaluate, 64)
    assert ops_of(cached) == [SELECTION, SELECTED]
    same_in_pieces(graph, cached, execute)


def test_layers_share_a_selection(build, execute, evaluate):
    def attend(b, q, k, v):
        mask = b("aten.__and__.Tensor", causal_mask(b), selected(b, places(b, hidden(b, scores(b)))))
        return sdpa(b, sdpa(b, q, k, v, mask), k, v, mask)

    graph = graph_with(build, attend)
    cached = cache_attention(graph, evaluate, 64)
    assert ops_of(cached) == [SELECTION, SELECTED, SELECTED]
    same_in_pieces(graph, cached, execute)


@pytest.mark.parametrize(
    "index",
    [
        lambda b: Ref(b("aten.topk", hidden(b, scores(b)), S, -1, True, True).name, 1),
        lambda b: b("aten.to.dtype", places(b, hidden(b, scores(b)), 64), DType("int32")),
    ],
    ids=["as many as there are", "as many as there can be"],
)
def test_where_every_key_is_selected_attention_is_plain(build, execute, evaluate, index):
    def attend(b, q, k, v):
        wide = b("aten.to.dtype", index(b), DType("int64"))
        return sdpa(b, q, k, v, b("aten.__and__.Tensor", causal_mask(b), selected(b, wide)))

    graph = graph_with(build, attend)
    cached = cache_attention(graph, evaluate, 64)
    assert ops_of(cached) == ["fusion.cached_attention"]
    same_in_pieces(graph, cached, execute)


def floor(b):
    return windowed_mask(b, 7)


@pytest.mark.parametrize(
    "attend",
    [
        attending(lambda b: places(b, scores(b))),  # among later keys too
        attending(lambda b: places(b, hidden(b, scores(b), floor))),
        attending(lambda b: places(b, hidden(b, scores(b))), see=floor),
        attending(lambda b: places(b, hidden(b, scores(b)), best=False)),
        attending(lambda b: places(b, hidden(b, scores(b)), again=-1)),
        attending(lambda b: places(b, hidden(b, scores(b, "aten.tanh")))),
        attending(lambda b: places(b, hidden(b, scores(b))), value=True),  # the selected ones are hidden
        lambda b, q, k, v: sdpa(b, q, k, v, selected(b, places(b, hidden(b, scores(b))))),
    ],
    ids=[
        "later keys", "a window of keys", "a window beside", "the worst", "another one for the rest", "another score",
        "hidden", "not causal",
    ],
)  # fmt: skip
def test_what_only_looks_like_it_is_refused(build, evaluate, attend):
    with pytest.raises(UnsupportedModel, match="no KV cache"):
        cache_attention(graph_with(build, attend), evaluate, 64)
