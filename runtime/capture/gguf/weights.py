"""The tensors of a GGUF file as the parameters of a transformers module: which is which, and what llama.cpp's conversion
did to them, undone. Read a tensor at a time, a few rows at once; blocks of quantised numbers become numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fusion.runtime.capture.gguf.blocks import unpacked
from fusion.runtime.capture.gguf.config import ModelConfig
from fusion.runtime.capture.gguf.decoders import FAR_FACTORS, NEAR_FACTORS, ROPE_FACTORS
from fusion.runtime.capture.gguf.header import GGUFHeader, TensorPlace, shown
from fusion.runtime.job.errors import JobError

CHUNK_BYTES = 8 << 20  # of the file, at once
_PERMUTED = ("llama", "granite", "smollm3", "mistral3")  # architectures whose conversion is Llama's
_OF_ROTARY = {  # tensors that are no parameters
    **{name: {ROPE_FACTORS} for name in _PERMUTED},
    "phi3": {NEAR_FACTORS, FAR_FACTORS},
}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A parameter, as the file has it."""

    place: TensorPlace
    behind: TensorPlace | None = None  # whose rows follow in the parameter, for each expert
    interleaved: bool = False  # and lie between the others
    # If any: the two halves of each head's rows, which are rotated together, alternate in the file.
    heads: int = 0
    plus_one: bool = False  # the file has 1 more than the parameter, as llama.cpp has no Gemma's norm
    transposed: bool = False
    biases: bool = False  # of experts: read as matrices of one column

    @property
    def places(self) -> tuple[TensorPlace, ...]:
        return (self.place,) if self.behind is None else (self.place, self.behind)

    @property
    def experts(self) -> int:
        """Of which the parameter has a matrix each; 1 where it has one matrix, or one row."""
        return self.place.shape[0] if len(self.place.shape) == 3 else 1

    @property
    def laid(self) -> tuple[int, ...]:
        """The shape as the file has it."""
        if self.behind is None or len(self.place.shape) < 2:
            return self.place.shape
        *experts, rows, columns = self.place.shape
        return (*experts, rows + self.behind.shape[-2], columns)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.biases:
            return self.laid[:-1]
        return (*self.laid[:-2], *self.laid[:-3:-1]) if self.transposed else self.laid


def stored_parameters(header: GGUFHeader, config: ModelConfig, module: nn.Module) -> dict[str, Stored]:
    """How the file has each parameter of the module, under its first name, and each buffer that is stored with them. JobError where
    it lacks one, has one in another shape, or has tensors that the module does not."""
    names = _names(config, module)
    found: dict[str, Stored] = {}
    for parameter, value in _kept(module).items():
        missing = [name for name in names[parameter] if name not in header.tensors]
        if missing or not names[parameter]:
            raise JobError(f"{header.path}: no tensor {' and '.join(missing) or 'for'} ({parameter})")
        stored = _stored([header.tensors[name] for name in names[parameter]], config)
        if stored.shape != tuple(value.shape) or len({place.shape for place in stored.places}) > 1:
            named = " and ".join(shown(place.name) for place in stored.places)
            shapes = [stored.shape] if stored.behind is None else [place.shape for place in stored.places]
            said = " and ".join(map(str, shapes))
            raise JobError(f"{header.path}: {named} has the shape {said}, not {tuple(value.shape)}")
        for place in stored.places:
            if not _readable(place.kind, place.block_bytes):
                raise JobError(f"{header.path}: {shown(place.name)} is in {place.kind}, which is not read")
        found[parameter] = stored
    used = {place.name for stored in found.values() for place in stored.places}
    used |= _OF_ROTARY.get(config.architecture, set())
    for name in sorted(header.tensors.keys() - used):
        if not _predicts_further(name, config):
            raise JobError(
                f"{header.path} has a tensor {shown(name)}, which no {config.model_type} model has"
            )
    return found


def _kept(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, each under its first name, and buffers that are stored with them."""
    stored = module.state_dict()
    buffers = {name: value for name, value in module.named_buffers() if name in stored}
    return {**dict(module.named_parameters()), **buffers}


def _predicts_further(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is of the layers behind the model's own, where its kind has some; they are not read."""
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return (
        config.values.get("num_nextn_predict_layers", 0) > 0
        and block.isdecimal()
        and int(block) >= config.layers
    )


def read_tensor(
    file: BufferedReader, stored: Stored, dtype: torch.dtype, experts: range | None = None
) -> torch.Tensor:
    """The parameter's value, or that of these of its experts. Beside it, memory for CHUNK_BYTES of the file. JobError where the
    file ends before."""
    chosen = range(stored.experts) if experts is None else experts
    shape = stored.laid if len(stored.laid) < 3 else (len(chosen), *stored.laid[1:])
    # What is added to a norm is taken away before anything is rounded.
    value = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=torch.float32 if stored.plus_one else dtype)
    at = 0
    for place, rows in _chunks(file, stored, chosen):
        value[at : at + len(rows)] = _decoded(rows, place.kind)
        at += len(rows)
    value = value.view(shape)
    if stored.plus_one:
        value = (value - 1).to(dtype)
    value = _interleaved(_in_halves(value, stored.heads), stored)
    if stored.biases:
        return value.squeeze(-1)
    return value.mT.contiguous() if stored.transposed else value


def read_blocks(
    file: BufferedReader, stored: Stored, experts: range | None = None
) -> tuple[torch.Tensor, ...]:
    """Of a matrix whose kind of block has a `layout_of`, or of those of experts: numbers, scales and perhaps minimums, of the
    rows of the file."""
    chosen = range(stored.experts) if experts is None else experts
    chunks = [unpacked(rows, place.kind, place.block_bytes) for place, rows in _chunks(file, stored, chosen)]
    parts = [torch.cat(part) for part in zip(*chunks, strict=True)]
    if len(stored.laid) == 3:
        return tuple(_interleaved(part.view(len(chosen), stored.laid[1], -1), stored) for part in parts)
    return tuple(_in_halves(part, stored.heads) for part in parts)


def _in_halves(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head that alternate, as two halves again."""
    if not heads:
        return value
    pairs = value.view(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _interleaved(value: torch.Tensor, stored: Stored) -> torch.Tensor:
    """Rows of two tensors, one behind the other for each expert, as the parameter has them."""
    if not stored.interleaved:
        return value
    halves = value.view(len(value), 2, -1, value.shape[-1])
    return halves.transpose(1, 2).reshape(value.shape)


def _chunks(
    file: BufferedReader, stored: Stored, experts: range
) -> Iterator[tuple[TensorPlace, npt.NDArray[np.uint8]]]:
    """Rows (rows, bytes), in the order of the parameter, each with where they are from."""
    for expert in experts:
        for place in stored.places:
            each = place.rows // stored.experts
            step = max(1, CHUNK_BYTES // place.row_bytes)
            file.seek(place.offset + expert * each * place.row_bytes)
            for first in range(0, each, step):
                rows = np.empty((min(step, each - first), place.row_bytes), np.uint8)
                if file.readinto(rows.data) < rows.nbytes:
                    raise JobError(f"{file.name} ends in {shown(place.name)}: it is not whole")
                yield place, rows


def _decoded(rows: npt.NDArray[np.uint8], kind: str) -> torch.Tensor:
    plain = _PLAIN.get(kind)
    if plain is not None:
        return torch.from_numpy(rows).view(plain)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(
        invalid="ignore", over="ignore"
    ):  # a scale may be no number; then neither are its weights
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))


@functools.cache
def _readable(kind: str, block_bytes: int) -> bool:
    try:
        _decoded(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _names(config: ModelConfig, module: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """What the file calls each parameter, or what it is made of."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    architecture = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == config.architecture)
    table = get_tensor_name_map(architecture, config.layers)

    def known(owner: str, kind: str) -> str | None:
        name = table.get_name(owner)
        return None if name is None else f"{name}.{kind}"

    found = {}
    for parameter in _kept(module):
        owner, _, kind = parameter.rpartition(".")
        names = [known(owner, kind)]
        if kind == "e_score_correction_bias":  # that a router adds as it chooses, not as it weighs
            names = [known(parameter.removesuffix("_bias"), "bias")]
        elif owner.endswith(".experts"):
            matrix, kind = kind.removesuffix("_bias"), "bias" if kind.endswith("_bias") else "weight"
            parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
            names = [known(f"{owner}.{part}", kind) for part in parts]
        elif names == [None]:  # a parameter beside modules
            names = [known(parameter, "weight")]
        found[parameter] = tuple(name for name in names if name is not None)
    return found


def _stored(places: Sequence[TensorPlace], config: ModelConfig) -> Stored:
    """What llama.cpp's conversion of this architecture does to a tensor, or to two that are one parameter."""
    owner, _, kind = places[0].name.rpartition(".")
    part = owner.rpartition(".")[2]  # "attn_q" of "blk.3.attn_q.weight"
    values: Mapping[str, Any] = config.values
    if part.endswith("_exps"):
        biases, oss = kind == "bias", config.architecture == "gpt-oss"
        first, *behind = (replace(p, shape=(*p.shape, 1)) for p in places) if biases else places
        return Stored(
            first,
            behind[0] if behind else None,
            interleaved=oss and bool(behind),
            transposed=oss and not biases,
            biases=biases,
        )
    (place,) = places
    if config.architecture in _PERMUTED and part in ("attn_q", "attn_k"):
        return Stored(
            place, heads=values["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        )
    if config.architecture.startswith("gemma") and part.endswith("norm"):
        return Stored(place, plus_one=True)
    if config.architecture == "gpt2" and place.name.startswith("blk.") and len(place.shape) == 2:
        return Stored(place, transposed=True)
    if part == "ffn_gate_inp_shexp" and len(place.shape) == 1:  # a matrix of one row
        return Stored(replace(place, shape=(1, *place.shape)))
    return Stored(place)
