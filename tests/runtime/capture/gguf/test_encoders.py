"""GGUF files of models that make a vector of a text, against the transformers model that was converted; a tokenizer of word pieces,
against the one that BERT has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import PoolingType
from support import gguf_conversion, gguf_files
from support.embedding_model import SHAPE
from support.families import COMMON
from tokenizers import Tokenizer

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.capture.gguf.header import read_header
from fusion.runtime.capture.gguf.tokenizer import read_tokenizer
from fusion.runtime.capture.gguf_model import open_gguf
from fusion.runtime.capture.quantised_weights import stored_model
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import EMBEDDING
from fusion.runtime.planes.torch_plane import TorchPlane
from fusion.runtime.serving.graphs.stages import NO_OPTIMIZER

WIDE = {**COMMON, **SHAPE, "hidden_size": 64, "intermediate_size": 128}
FAMILIES: dict[str, tuple[dict[str, Any], PoolingType]] = {
    "bert": ({}, PoolingType.CLS),
    "nomic_bert": (
        {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        PoolingType.MEAN,
    ),
    "qwen3": ({"num_key_value_heads": 2, "head_dim": 16}, PoolingType.LAST),
}


def written(path: Path, family: str, kind: str = "F16", **more: Any) -> Any:
    """The model that the file stands for."""
    said, pooling = FAMILIES[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**WIDE, **said})
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
    architecture = gguf_conversion.FAMILIES[family][0]
    values = {"pooling_type": int(pooling), **more}
    return gguf_conversion.write(
        path,
        model,
        kind,
        more={f"{architecture}.{key}": value for key, value in values.items()},
        modify=gguf_conversion.headless if family == "qwen3" else None,
    )


def vectors(model: sources.LanguageModel, text: list[int], kept: bool) -> torch.Tensor:
    """Over three stages."""
    graph, read = clean(model.inference), model.read
    if kept:
        assert model.blocks is not None
        graph, read = stored_model(graph, read, model.blocks)
        assert any(node.op.startswith("fusion.linear_int") for node in graph.nodes)
    cuts = legal_cuts(graph)
    values = {"input_ids": torch.tensor([text])}
    for stage in split(graph, (cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3])):
        plane = TorchPlane("cpu").training(stage, read(stage.graph.variables), NO_OPTIMIZER)
        values |= plane.evaluate({each.name: values[each.name] for each in stage.graph.inputs})
    return values["result/0"]


QUICK = ("nomic_bert", "Q8_0")
SLOW = [(family, kind) for family in FAMILIES for kind in ("F16", "Q8_0") if (family, kind) != QUICK]


@pytest.mark.parametrize(
    ("family", "kind"), [QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_vectors_are_those_of_the_model_that_was_converted(family: str, kind: str, tmp_path: Path) -> None:
    """With a length of 1, as llama.cpp gives them."""
    pooling = FAMILIES[family][1]
    held = written(tmp_path / "model.gguf", family, kind)
    model = sources.in_files(tmp_path / "model.gguf")
    assert model.about.outputs == (EMBEDDING,)
    found = []
    for length in (1, 60):
        ids = torch.randint(2, 200, (1, length))
        with torch.no_grad():
            hidden = held(ids).last_hidden_state[0]
        wanted = {PoolingType.MEAN: hidden.mean(0), PoolingType.CLS: hidden[0], PoolingType.LAST: hidden[-1]}[
            pooling
        ]
        found.append(vectors(model, ids[0].tolist(), kind == "Q8_0")[0])
        assert float((found[-1] - torch.nn.functional.normalize(wanted, dim=0)).abs().max()) <= 1e-4
    assert float((found[0] - found[1]).abs().max()) > 0.05  # they say something of the texts


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("bert", {"pooling_type": 0}, "pooling_type = 0: 1 (mean), 2 (first token) or 3 (last token)"),
        ("qwen3", {"pooling_type": 4}, "pooling_type = 4: 1 (mean)"),
        ("bert", {"attention.causal": True}, "attention.causal = True: False"),
        ("bert", {"context_length": 64}, "position_embd.weight has the shape (130, 64)"),
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers = 2: 0"),
    ],
)
def test_what_would_make_other_vectors_is_refused_in_one_line(
    family: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written(tmp_path / "model.gguf", family, **more)
    with pytest.raises(JobError) as refused:
        open_gguf(tmp_path / "model.gguf")
    assert message in str(refused.value) and str(refused.value).isprintable()


# --- word pieces

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "[unused1]",
    "the",
    "cafe",
    "un",
    "##aff",
    "##able",
    "!",
    "\u4e2d",
    "##s",
    "s",
]
TEXTS = (
    "The caf\u00e9s unaffable!",
    "  the\tCAFE \u4e2dthe [MASK] s",
    "xyz the",
    "un\u200baffable\u00a0s",
    "",
)


def as_in_files(piece: str) -> str:
    """conversion/bert.py: pieces that begin a word are marked."""
    if piece.startswith(("[", "\u2581")) and piece != "[unused1]":
        return piece
    return piece[2:] if piece.startswith("##") else f"\u2581{piece}"


def word_pieces(pieces: list[str], **ids: str) -> Any:
    def add(writer: Any) -> None:
        tokens = [as_in_files(piece) for piece in pieces]
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("jina-v2-en")
        writer.add_token_list(tokens)
        writer.add_token_types(
            [gguf_files.CONTROL if n < 5 else gguf_files.NORMAL for n in range(len(tokens))]
        )
        for name, token in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", pieces.index(token))

    return add


ENDS = {"unknown": "[UNK]", "cls": "[CLS]", "seperator": "[SEP]", "padding": "[PAD]", "mask": "[MASK]"}


def test_a_text_has_the_word_pieces_that_bert_makes_of_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.tokenizer_only(path, word_pieces(PIECES, **ENDS), "bert")
    made = read_tokenizer(read_header(path), "bert").file
    assert made is not None
    found = Tokenizer.from_str(made.decode())
    own = transformers.BertTokenizer(vocab={piece: n for n, piece in enumerate(PIECES)}, do_lower_case=True)
    for text in TEXTS:
        assert found.encode(text).ids == own(text)["input_ids"], text
    assert found.encode(TEXTS[0]).tokens == [
        "[CLS]",
        "the",
        "cafe",
        "##s",
        "un",
        "##aff",
        "##able",
        "!",
        "[SEP]",
    ]


@pytest.mark.parametrize(
    ("pieces", "ids", "message"),
    [
        ([*PIECES, "Paris"], ENDS, "files do not say how capitals are read"),
        (PIECES, {**ENDS, "unknown": ""}, "does not say tokenizer.ggml.unknown_token_id"),
        (["[pad]", *PIECES[1:], "\u2581[pad]"], {**ENDS, "padding": "[pad]"}, "the same token twice"),
    ],
)
def test_pieces_that_would_be_read_otherwise_are_refused(
    pieces: list[str], ids: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.tokenizer_only(path, word_pieces(pieces, **{k: v for k, v in ids.items() if v}), "bert")
    with pytest.raises(JobError) as refused:
        read_tokenizer(read_header(path), "bert")
    assert message in str(refused.value)
