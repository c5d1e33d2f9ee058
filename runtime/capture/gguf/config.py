"""What a GGUF file says of its model, as the configuration of the same model in transformers.

A value that is passed over, or taken for another, makes a model that answers, and answers nonsense. So every value under the
architecture's name has to be understood here, and the sizes have to be those of the tensors; the file is refused otherwise.
What files leave unsaid is what llama.cpp, whose format it is, takes for it (its `src/models`).
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
    layers: int  # without those that predict further tokens
    ahead: int  # layers behind these that do, which are not read
    constants: Mapping[str, float]  # of parameters of the module that the file has among its values
    pooling: Pooled | None  # of a model that makes a vector of a text
    vocabulary: int
    max_sequence: int


def model_config(header: GGUFHeader) -> ModelConfig:
    """JobError for an architecture that is not read, a value that is missing or not understood, or one that does not fit
    the tensors."""
    said = Metadata(header)
    architecture = said.architecture
    mixture = said.whole("expert_count", 0) > 0
    if not mixture:
        said.must_be("expert_used_count", 0)
    table = _MIXTURES if mixture else _DENSE
    found = table.get(architecture)
    if found is None:
        kind = "a mixture of experts" if mixture else "a model"
        known = ", ".join(table)
        raise JobError(f"{header.path}: {kind} of the kind {shown(architecture)}; {known} are read from GGUF")
    model_type, values = found
    made = values(said)
    ahead = made.get("num_nextn_predict_layers", 0)
    config = ModelConfig(
        architecture=architecture,
        model_type=made.pop("model_type", model_type),
        constants=made.pop("constants", {}),
        values=made,
        layers=said.size("block_count") - ahead,
        pooling=pooling_of(said, encoder=architecture in ENCODERS),
        ahead=ahead,
        vocabulary=header.tensors["token_embd.weight"].shape[0],
        max_sequence=said.size("context_length"),
    )
    said.all_taken()
    return config
