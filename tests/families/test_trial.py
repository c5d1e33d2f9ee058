"""The trial of a family finds wrong answers, and the page shows the outcomes of the trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from families import encoder_decoders, page, trial  # noqa: E402
from families.tiny import LAYERS, MIXED_LAYERS, tiny  # noqa: E402
from families.trial import Outcome, outcome  # noqa: E402

from fusion.dag.ir.graph import Graph  # noqa: E402


def test_a_configuration_is_small_and_keeps_what_makes_a_family_different() -> None:
    plain = tiny(transformers.LlamaConfig)
    assert (plain.num_hidden_layers, plain.hidden_size, plain.vocab_size) == (LAYERS, 64, 256)
    mixed = tiny(transformers.Gemma3TextConfig)
    assert mixed.num_hidden_layers == len(mixed.layer_types) == MIXED_LAYERS
    assert set(mixed.layer_types) == {"sliding_attention", "full_attention"}
    assert mixed.sliding_window == 16 < max(trial.PROMPTS)


def test_a_family_is_served_as_transformers_runs_it(tmp_path: Path) -> None:
    found = outcome("gpt_neox", tmp_path)
    assert (found.served, found.why) == ("cached", "")
    assert found.error is not None and found.error < trial.TOLERANCE
    assert found.tokens >= 5


@pytest.mark.slow
def test_the_texts_of_a_family_that_sees_are_served_as_transformers_runs_it(tmp_path: Path) -> None:
    seeing, alone = trial.that_see(), trial.of_text()
    assert {f"llava{trial.SEES}", f"mllama{trial.SEES}"} <= set(seeing) and f"llama{trial.SEES}" not in seeing
    assert "llama" in alone and "mllama" not in alone
    found = outcome(f"qwen2_5_vl{trial.SEES}", tmp_path)
    assert (found.served, found.why) == ("cached", "") and found.tokens >= 5
    assert found.error is not None and found.error < trial.TOLERANCE


@pytest.mark.slow
def test_a_family_that_reads_a_source_is_served_as_transformers_runs_it(tmp_path: Path) -> None:
    found = encoder_decoders.outcome(f"t5{encoder_decoders.READS}", tmp_path)
    assert (found.served, found.why) == ("cached", "") and found.tokens >= 5
    assert found.error is not None and found.error < trial.TOLERANCE


def test_what_would_answer_otherwise_is_called_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving_graph = trial.serving_graph

    def narrowed(captured: Graph, **how: Any) -> Graph:
        graph = serving_graph(captured, **how)
        nodes = [
            replace(n, args=(*n.args[:-1], 20)) if n.op == "fusion.cached_attention" else n
            for n in graph.nodes
        ]
        return replace(graph, nodes=tuple(nodes))

    monkeypatch.setattr(trial, "serving_graph", narrowed)
    assert outcome("llama", tmp_path).served == "wrong"


def test_an_error_is_held_against_how_much_the_model_itself_rounds(tmp_path: Path) -> None:
    assert trial.tolerable(trial.TOLERANCE, None) and not trial.tolerable(2 * trial.TOLERANCE, None)
    assert trial.tolerable(7e-4, 2e-4) and not trial.tolerable(9e-4, 2e-4)
    assert not trial.tolerable(0.02, 0.02)  # that could be anything
    trial.written(tiny(transformers.LlamaConfig), transformers.AutoModelForCausalLM, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert (
        0
        < trial.own_rounding(model, transformers.AutoModelForCausalLM, tmp_path, [(2, torch.arange(9)[None])])
        < 1e-5
    )


def test_the_page() -> None:
    found = [
        Outcome(family="a", served="cached", error=1e-6, tokens=9, together=True),
        Outcome(family="b", served="recomputed", why="no KV cache for this model: x | y", error=2e-6),
        Outcome(family="c", served="refused", why="the op-set has no operator aten.z"),
        Outcome(family="r", served="cached", error=2e-4, rounding=1e-4),  # not batched
        Outcome(family="d", served="not tried", why="needs timm"),
        Outcome(family=f"a{encoder_decoders.READS}", served="cached", error=3e-6, tokens=9, together=True),
    ]
    text = page.text(found, "5.0", ["e", "f"])
    assert "Still to be tried" not in page.text(found, "5.0") and "): e, f." in text
    assert "| a | KV cache | 1e-06 |  |" in text
    assert "| b | recomputed | 2e-06 | x \\| y |" in text
    assert "| r | KV cache, not batched | 2e-04 (own float32: 1e-04) |  |" in text
    assert "| d | needs timm |" in text.partition("## Not tried")[2]
    assert "| a | KV cache | 3e-06 |  |" in text.partition("## Encoder-decoders")[2]
    assert page.counts(found[:-1]).startswith("4 families tried, 3 served exactly (75%)")
