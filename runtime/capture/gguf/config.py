"""Converts the metadata of a GGUF file to the configuration of the same model in transformers.

A value that is ignored or misread gives a model that answers nonsense. So every value under the architecture's name has to be
understood here, and the sizes have to match the tensors; otherwise the file is refused. Defaults are those of llama.cpp, whose
format it is (its `src/models`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusion.runtime.capture.gguf.dense import DENSE
from fusion.runtime.capture.gguf.encoders import ENCODERS, Pooled, pooling_of
from fusion.runtime.capture.gguf.gemma import GEMMA_MIXTURES, GEMMAS
from fusion.runtime.capture.gguf.header import GGUFHeader, shown
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
    architecture: str  # as the file names it
    model_type: str  # as transformers does
    values: Mapping[str, Any]  # of the configuration
    layers: int  # without those of multi-token prediction
    ahead: int  # layers of multi-token prediction behind these, which are not read
    constants: Mapping[str, float]  # parameters of the module that the file has as metadata
    pooling: Pooled | None  # of an embedding model
    vocabulary: int
    max_sequence: int


def model_config(header: GGUFHeader) -> ModelConfig:
    """Raises JobError for an unsupported architecture, and a value that is missing, not understood, or does not fit the tensors."""
    metadata = Metadata(header)
    architecture = metadata.architecture
    mixture = metadata.whole("expert_count", 0) > 0
    if not mixture:
        metadata.must_be("expert_used_count", 0)
    table = _MIXTURES if mixture else _DENSE
    found = table.get(architecture)
    if found is None:
        kind = "a mixture of experts" if mixture else "a model"
        known = ", ".join(table)
        raise JobError(f"{header.path}: {kind} of the kind {shown(architecture)}; {known} are read from GGUF")
    model_type, values = found
    made = values(metadata)
    ahead = made.get("num_nextn_predict_layers", 0)
    config = ModelConfig(
        architecture=architecture,
        model_type=made.pop("model_type", model_type),
        constants=made.pop("constants", {}),
        values=made,
        layers=metadata.size("block_count") - ahead,
        pooling=pooling_of(metadata, encoder=architecture in ENCODERS),
        ahead=ahead,
        vocabulary=header.tensors["token_embd.weight"].shape[0],
        max_sequence=metadata.size("context_length"),
    )
    metadata.all_taken()
    return config
