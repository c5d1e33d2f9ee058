"""Tokens that a graph leaves out of answers, and what answers do not follow of what files say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.serialise import decode, encode
from fusion.runtime.capture import generation
from fusion.runtime.capture.generation import MAX_SPANS, ignored_settings, suppress, unsupported_settings
from fusion.runtime.capture.serving_graph import evaluate
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import EMBEDDING, ServeConfig, SourceConfig

VOCABULARY = 150
LOGITS = TensorType((2, 3, VOCABULARY), "float32")


def logits() -> Graph:
    """Under a name that the nodes of those that are withheld would have."""
    node = Node("withheld_1", "aten.neg", (Ref("x"),), (LOGITS,))
    return Graph((Input("x", LOGITS),), (), (node,), (Ref("withheld_1"),))


@pytest.mark.parametrize("tokens", [(7,), (0, 149), (3, 4, 5, 9, 4, 20, 21), tuple(range(VOCABULARY - 1))])
def test_tokens_are_withheld_and_no_others(tokens: tuple[int, ...]) -> None:
    graph = suppress(logits(), tokens)
    assert decode(encode(graph)) == graph
    x = np.random.default_rng(0).normal(size=(2, 3, VOCABULARY)).astype(np.float32)
    (found,) = evaluate(graph, {"x": x}, {})
    wanted = -x
    wanted[..., list(tokens)] = -np.inf
    assert np.array_equal(found, wanted)


def test_nothing_is_added_where_nothing_is_withheld() -> None:
    graph = logits()
    assert suppress(graph, ()) is graph


def test_more_comparisons_than_a_token_is_worth_are_refused() -> None:
    with pytest.raises(JobError, match=f"{MAX_SPANS + 1} spans from answers; the limit is {MAX_SPANS}"):
        suppress(logits(), range(0, 2 * MAX_SPANS + 1, 2))


# --- what answers do not follow

DECODER = ServeConfig(cache="kv", max_sequence=8, vocabulary=50, end_tokens=(2,))
READS = ServeConfig(
    cache="kv",
    max_sequence=8,
    vocabulary=50,
    end_tokens=(2,),
    source=SourceConfig(start=(1,), length=8),
)
HEARS = ServeConfig(
    cache="kv",
    max_sequence=8,
    vocabulary=50,
    end_tokens=(2,),
    source=SourceConfig(start=(1,), length=8, channels=80),
)


def said(folder: Path, file: str = "generation_config.json", **settings: Any) -> Path:
    (folder / file).write_text(json.dumps(settings))
    return folder


def test_what_answers_do_not_follow_is_named_in_one_line(tmp_path: Path) -> None:
    said(
        tmp_path, repetition_penalty=1.3, no_repeat_ngram_size=2, num_beams=4, eos_token_id=2, temperature=0.6
    )
    assert unsupported_settings(tmp_path, DECODER) == (
        "generation_config.json asks for num_beams 4, repetition_penalty 1.3 and no_repeat_ngram_size 2, "
        "which answers do not follow; a request may ask for repetition_penalty"
    )
    said(tmp_path, begin_suppress_tokens=list(range(40)))
    line = unsupported_settings(tmp_path, DECODER)
    assert line.startswith("generation_config.json asks for begin_suppress_tokens [0, 1, 2")
    assert line.endswith(", which answers do not follow") and len(line) < 140


@pytest.mark.parametrize(
    ("settings", "by"),
    [
        ({"min_length": 3}, (DECODER, READS, HEARS)),
        ({"min_new_tokens": 3}, (DECODER, READS, HEARS)),
        ({"forced_eos_token_id": 0}, (DECODER, READS, HEARS)),
        ({"sequence_bias": [[[4], -2.0]]}, (DECODER, READS, HEARS)),
        ({"begin_suppress_tokens": [4]}, (DECODER,)),
        ({"forced_bos_token_id": 0}, (DECODER,)),
        ({"encoder_no_repeat_ngram_size": 3}, (READS,)),
        ({"encoder_repetition_penalty": 1.5}, (READS,)),
        ({"return_timestamps": True}, (HEARS,)),
        ({"suppress_tokens": [4], "bad_words_ids": [[5]], "do_sample": True, "top_k": 20}, ()),
        ({"max_new_tokens": 20, "length_penalty": 2.0, "early_stopping": True, "use_cache": False}, ()),
        ({"repetition_penalty": 1, "min_length": 0, "num_beams": 1, "no_repeat_ngram_size": None}, ()),
        ({"guidance_scale": 1.0, "token_healing": False, "begin_suppress_tokens": [], "penalty_alpha": 0.0}, ()),
    ],
)  # fmt: skip
def test_it_is_named_where_it_would_change_tokens(
    settings: dict[str, Any], by: tuple[ServeConfig, ...], tmp_path: Path
) -> None:
    said(tmp_path, **settings)
    for served in (DECODER, READS, HEARS):
        assert (next(iter(settings)) in unsupported_settings(tmp_path, served)) is (served in by)


def test_every_setting_of_the_library_is_judged() -> None:
    """One that a later release has may change tokens: it goes into a table of `generation`, or here."""
    tables = (generation._NEUTRAL, generation._NEUTRAL_FOR_DECODERS, generation._NEUTRAL_FOR_TEXT_SOURCES)
    named = {name for table in tables for name in table}
    followed = {"bad_words_ids", "suppress_tokens", "eos_token_id", "decoder_start_token_id"}
    requests_say = {"max_length", "max_new_tokens", "do_sample", "num_return_sequences"}
    draws = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    beams = {"early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"}
    # Of what is computed, which leads to the same tokens, and of what is told beside them.
    same = {
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "use_mtp", "is_assistant", "speculation_type",
        "prompt_lookup_num_tokens", "max_matching_ngram_size", "compile_config", "disable_compile", "low_memory",
        "prefill_chunk_size", "continuous_batching_config", "renormalize_logits", "remove_invalid_values", "pad_token_id",
        "bos_token_id", "return_dict_in_generate", "transformers_version",
    }  # fmt: skip
    told = ("assistant_", "num_assistant_", "target_", "output_", "_")
    known = named | followed | requests_say | draws | beams | same
    settings = {name for name in vars(transformers.GenerationConfig()) if not name.startswith(told)}
    assert settings <= known


def test_without_a_file_of_their_own_the_configuration_counts_and_a_part_of_it(tmp_path: Path) -> None:
    """As transformers reads it, which an own file replaces."""
    said(tmp_path, "config.json", num_beams=4, text_config={"no_repeat_ngram_size": 3, "num_beams": 5})
    theirs = transformers.GenerationConfig.from_model_config(
        json.loads((tmp_path / "config.json").read_text())
    )
    assert (theirs.num_beams, theirs.no_repeat_ngram_size) == (4, 3)
    assert unsupported_settings(tmp_path, DECODER) == (
        "config.json asks for num_beams 4 and no_repeat_ngram_size 3, which answers do not follow"
    )
    said(tmp_path, "config.json", num_beams=4, text_config="none")
    assert "asks for num_beams 4, which" in unsupported_settings(tmp_path, DECODER)
    said(tmp_path, eos_token_id=2)
    assert unsupported_settings(tmp_path, DECODER) == ""


def test_nothing_is_said_of_what_does_nothing(tmp_path: Path) -> None:
    without_end = ServeConfig(cache="kv", max_sequence=8, vocabulary=50)
    vectors = ServeConfig(cache="recompute", max_sequence=8, vocabulary=50, outputs=(EMBEDDING,))
    assert unsupported_settings(tmp_path, DECODER) == ""  # no file says anything
    said(tmp_path, min_length=3)
    assert unsupported_settings(tmp_path, without_end) == "" != unsupported_settings(tmp_path, DECODER)
    assert unsupported_settings(tmp_path, vectors) == ""
    assert unsupported_settings(tmp_path / "generation_config.json", DECODER) == ""  # as a GGUF file


def test_the_graph_of_an_export_withholds_nothing(tmp_path: Path) -> None:
    said(tmp_path, suppress_tokens=[4], bad_words_ids=[[5]])
    assert unsupported_settings(tmp_path, DECODER) == ""
    for name in ("fusion.json", "inference.graph"):
        (tmp_path / name).touch()
    line = unsupported_settings(tmp_path, DECODER)
    assert "suppress_tokens [4] and bad_words_ids [[5]], which" in line


def test_tensors_that_a_model_has_no_place_for_are_named_in_one_line(tmp_path: Path) -> None:
    assert ignored_settings(tmp_path, DECODER, ()) == []
    said(tmp_path, min_length=3)
    first, second = ignored_settings(tmp_path, DECODER, ("score.weight",))
    assert first == unsupported_settings(tmp_path, DECODER) != ""
    assert second == "its files hold tensors that the model has no place for: 'score.weight'"
    (line,) = ignored_settings(tmp_path / "m.gguf", DECODER, ("a\n", *"bcde", 100 * "f"))
    assert line.endswith(r"for: 'a\n', 'b', 'c' and 3 more")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"default_prompt_name": "q", "prompts": {"q": "query:\\n"}}', 'puts "query:\\n" before every text'),
        ('{"default_prompt_name": null, "prompts": {"q": "query: "}}', ""),
        ('{"default_prompt_name": "q", "prompts": {"q": ""}}', ""),
        ('{"default_prompt_name": ["q"], "prompts": {"q": 1}}', ""),
        ('{"default_prompt_name": "q"}', ""),
        ("[", ""),
    ],
)
def test_a_prompt_that_vectors_are_made_without_is_named(content: str, line: str, tmp_path: Path) -> None:
    vectors = ServeConfig(cache="recompute", max_sequence=8, vocabulary=50, outputs=(EMBEDDING,))
    (tmp_path / "config_sentence_transformers.json").write_text(content)
    assert ignored_settings(tmp_path, vectors, ()) == []  # another library's files
    (tmp_path / "modules.json").write_text("[]")
    found = ignored_settings(tmp_path, vectors, ())
    assert len(found) == bool(line) and all(line in each and "\n" not in each for each in found)
