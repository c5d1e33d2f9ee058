"""A language model in a GGUF file of llama.cpp, causal or an embedding model: the module that transformers builds from the file's metadata,
with the file's tensors.

As with a directory, only the machine that launches a job reads one. The module is built without memory for its parameters, which are read a
stage at a time, under their names in the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fusion.dag.ir.graph import Graph, Variable
from fusion.dag.rewrites.expert_groups import part_of
from fusion.dag.rewrites.quantise import Layout, Source, Use
from fusion.runtime.capture.capture import capture_language_model, capture_text_encoder, variables_from_module
from fusion.runtime.capture.gguf.config import ModelConfig, model_config
from fusion.runtime.capture.gguf.header import GGUFHeader, read_header
from fusion.runtime.capture.gguf.stored import StoredParameter
from fusion.runtime.capture.gguf.tensors import divide_frequencies, set_constants, stored_parameters
from fusion.runtime.capture.gguf.tokenizer import GGUFTokenizer, read_tokenizer
from fusion.runtime.capture.gguf.weights import layout, opened_files, read_blocks, read_tensor
from fusion.runtime.capture.huggingface import config_for, hollow_module
from fusion.runtime.capture.model_dtype import FLOAT32
from fusion.runtime.capture.rope import fixed_length
from fusion.runtime.capture.text_encoder import Pooling
from fusion.runtime.planes.input_sizes import TORCH_DTYPES


@dataclass(frozen=True)
class GGUFModel:
    header: GGUFHeader
    module: nn.Module  # with computed tables in memory and parameters on the meta device
    vocabulary: int
    max_sequence: int
    tokenizer: GGUFTokenizer
    stored: Mapping[str, StoredParameter]  # by parameter name
    pooling: Pooling | None = None  # of an embedding model

    @property
    def quantised(self) -> bool:
        """Whether some of its matrices have a `layout`."""
        return any(layout(stored) is not None for stored in self.stored.values())

    def capture(self) -> Graph:
        """The graph for inference; see `capture_language_model` and `capture_text_encoder`."""
        if self.pooling is not None:
            return capture_text_encoder(self.module, self.pooling, maximum_sequence=self.max_sequence)
        return capture_language_model(self.module, training=False, maximum_sequence=self.max_sequence)

    def read(self, variables: Iterable[Variable]) -> dict[str, torch.Tensor]:
        """The values of these variables, in the dtype of the graph. JobError where the file has changed."""
        attributes = variables_from_module(self.module)
        values: dict[str, torch.Tensor] = {}
        stored_variables: list[tuple[Variable, StoredParameter]] = []
        for variable in variables:
            stored = self._stored(variable)
            if stored is not None:
                stored_variables.append((variable, stored))
            else:  # a table that the module computes
                values[variable.name] = attributes[variable.name].clone()
        with opened_files() as open_file:
            for variable, stored in sorted(stored_variables, key=lambda item: _position(item[1])):
                dtype = TORCH_DTYPES[variable.type.dtype]
                values[variable.name] = read_tensor(open_file, stored, dtype, _experts(variable))
        return values

    def layout(self, variable: Variable, uses: frozenset[Use]) -> Layout | None:
        """The layout of a matrix in the file, if our operators can read it; else None."""
        stored = self._stored(variable)
        if stored is None or ("expert_linear" not in uses and stored.transposed != ("addmm" in uses)):
            return None
        return layout(stored)

    def read_stored(self, source: Source) -> tuple[torch.Tensor, ...]:
        """The tensors of a matrix that has a `layout`, as they are in the file. JobError as in `read`."""
        stored = self._stored(source.variable)
        assert stored is not None and stored.transposed == source.transposed
        with opened_files() as open_file:
            return read_blocks(open_file, stored, _experts(source.variable))

    def _stored(self, variable: Variable) -> StoredParameter | None:
        part = part_of(variable.name)
        names = (variable.name, *variable.aliases) if part is None else (part.name,)
        return next((self.stored[name] for name in names if name in self.stored), None)


def _experts(variable: Variable) -> range | None:
    """The experts of its parameter that a variable has; None for all."""
    part = part_of(variable.name)
    return None if part is None else range(part.start, part.stop)


def _position(stored: StoredParameter) -> tuple[Path, int]:
    return stored.tensors[0].file, stored.tensors[0].offset


def open_gguf(path: Path, dtype: str = FLOAT32) -> GGUFModel:
    """Read the file's metadata, its tokenizer and the locations of its tensors; not the tensors. `dtype`: that of the computation. JobError,
    in one line, for a damaged file, or where anything would have to be guessed."""
    header = read_header(path)
    config = model_config(header)
    tokenizer = read_tokenizer(header, config.architecture)
    module = _module(config, path, dtype)
    stored = stored_parameters(header, config, module)
    divide_frequencies(header, module)
    set_constants(config, module)
    return GGUFModel(
        header=header,
        module=module,
        vocabulary=config.vocabulary,
        max_sequence=min(config.max_sequence, fixed_length(module.config) or config.max_sequence),
        tokenizer=tokenizer,
        stored=stored,
        # Files do not say whether vectors are normalised; llama.cpp's server normalises them.
        pooling=None if config.pooling is None else Pooling(config.pooling, normalized=True),
    )


def _module(config: ModelConfig, path: Path, dtype: str) -> nn.Module:
    """The module, without an encoder's pooler, which files do not have and embeddings do not use."""
    values = config_for(config.model_type, config.values, path)
    if config.pooling is None:
        return hollow_module(values, path, dtype)
    module = hollow_module(values, path, dtype, "AutoModel")
    if getattr(module, "pooler", None) is not None:
        module.register_module("pooler", None)
    return module
