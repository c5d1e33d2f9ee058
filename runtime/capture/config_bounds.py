"""How much the configuration of a Hugging Face model may ask for, looked at before transformers builds anything by it: a file of few bytes, which
may be a stranger's, is not to fill the memory of whoever opens it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from fusion.runtime.job.errors import JobError

# Of what configurations count, the most that is built: the library makes lists of as many before it looks at anything.
_MOST = (
    (r"(.*_)?(n|num)_(\w+_)?(layers?|blocks|experts)|(en|de)coder_(num_)?(hidden_)?layers|depth|attention_types", 10_000),
    ("num_labels", 1 << 17),
    ("max_position_embeddings|n_positions|max_(source|target)_positions", 1 << 24),
)  # fmt: skip
# Kinds of models that make a table of which position sees which, positions by positions: one, or one for each layer.
_TABLES = {"gpt_bigcode": False, "gpt_neo": True, "openai-gpt": True}
# And a table of sines, positions by the size of the model, or of what of it they rotate.
_SINES = {"gptj": True, "codegen": True} | dict.fromkeys(
    ("ctrl", "fsmt", "m2m_100", "marian", "pegasus", "roformer", "xglm"), False
)
_MOST_IN_TABLES = 1 << 29  # numbers: 16,384 positions in two layers


def check_counts(values: Mapping[str, Any], directory: Path) -> None:
    """Raises JobError for counts from which the library would build lists that exhaust memory or time."""
    left: list[tuple[str, Any]] = [*values.items()]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, each) for each in value]
        elif isinstance(value, int):
            most = next((most for names, most in _MOST if re.fullmatch(names, name[:100])), value)
            if value > most:
                raise JobError(f"{directory}/config.json: {name:.100} is {value!s:.40}; the limit is {most}")


def check_tables(config: Any, directory: Path) -> None:
    """Raises JobError for a configuration, or one nested in it, whose tables would exhaust the memory."""
    kind = str(getattr(config, "model_type", None))
    each_layer = (_TABLES | _SINES).get(kind)
    if each_layer is not None:
        positions, layers = config.max_position_embeddings, config.num_hidden_layers if each_layer else 1
        width = positions if kind in _TABLES else getattr(config, "rotary_dim", None) or config.hidden_size
        sizes = [size for size in (positions, width, layers) if isinstance(size, int)]
        if len(sizes) == 3 and prod(sizes) > _MOST_IN_TABLES:
            raise JobError(
                f"{directory}/config.json: {positions} positions are more than a model of the kind {config.model_type} is built with: "
                f"its tables would have more than {_MOST_IN_TABLES} numbers"
            )
    for name in getattr(config, "sub_configs", ()):
        check_tables(getattr(config, name, None), directory)
