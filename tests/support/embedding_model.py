"""A small embedding model, in a directory as sentence-transformers writes one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from support.source_tokenizer import tokenizer_of_sources
from tokenizers import Tokenizer, processors

SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 130, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "mpnet": {"pad_token_id": 1},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16},
    "deberta-v2": {},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "pad_token_id": 1},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
MODULES = ("Transformer", "Pooling", "Normalize")


def tokenizer() -> Tokenizer:
    """A tokenizer that puts <s> before a text and </s> after it."""
    made = tokenizer_of_sources()
    made.add_special_tokens(["<s>", "</s>"])
    ends = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return made


def save(
    directory: Path,
    family: str,
    pooling: str | None,
    *,
    normalized: bool = False,
    vocabulary: int = 200,
    **said: Any,
) -> Any:
    """Save a small model of the family. `pooling` is sentence-transformers' name of the method; None: without its files."""
    values = {**SHAPE, **FAMILIES[family], "vocab_size": vocabulary, **said}
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **values)).eval()
    model.save_pretrained(directory)
    if pooling is not None:
        kinds = MODULES if normalized else MODULES[:2]
        steps = [
            {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(kinds)
        ]  # fmt: skip
        (directory / "modules.json").write_text(json.dumps(steps))
        (directory / "1_Pooling").mkdir()
        modes = {
            f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken")
        }
        (directory / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 32, **modes, "include_prompt": True})
        )
    return model


@torch.no_grad()
def embedded(
    model: Any, pooling: str, normalized: bool, texts: Sequence[Sequence[int]], padding: int = 0
) -> torch.Tensor:
    """The embeddings as sentence-transformers computes them: all texts in one padded batch with a mask."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[padding] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[i < len(text) for i in range(longest)] for text in texts]).long()
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    if pooling == "mean_tokens":
        found = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    else:
        place = mask.sum(1) - 1 if pooling == "lasttoken" else torch.zeros(len(texts), dtype=torch.int64)
        found = hidden[torch.arange(len(texts)), place]
    return torch.nn.functional.normalize(found, dim=-1) if normalized else found
