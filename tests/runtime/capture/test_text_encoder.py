"""Models that make a vector of a text, against transformers and the poolings of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from support.embedding_model import FAMILIES, embedded, save

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import EMBEDDING
from fusion.runtime.planes.torch_plane import TorchPlane
from fusion.runtime.serving.graphs.stages import NO_OPTIMIZER

QUICK = ("bert", "roberta", "modernbert")
POOLINGS = ("mean_tokens", "cls_token", "lasttoken")


def vectors(model: sources.LanguageModel, texts: list[list[int]]) -> torch.Tensor:
    """Of each text by itself, over two stages."""
    graph = clean(model.inference)
    cuts = legal_cuts(graph)
    first, second = (
        TorchPlane("cpu").training(stage, model.read(stage.graph.variables), NO_OPTIMIZER)
        for stage in split(graph, (cuts[len(cuts) // 2],))
    )
    found = []
    for text in texts:
        made = first.evaluate({"input_ids": torch.tensor([text])})
        wanted = {i.name for i in split(graph, (cuts[len(cuts) // 2],))[1].graph.inputs}
        given = {**made, "input_ids": torch.tensor([text])}
        found.append(second.evaluate({name: given[name] for name in wanted})["result/0"])
    return torch.cat(found)


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_vectors_are_those_of_transformers_and_its_poolings(family: str, tmp_path: Path) -> None:
    pooling = POOLINGS[list(FAMILIES).index(family) % 3]
    normalized = family != "roberta"
    own = save(tmp_path, family, pooling, normalized=normalized)
    model = sources.in_files(tmp_path)
    assert model.about.outputs == (EMBEDDING,)
    longest = 128 if family in ("roberta", "xlm-roberta", "mpnet") else 130
    assert model.about.max_sequence == longest
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(2, 200, (n,), generator=generator).tolist() for n in (1, 7, 8, 40, longest)]
    found = vectors(model, texts)
    wanted = embedded(own, pooling, normalized, texts, FAMILIES[family].get("pad_token_id", 0))
    assert found.dtype == torch.float32
    assert float((found - wanted).abs().max()) < 2e-5 * float(wanted.abs().max())
    assert float((found - found[:1]).abs().max()) > 0.05  # they say something of the texts


def test_a_model_with_a_head_for_the_next_token_is_no_encoder_whatever_its_family_is(tmp_path: Path) -> None:
    """XLM's class ends in "Model" as those of bare encoders do."""
    config = transformers.XLMConfig(vocab_size=64, emb_dim=32, n_layers=1, n_heads=2, causal=True)
    transformers.XLMWithLMHeadModel(config).save_pretrained(tmp_path)
    assert sources.in_files(tmp_path).about.outputs == ()


def test_a_bare_encoder_gives_the_mean_of_its_tokens(tmp_path: Path) -> None:
    own = save(tmp_path, "bert", None)
    texts = [[3, 4, 5, 6], [9, 8]]
    assert torch.allclose(
        vectors(sources.in_files(tmp_path), texts), embedded(own, "mean_tokens", False, texts), atol=1e-5
    )


def test_of_a_model_that_fills_in_masks_the_encoder_is_served(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    own = transformers.BertForMaskedLM(config).eval()
    own.save_pretrained(tmp_path)
    texts = [[3, 4, 5, 6], [9, 8]]
    found = vectors(sources.in_files(tmp_path), texts)
    assert torch.allclose(found, embedded(own.bert, "mean_tokens", False, texts), atol=1e-5)


def test_half_precision_is_that_of_the_files_and_vectors_are_float32(tmp_path: Path) -> None:
    own = save(tmp_path, "bert", "mean_tokens", normalized=True, dtype="bfloat16")
    own.to(torch.bfloat16).save_pretrained(tmp_path)
    model = sources.in_files(tmp_path)
    assert model.dtype == "bfloat16"
    texts = [[3, 4, 5, 6, 7, 8], [9, 8]]
    found = vectors(model, texts)
    assert found.dtype == torch.float32
    assert float((found - embedded(own, "mean_tokens", True, texts).float()).abs().max()) < 2e-2


def test_the_longest_text_is_what_the_author_says(tmp_path: Path) -> None:
    save(tmp_path, "bert", "mean_tokens")
    (tmp_path / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": False})
    )
    assert sources.in_files(tmp_path).about.max_sequence == 64


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("modules.json", "[", "cannot be read"),
        ("modules.json", "5", "cannot be read"),
        ("modules.json", '[{"type": 1}]', "cannot be read"),
        ("modules.json", '[{"type": "a.Transformer", "path": ""}]', "in this order"),
        (
            "modules.json",
            '[{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "2"}]',
            "names Dense",
        ),
        (
            "modules.json",
            '[{"type": "a.Transformer", "path": "0_T"}, {"type": "a.Pooling", "path": "1_Pooling"}]',
            "lies in 0_T",
        ),
        ("1_Pooling/config.json", "{}", "not none"),
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "not max_tokens"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}',
            "not cls and mean",
        ),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(
    file: str, content: str, said: str, tmp_path: Path
) -> None:
    save(tmp_path, "bert", "mean_tokens")
    (tmp_path / file).write_text(content)
    with pytest.raises(JobError, match=said) as error:
        sources.in_files(tmp_path)
    assert "\n" not in str(error.value)


def test_a_model_that_generates_is_none_that_makes_vectors(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=90, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    for module in (transformers.GPT2LMHeadModel(config), transformers.GPT2Model(config)):
        module.save_pretrained(tmp_path)
        assert not sources.in_files(tmp_path).about.outputs
