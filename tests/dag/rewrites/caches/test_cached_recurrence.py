"""A recurrence with a memory gives a sequence in pieces what the whole has."""

from __future__ import annotations

import numpy as np
import pytest
from support.attention_graphs import SHAPES, WIDTH, embedded, heads, rest, sdpa, weights

from fusion.dag.ir.errors import GraphError
from fusion.dag.ir.graph import Ref, TensorType
from fusion.dag.ir.opset import infer, kept, needed_version
from fusion.dag.ir.serialise import validate
from fusion.dag.rewrites.caches.kv_cache import cache_attention


def recurrent(b, x, *, beta=False, rates=False, shared=4):
    """Between attention's projections, one number a head that decays."""
    q, k = (heads(b, x, w if shared == 4 else f"few_{w}", shared) for w in "kk")
    v = heads(b, x, "v")
    one = b("aten.slice.Tensor", v, 3, 0, 1, 1)
    decay = b("aten.neg", b("aten.mul.Tensor", one, one))
    strength = b("aten.sigmoid", one) if beta else None
    y = b("fusion.recurrence", q, k, v, decay, strength, Ref("rates") if rates else None)
    return rest(b, x, y)


@pytest.mark.parametrize("how", [{}, {"beta": True}, {"rates": True, "shared": 2}])
def test_a_sequence_in_pieces_is_as_the_whole(build, execute, evaluate, how):
    b = build(**SHAPES, rates=(4, WIDTH))
    x = embedded(b)
    q, k, v = (heads(b, x, w) for w in "qkv")
    attended = b("aten.transpose.int", sdpa(b, q, k, v, is_causal=True), 1, 2)
    x = b("aten.add.Tensor", x, b("aten.reshape", attended, b.types[x].shape), 1)
    graph = b.graph(recurrent(b, x, **how))
    cached = cache_attention(graph, evaluate)
    validate(cached)
    assert needed_version(cached) == 2
    (node,) = (n for n in cached.nodes if n.op == "fusion.cached_recurrence")
    slot, values = kept(node)
    assert slot == 1 and len(values) == (4 if how.get("beta") else 3)
    given = weights(graph)
    given = {name: np.abs(value) if name == "rates" else value for name, value in given.items()}
    tokens = np.random.default_rng(1).integers(0, 11, (2, 9))
    whole = execute(graph, given, tokens)
    cache = {}
    pieces = [execute(cached, given, tokens[:, a:b], a, cache) for a, b in ((0, 1), (1, 5), (5, 6), (6, 9))]
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"key": (2, 3, 5, 8)}, "4 heads over 3 key heads"),
        ({"query": (2, 2, 5, 7)}, "do not fit each other"),
        ({"key": (2, 2, 6, 8), "query": (2, 2, 6, 8)}, "do not fit each other"),
        ({"decay": (2, 4, 5, 3)}, "decay"),
        ({"beta": (2, 4, 5, 8)}, "beta"),
        ({"beta": (2, 4, 1)}, "needs"),
        ({"rates": (4, 8)}, "rates"),
        ({"key": (2, 2, 5, 4096), "query": (2, 2, 5, 4096), "value": (2, 4, 5, 4096)}, "a state of"),
    ],
)
def test_what_does_not_fit_is_refused(changed, why):
    shapes = {"query": (2, 2, 5, 8), "key": (2, 2, 5, 8), "value": (2, 4, 5, 6), "decay": (2, 4, 5, 8)}
    names = ("query", "key", "value", "decay", "beta", "rates")
    types = {Ref(n): TensorType(s, "float32") for n, s in {**shapes, **changed}.items()}
    with pytest.raises(GraphError, match=why):
        infer("fusion.recurrence", tuple(Ref(n) if Ref(n) in types else None for n in names), types)
