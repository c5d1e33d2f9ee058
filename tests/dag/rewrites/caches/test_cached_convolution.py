"""A short convolution with a memory gives a sequence in pieces what the whole has; what is not plainly causal is refused."""

from __future__ import annotations

import numpy as np
import pytest
from support.attention_graphs import embedded, heads, rest, sdpa, weights

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.errors import GraphError, UnsupportedModel
from fusion.dag.ir.graph import Ref, TensorType
from fusion.dag.ir.opset import infer, kept
from fusion.dag.ir.opset_convolution import MAX_WINDOW
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.caches.kv_cache import cache_attention

S = symbol("sequence")
WINDOW = 3
SHAPES = {
    "table": (11, 12), "place": (64, 12), "q": (12, 12), "k": (12, 12), "v": (12, 12), "head": (11, 12),
    "kernel": (12, 1, WINDOW), "wide": (12, 12, WINDOW), "added": (12,),
}  # fmt: skip


def convolved(
    b, *, kernel="kernel", padding=WINDOW - 1, dilation=1, groups=12, start=None, end=S, bias="added"
):
    """(batch, sequence, 12): each channel by itself over the last positions, as LFM2 and Mamba write it."""
    x = b("aten.transpose.int", embedded(b), 1, 2)
    bias = None if bias is None else Ref(bias)
    y = b("aten.conv1d", x, Ref(kernel), bias, (1,), (padding,), (dilation,), groups)
    return b("aten.transpose.int", b("aten.slice.Tensor", y, 2, start, end, 1), 1, 2)


def model(build, **how):
    b = build(**SHAPES)
    x = convolved(b, **how)
    q, k, v = (heads(b, x, w) for w in "qkv")
    return b.graph(rest(b, x, sdpa(b, q, k, v, is_causal=True)))


@pytest.mark.parametrize("bias", ["added", None])
def test_a_sequence_in_pieces_is_as_the_whole(build, execute, evaluate, bias):
    graph = model(build, bias=bias)
    cached = cache_attention(graph, evaluate)
    validate(cached)
    assert sorted(kept(node)[0] for node in cached.nodes if kept(node)) == [0, 1]
    values = weights(graph)
    tokens = np.random.default_rng(1).integers(0, 11, (2, 9))
    whole = execute(graph, values, tokens)
    cache = {}
    pieces = [execute(cached, values, tokens[:, a:b], a, cache) for a, b in ((0, 1), (1, 5), (5, 6), (6, 9))]
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, atol=1e-9)


@pytest.mark.parametrize(
    "how",
    [
        {"kernel": "wide", "groups": 1},
        {"padding": 1},  # sees a position that follows
        {"dilation": 2, "padding": 4},
        {"start": 1, "end": S + 1},
    ],
    ids=["channels together", "centred", "dilated", "cut elsewhere"],
)
def test_what_is_no_short_causal_convolution_is_refused(build, evaluate, how):
    with pytest.raises(UnsupportedModel, match="conv1d"):
        cache_attention(model(build, **how), evaluate)


def test_a_window_has_a_bound():
    types = {Ref("x"): TensorType((1, 1, S, 4), "float32")}

    def convolved_over(window):
        types[Ref("w")] = TensorType((4, 1, window), "float32")
        return infer("fusion.cached_convolution", (Ref("x"), Ref("w"), None, 0), types)

    assert convolved_over(MAX_WINDOW) == (types[Ref("x")],)
    with pytest.raises(GraphError, match="more than 64 positions"):
        convolved_over(MAX_WINDOW + 1)
