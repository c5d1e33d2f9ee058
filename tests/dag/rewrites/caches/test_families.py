"""What the KV cache rewrite recognises in real exports, and what it refuses. (Decoding itself: tests/runtime.)"""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from support.captured_once import captured_once  # noqa: E402
from support.families import INDEXER, POSITIONS, SMALL, VOCABULARY, WINDOW, build, exported, made  # noqa: E402

from fusion.dag.cutting.cuts import legal_cuts, split  # noqa: E402
from fusion.dag.ir.errors import UnsupportedModel  # noqa: E402
from fusion.dag.ir.opset import spec  # noqa: E402
from fusion.dag.ir.serialise import validate  # noqa: E402
from fusion.dag.rewrites.caches.kv_cache import cache_attention  # noqa: E402
from fusion.dag.rewrites.clean import clean  # noqa: E402
from fusion.dag.rewrites.end_to_end import end_to_end  # noqa: E402
from fusion.dag.rewrites.fuse import fuse  # noqa: E402
from fusion.dag.rewrites.last_position import last_position  # noqa: E402
from fusion.runtime.capture.serving_graph import evaluate  # noqa: E402


def far():
    """A window of more positions than there are."""
    config = transformers.MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=4096)
    return captured_once(build(config), training=False, maximum_sequence=POSITIONS)


@pytest.mark.parametrize(
    ("graph", "heads", "window"),
    [
        (lambda: exported("llama")[0], 2, None),
        (lambda: exported("mistral-windowed")[0], 1, WINDOW),
        pytest.param(far, 1, 4096, marks=pytest.mark.slow),
        (lambda: exported("neox")[0], 4, None),
    ],
    ids=["llama", "mistral-windowed", "a far window", "neox"],
)
def test_recognised(graph, heads, window):
    graph = graph()
    served = fuse(last_position(cache_attention(graph, evaluate)))
    validate(served)
    nodes = [n for n in served.nodes if n.op == "fusion.cached_attention"]
    assert [(n.args[3], n.args[5]) for n in nodes] == [(layer, window) for layer in range(3)]
    assert all(served.types[r].shape[1] == heads for n in nodes for r in n.args[1:3])
    assert served.types[served.outputs[0]].shape[1:] == (1, VOCABULARY)
    assert len(served.nodes) < len(graph.nodes)
    # Between two layers the hidden state crosses, and nothing that is made of positions.
    stages = split(served, legal_cuts(served))
    first = served.node_index[nodes[0].name]
    assert min(len(s.receives) for s in stages[1:] if served.node_index[s.graph.nodes[-1].name] > first) == 1
    assert all("position_ids" not in e.name for s in stages for e in s.receives)


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("bloom", {"softcap": None, "slopes": None}),
        ("gemma2", {"softcap": 50.0, "window": WINDOW, "bias": None}),
    ],
    ids=["ALiBi", "softcap"],
)
def test_scores_that_are_not_plain(family, found):
    served = fuse(last_position(cache_attention(exported(family)[0], evaluate, 128)))
    validate(served)
    first, second, _ = (n for n in served.nodes if n.op == "fusion.cached_attention_scored")
    names = [p.name for p in spec(first.op).parameters]
    assert found.items() <= dict(zip(names, first.args, strict=True)).items()
    assert [n.args[names.index("slot")] for n in (first, second)] == [0, 1]
    # However it is cut: what a stage is sent is of positions, so that sessions run together, and guesses beside tokens.
    assert all(end_to_end(stage.graph) for stage in split(served, legal_cuts(served)))


def test_keys_that_an_indexer_selects():
    served, _ = made("glm-moe-dsa", "kv", 128)
    validate(served)
    found = [n.op for n in served.nodes if n.op.startswith("fusion.cached")]
    assert found == ["fusion.cached_selection", *["fusion.cached_attention_selected"] * 2]
    (chosen,) = (n for n in served.nodes if n.op == "fusion.cached_selection")
    assert chosen.args[-1] == INDEXER["index_topk"]
    assert all(end_to_end(stage.graph) for stage in split(served, legal_cuts(served)))
    # Of texts that are no longer, every key is selected.
    plain, _ = made("glm-moe-dsa", "kv", INDEXER["index_topk"])
    assert [n.op for n in plain.nodes if "cached" in n.op] == ["fusion.cached_attention"] * 2
    assert not any("indexer" in ref.name for node in plain.nodes for ref in node.refs())


def test_refused():
    graph, _ = exported("openai-gpt")
    with pytest.raises(UnsupportedModel, match="not recognised"):
        cache_attention(graph, evaluate, 128)
    assert last_position(clean(graph)).types[last_position(clean(graph)).outputs[0]].shape[1] == 1
