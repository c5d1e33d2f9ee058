"""Converts a GGUF file's metadata to the configuration of the same model in transformers.

A value that is ignored or misread gives a model that answers nonsense. So every value under the architecture's name has to be understood
here, and sizes have to match the tensors; otherwise the file is refused. Defaults are those of llama.cpp, which defines the format (its
`src/models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion.runtime.capture.gguf.dense import DENSE
from fusion.runtime.capture.gguf.encoders import ENCODERS, PoolingKind, pooling_of
from fusion.runtime.capture.gguf.gemma import GEMMA_MIXTURES, GEMMAS
from fusion.runtime.capture.gguf.header import GGUFHeader, quoted
from fusion.runtime.capture.gguf.latent import deepseek2
from fusion.runtime.capture.gguf.metadata import Metadata
from fusion.runtime.capture.gguf.mixtures import MIXTURES
from fusion.runtime.capture.gguf.older import OLDER
from fusion.runtime.capture.gguf.recurrent import RECURRENT, RECURRENT_MIXTURES
from fusion.runtime.job.errors import JobError

_DENSE = {**DENSE, **GEMMAS, **OLDER, **RECURRENT, **ENCODERS}
_MIXTURES = {**MIXTURES, **GEMMA_MIXTURES, **RECURRENT_MIXTURES, "deepseek2": ("deepseek_v2", deepseek2)}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    architecture: str  # its name in the file
    model_type: str  # its name in transformers
    values: Mapping[str, Any]  # of the configuration
    layers: int  # without layers of multi-token prediction
    nextn_layers: int  # layers of multi-token prediction after these, which are not read
    constants: Mapping[str, float]  # parameters of the module that are metadata of the file
    pooling: PoolingKind | None  # of an embedding model
    vocabulary: int
    max_sequence: int


def model_config(header: GGUFHeader) -> ModelConfig:
    """The configuration of the file's model. JobError for an unsupported architecture, and for a value that is missing, not understood, or
    does not fit the tensors."""
    metadata = Metadata(header)
    architecture = metadata.architecture
    mixture = metadata.integer("expert_count", 0) > 0
    if not mixture:
        metadata.require("expert_used_count", 0)
    table = _MIXTURES if mixture else _DENSE
    entry = table.get(architecture)
    if entry is None:
        kind = "a mixture of experts" if mixture else "a model"
        known = ", ".join(table)
        raise JobError(
            f"{header.path}: {kind} of the kind {quoted(architecture)}; {known} are read from GGUF"
        )
    model_type, make_values = entry
    configuration = make_values(metadata)
    nextn_layers = configuration.get("num_nextn_predict_layers", 0)
    config = ModelConfig(
        architecture=architecture,
        model_type=configuration.pop("model_type", model_type),
        constants=configuration.pop("constants", {}),
        values=configuration,
        layers=metadata.size("block_count") - nextn_layers,
        pooling=pooling_of(metadata, encoder=architecture in ENCODERS),
        nextn_layers=nextn_layers,
        vocabulary=header.tensors["token_embd.weight"].shape[0],
        max_sequence=metadata.size("context_length"),
    )
    metadata.require_all_read()
    return config
