"""A language model in a GGUF file, as llama.cpp has them, causal or one that makes a vector of a text: the module that transformers builds from what the file says,
with the file's tensors.

As with a directory, only the machine that launches a job reads one. The module is built without memory for its parameters;
they are read, a stage at a time, under the names that the module gives them.
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
from fusion.runtime.capture.gguf.stored import Stored
from fusion.runtime.capture.gguf.tensors import set_constants, stored_parameters, stretch
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
    module: nn.Module  # its computed tables in memory, its parameters on the meta device
    vocabulary: int
    max_sequence: int
    tokenizer: GGUFTokenizer
    stored: Mapping[str, Stored]  # parameter of the module -> as the file has it
    pooling: Pooling | None = None  # of a model that makes a vector of a text

    @property
    def quantised(self) -> bool:
        """Whether some of its matrices have a `layout`."""
        return any(layout(stored) is not None for stored in self.stored.values())

    def capture(self) -> Graph:
        """See `capture_language_model` and `capture_text_encoder`; to serve it."""
        if self.pooling is not None:
            return capture_text_encoder(self.module, self.pooling, maximum_sequence=self.max_sequence)
        return capture_language_model(self.module, training=False, maximum_sequence=self.max_sequence)

    def read(self, variables: Iterable[Variable]) -> dict[str, torch.Tensor]:
        """The values of these variables, in the dtype of the graph. JobError where the file is not what it was."""
        attributes = variables_from_module(self.module)
        found: dict[str, torch.Tensor] = {}
        wanted: list[tuple[Variable, Stored]] = []
        for variable in variables:
            stored = self._stored(variable)
            if stored is not None:
                wanted.append((variable, stored))
            else:  # a table that the module computed
                found[variable.name] = attributes[variable.name].clone()
        with opened_files() as opened:
            for variable, stored in sorted(wanted, key=lambda item: _begin(item[1])):
                dtype = TORCH_DTYPES[variable.type.dtype]
                found[variable.name] = read_tensor(opened, stored, dtype, _experts(variable))
        return found

    def layout(self, variable: Variable, uses: frozenset[Use]) -> Layout | None:
        """How the file has a matrix, where our operators can read it so."""
        stored = self._stored(variable)
        if stored is None or ("expert_linear" not in uses and stored.transposed != ("addmm" in uses)):
            return None
        return layout(stored)

    def read_stored(self, source: Source) -> tuple[torch.Tensor, ...]:
        """The parts of a matrix that has a `layout`, as they are in the file. JobError as of `read`."""
        stored = self._stored(source.variable)
        assert stored is not None and stored.transposed == source.transposed
        with opened_files() as opened:
            return read_blocks(opened, stored, _experts(source.variable))

    def _stored(self, variable: Variable) -> Stored | None:
        part = part_of(variable.name)
        names = (variable.name, *variable.aliases) if part is None else (part.name,)
        return next((self.stored[name] for name in names if name in self.stored), None)


def _experts(variable: Variable) -> range | None:
    """Those that a variable has of the parameter that it is a part of."""
    part = part_of(variable.name)
    return None if part is None else range(part.start, part.stop)


def _begin(stored: Stored) -> tuple[Path, int]:
    return stored.places[0].file, stored.places[0].offset


def open_gguf(path: Path, dtype: str = FLOAT32) -> GGUFModel:
    """Read what the file says of its model, its tokenizer, and where its tensors lie; not the tensors. `dtype`: that it runs in.
    JobError, in one line, for a file that is damaged, or of which anything would have to be guessed."""
    header = read_header(path)
    config = model_config(header)
    tokenizer = read_tokenizer(header, config.architecture)
    module = _module(config, path, dtype)
    stored = stored_parameters(header, config, module)
    stretch(header, module)
    set_constants(config, module)
    return GGUFModel(
        header=header,
        module=module,
        vocabulary=config.vocabulary,
        max_sequence=min(config.max_sequence, fixed_length(module.config) or config.max_sequence),
        tokenizer=tokenizer,
        stored=stored,
        # Vectors have a length of 1, as llama.cpp's server gives them; files do not say it.
        pooling=None if config.pooling is None else Pooling(config.pooling, normalized=True),
    )


def _module(config: ModelConfig, path: Path, dtype: str) -> nn.Module:
    """Without what an encoder would make of its first token, which files do not have and vectors of texts are made without."""
    values = config_for(config.model_type, config.values, path)
    if config.pooling is None:
        return hollow_module(values, path, dtype)
    module = hollow_module(values, path, dtype, "AutoModel")
    if getattr(module, "pooler", None) is not None:
        module.register_module("pooler", None)
    return module
