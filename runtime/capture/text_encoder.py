"""Embedding models in sentence-transformers directories: which directories hold one, and the pooling of its token vectors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import json_object, json_value

MODULES_FILE = "modules.json"
LIMITS_FILE = "sentence_bert_config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
POOLING_FILE = "config.json"  # in the folder of the module
_SERVED = ("Transformer", "Pooling", "Normalize")
# Name in files -> Pooling.kind.
_POOLINGS: dict[str, Literal["mean", "first", "last"]] = {"mean": "mean", "cls": "first", "lasttoken": "last"}
_MODE = "pooling_mode_"  # prefix of the flags of older files
_LONG_NAMES = {"mean_tokens": "mean", "cls_token": "cls"}
_MIN_NORM = 1e-12  # as torch's normalize


@dataclass(frozen=True)
class Pooling:
    """`tokens`: the length of the longest text, where files limit it."""

    kind: Literal["mean", "first", "last"] = "mean"
    normalized: bool = False
    tokens: int | None = None


class Embedding(nn.Module):
    """Texts of one length, `input_ids` (batch, sequence) -> vectors (batch, hidden), float32."""

    def __init__(self, module: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.module = module
        self.pooling = pooling

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.module(input_ids=values[0]).last_hidden_state
        match self.pooling.kind:
            case "mean":
                vectors = hidden.mean(1)
            case "first":
                vectors = hidden[:, 0]
            case "last":
                vectors = hidden[:, -1]
        if self.pooling.normalized:
            vectors = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(_MIN_NORM)
        return vectors.float()


def pooling_of(directory: Path, *, encoder: bool) -> Pooling | None:
    """The pooling; None for a directory whose model generates. `encoder`: whether it holds a bare encoder, which gets mean pooling where
    sentence-transformers' files are missing. JobError for unsupported settings in these files."""
    modules = directory / MODULES_FILE
    if modules.is_file():
        return _configured_pooling(directory, modules)
    return Pooling() if encoder else None


def _configured_pooling(directory: Path, modules: Path) -> Pooling:
    try:
        steps = [(str(step["type"]).rpartition(".")[2], str(step["path"])) for step in json_value(modules)]
    except (TypeError, KeyError) as error:
        raise JobError(f"{modules} cannot be read: {error}") from error
    kinds = [kind for kind, _ in steps]
    for kind in kinds:
        if kind not in _SERVED:
            raise JobError(f"{modules} names {kind:.40}; served are {', '.join(_SERVED)}")
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise JobError(f"{modules}: {', '.join(_SERVED)} in this order, not {', '.join(kinds):.80}")
    (_, model_path), (_, pooling), *_ = steps
    if model_path:
        raise JobError(
            f"{modules}: the model lies in {model_path:.80}; serve a directory that has it at its top"
        )
    limits = directory / LIMITS_FILE
    limit = json_object(limits) if limits.is_file() else {}
    if limit.get("do_lower_case"):
        raise JobError(f"{limits}: do_lower_case is left to the tokenizer: write it into tokenizer.json")
    tokens = limit.get("max_seq_length")
    return Pooling(
        _pooling_kind(directory / Path(pooling).name / POOLING_FILE),
        "Normalize" in kinds,
        tokens if type(tokens) is int and tokens > 0 else None,
    )


def _pooling_kind(path: Path) -> Literal["mean", "first", "last"]:
    settings = json_object(path)
    if isinstance(settings.get("pooling_mode"), str):
        chosen = [settings["pooling_mode"]]
    else:
        names = [
            name.removeprefix(_MODE) for name, on in settings.items() if name.startswith(_MODE) and on is True
        ]
        chosen = [_LONG_NAMES.get(name, name) for name in names]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise JobError(f"{path}: one of {', '.join(_POOLINGS)}, not {' and '.join(chosen) or 'none':.80}")
    return _POOLINGS[chosen[0]]


def unapplied_prompt(directory: Path) -> str:
    """A line on the default prompt that sentence-transformers would prepend to every text, which is not done here; else empty."""
    path = directory / PROMPTS_FILE
    try:
        settings = json_object(path) if (directory / MODULES_FILE).is_file() else {}
    except JobError:
        return ""  # many have no such file
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str) or not prompt:
        return ""
    return f"{PROMPTS_FILE} puts {json.dumps(prompt):.60} before every text, which vectors do not follow: write it there"


def usable_positions(module: nn.Module, longest: int) -> int:
    """The length of the longest text: position tables that begin with padding rows (RoBERTa's) have fewer for text."""
    for name, part in module.named_modules():
        if (
            name.endswith("position_embeddings")
            and isinstance(part, nn.Embedding)
            and part.padding_idx is not None
        ):
            longest = min(longest, part.num_embeddings - part.padding_idx - 1)
    return longest
