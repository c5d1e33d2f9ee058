"""Rotary positions that are scaled: exact with a cache as long as their frequencies stay, and no longer served than that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from families.trial import compared  # noqa: E402
from support.families import GROUPED, build  # noqa: E402

from fusion.runtime.capture import sources  # noqa: E402
from fusion.runtime.capture.serving_graph import serving_graph  # noqa: E402
from fusion.runtime.job.spec import HuggingFaceConfig  # noqa: E402

LONG: dict[str, Any] = {**GROUPED, "num_hidden_layers": 2}
FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [3.0 + i for i in range(8)]}


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        pytest.param({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, 256, marks=pytest.mark.slow),
        pytest.param({"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 128, **FACTORS}, 128, marks=pytest.mark.slow),
    ],
    ids=["dynamic", "yarn", "llama3", "longrope"],
)  # fmt: skip
def test_scaled_positions_are_exact_with_a_cache(tmp_path: Path, scaling: Any, longest: int) -> None:
    config = transformers.LlamaConfig(**LONG, rope_parameters={"rope_theta": 10000.0, **scaling})
    model = build(config)
    model.save_pretrained(tmp_path)
    opened = sources.huggingface(HuggingFaceConfig(path=tmp_path), training=False)
    assert opened.about.max_sequence == longest
    graph = serving_graph(opened.inference, cache="kv", maximum_sequence=longest)
    error, tokens, differs, _ = compared(model, opened, graph, "cached")
    assert error < 1e-4 and not differs and tokens >= 5


@pytest.mark.slow
def test_two_scales_of_attention_are_exact_with_a_cache(tmp_path: Path) -> None:
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 128, **FACTORS}
    more = {"rope_theta": 10000.0, "short_mscale": 1.2, "long_mscale": 1.3}
    model = build(transformers.PhimoeConfig(**LONG, num_local_experts=4, rope_parameters={**scaling, **more}))
    model.save_pretrained(tmp_path)
    opened = sources.huggingface(HuggingFaceConfig(path=tmp_path), training=False)
    graph = serving_graph(opened.inference, cache="kv", maximum_sequence=opened.about.max_sequence)
    error, tokens, differs, _ = compared(model, opened, graph, "cached")
    assert error < 1e-4 and not differs and tokens >= 5


def test_a_longer_text_would_have_other_frequencies() -> None:
    """What the limit is for: beyond it the model computes something else for positions that it has seen before."""
    parameters = {
        "rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128, **FACTORS,
    }  # fmt: skip
    model = build(transformers.LlamaConfig(**LONG, rope_parameters=parameters))
    ids = torch.randint(0, 256, (1, 130))
    with torch.inference_mode():
        within = model(ids[:, :128], use_cache=False).logits[0, 100]
        beyond = model(ids, use_cache=False).logits[0, 100]
    assert (within - beyond).abs().max() > 1e-2
