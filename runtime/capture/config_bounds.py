"""Bounds on the sizes in a Hugging Face configuration, checked before transformers builds anything from it: a small file from a stranger must not
exhaust the memory of whoever opens it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from fusion.runtime.job.errors import JobError

# Name pattern -> largest count: the library builds lists of that length before it checks anything.
_MAX_COUNTS = (
    (r"(.*_)?(n|num)_(\w+_)?(layers?|blocks|experts)|(en|de)coder_(num_)?(hidden_)?layers|depth|attention_types", 10_000),
    ("num_labels", 1 << 17),
    ("max_position_embeddings|n_positions|max_(source|target)_positions", 1 << 24),
)  # fmt: skip
# Models that build a causal mask, positions by positions; whether one for each layer.
_MASK_TABLES = {"gpt_bigcode": False, "gpt_neo": True, "openai-gpt": True}
# Models that build a table of sines, positions by hidden size or rotary size; whether one for each layer.
_SINE_TABLES = {"gptj": True, "codegen": True} | dict.fromkeys(
    ("ctrl", "fsmt", "m2m_100", "marian", "pegasus", "roformer", "xglm"), False
)
_MAX_TABLE_ELEMENTS = 1 << 29  # numbers: 16,384 positions in two layers


def check_counts(values: Mapping[str, Any], directory: Path) -> None:
    """Raises JobError for counts from which the library would build lists that exhaust memory or time."""
    pending: list[tuple[str, Any]] = [*values.items()]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list):
            pending += [(name, each) for each in value]
        elif isinstance(value, int):
            limit = next((limit for names, limit in _MAX_COUNTS if re.fullmatch(names, name[:100])), value)
            if value > limit:
                raise JobError(f"{directory}/config.json: {name:.100} is {value!s:.40}; the limit is {limit}")


def check_tables(config: Any, directory: Path) -> None:
    """Raises JobError for a configuration, or one nested in it, whose tables would exhaust the memory."""
    kind = str(getattr(config, "model_type", None))
    each_layer = (_MASK_TABLES | _SINE_TABLES).get(kind)
    if each_layer is not None:
        positions, layers = config.max_position_embeddings, config.num_hidden_layers if each_layer else 1
        width = (
            positions if kind in _MASK_TABLES else getattr(config, "rotary_dim", None) or config.hidden_size
        )
        sizes = [size for size in (positions, width, layers) if isinstance(size, int)]
        if len(sizes) == 3 and prod(sizes) > _MAX_TABLE_ELEMENTS:
            raise JobError(
                f"{directory}/config.json: {positions} positions are more than a model of the kind {config.model_type} is built with: "
                f"its tables would have more than {_MAX_TABLE_ELEMENTS} numbers"
            )
    for name in getattr(config, "sub_configs", ()):
        check_tables(getattr(config, name, None), directory)
