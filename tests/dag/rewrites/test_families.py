"""What the KV cache rewrite recognises in real exports, and what it refuses. (Decoding itself: tests/runtime.)"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fusion.dag.cutting.cuts import legal_cuts, split  # noqa: E402
from fusion.dag.ir.errors import UnsupportedModel  # noqa: E402
from fusion.dag.ir.opset import spec  # noqa: E402
from fusion.dag.ir.serialise import validate  # noqa: E402
from fusion.dag.rewrites.clean import clean  # noqa: E402
from fusion.dag.rewrites.fuse import fuse  # noqa: E402
from fusion.dag.rewrites.kv_cache import cache_attention  # noqa: E402
from fusion.dag.rewrites.last_position import last_position  # noqa: E402
from fusion.runtime.capture.capture import capture_language_model  # noqa: E402
from fusion.runtime.capture.serving_graph import evaluate  # noqa: E402

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
GROUPED = {**TINY, "num_key_value_heads": 2}


def captured(config):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return capture_language_model(model, training=False, maximum_sequence=128)


@pytest.mark.parametrize(
    ("name", "more", "heads", "window"),
    [
        ("Llama", GROUPED, 2, None),
        ("Mistral", {**GROUPED, "sliding_window": 8}, 2, 8),
        ("Mistral", {**GROUPED, "sliding_window": 4096}, 2, 4096),
        ("GPTNeoX", TINY, 4, None),
    ],
)
def test_recognised(name, more, heads, window):
    graph = captured(getattr(transformers, f"{name}Config")(**more))
    served = fuse(last_position(cache_attention(graph, evaluate)))
    validate(served)
    nodes = [n for n in served.nodes if n.op == "fusion.cached_attention"]
    assert [(n.args[3], n.args[5]) for n in nodes] == [(0, window), (1, window)]
    assert all(served.types[r].shape[1] == heads for n in nodes for r in n.args[1:3])
    assert served.types[served.outputs[0]].shape[1:] == (1, 64)
    assert len(served.nodes) < len(graph.nodes)
    # Between two layers the hidden state crosses, and nothing that is made of positions.
    stages = split(served, legal_cuts(served))
    first = served.node_index[nodes[0].name]
    assert min(len(s.receives) for s in stages[1:] if served.node_index[s.graph.nodes[-1].name] > first) == 1
    assert all("position_ids" not in e.name for s in stages for e in s.receives)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (lambda: transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64), {"softcap": None, "slopes": None}),
        (lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=16), {"softcap": 50.0, "window": 16, "bias": None}),
    ],
    ids=["ALiBi", "softcap"],
)  # fmt: skip
def test_scores_that_are_not_plain(config, found):
    served = fuse(last_position(cache_attention(captured(config()), evaluate, 128)))
    validate(served)
    first, second = (n for n in served.nodes if n.op == "fusion.cached_attention_scored")
    names = [p.name for p in spec(first.op).parameters]
    assert found.items() <= dict(zip(names, first.args, strict=True)).items()
    assert [n.args[names.index("slot")] for n in (first, second)] == [0, 1]


def test_refused():
    graph = captured(transformers.OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    with pytest.raises(UnsupportedModel, match="not recognised"):
        cache_attention(graph, evaluate, 128)
    assert last_position(clean(graph)).types[last_position(clean(graph)).outputs[0]].shape[1] == 1
