"""The tensors of a GGUF file as the parameters of a transformers module: which is which, and what llama.cpp's conversion
did to them, undone. Read a tensor at a time, a few rows at once; blocks of quantised numbers become numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fusion.runtime.capture.gguf.blocks import unpacked
from fusion.runtime.capture.gguf.config import FAR_FACTORS, NEAR_FACTORS, ROPE_FACTORS, ModelConfig
from fusion.runtime.capture.gguf.header import GGUFHeader, TensorPlace, shown
from fusion.runtime.job.errors import JobError

CHUNK_BYTES = 8 << 20  # of the file, at once
_OF_ROTARY = {"llama": {ROPE_FACTORS}, "phi3": {NEAR_FACTORS, FAR_FACTORS}}  # tensors that are no parameters
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Stored:
    """A parameter, as the file has it."""

    place: TensorPlace
    # If any: the two halves of each head's rows, which are rotated together, alternate in the file.
    heads: int = 0
    plus_one: bool = False  # the file has 1 more than the parameter, as llama.cpp has no Gemma's norm
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape[::-1] if self.transposed else self.place.shape


def stored_parameters(header: GGUFHeader, config: ModelConfig, module: nn.Module) -> dict[str, Stored]:
    """How the file has each parameter of the module, under its first name. JobError where it lacks one, has one in another
    shape, or has tensors that the module does not."""
    names = _names(config, module)
    found: dict[str, Stored] = {}
    for parameter, value in module.named_parameters():
        name = names.get(parameter)
        place = header.tensors.get(name) if name is not None else None
        if place is None:
            raise JobError(f"{header.path}: no tensor {name or 'for'} ({parameter})")
        stored = _stored(place, config)
        if stored.shape != tuple(value.shape):
            raise JobError(
                f"{header.path}: {shown(place.name)} has the shape {stored.shape}, not {tuple(value.shape)}"
            )
        if not _readable(place.kind, place.block_bytes):
            raise JobError(f"{header.path}: {shown(place.name)} is in {place.kind}, which is not read")
        found[parameter] = stored
    used = {stored.place.name for stored in found.values()}
    used |= _OF_ROTARY.get(config.architecture, set())
    for name in sorted(header.tensors.keys() - used):
        raise JobError(f"{header.path} has a tensor {shown(name)}, which no {config.model_type} model has")
    return found


def read_tensor(file: BufferedReader, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    """The parameter's value. Beside it, memory for CHUNK_BYTES of the file. JobError where the file ends before."""
    place = stored.place
    # What is added to a norm is taken away before anything is rounded.
    value = torch.empty(place.rows, place.shape[-1], dtype=torch.float32 if stored.plus_one else dtype)
    for first, rows in _chunks(file, place):
        value[first : first + len(rows)] = _decoded(rows, place.kind)
    value = value.view(place.shape)
    if stored.plus_one:
        value = (value - 1).to(dtype)
    value = _in_halves(value, stored.heads)
    return value.t().contiguous() if stored.transposed else value


def read_blocks(file: BufferedReader, stored: Stored) -> tuple[torch.Tensor, ...]:
    """Of a matrix whose kind of block has a `layout_of`: numbers, scales and perhaps minimums, of the rows of the file."""
    place = stored.place
    chunks = [unpacked(rows, place.kind, place.block_bytes) for _, rows in _chunks(file, place)]
    return tuple(_in_halves(torch.cat(parts), stored.heads) for parts in zip(*chunks, strict=True))


def _in_halves(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head that alternate, as two halves again."""
    if not heads:
        return value
    pairs = value.view(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _chunks(file: BufferedReader, place: TensorPlace) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """The first row, and rows (rows, bytes) from there, of the whole tensor."""
    step = max(1, CHUNK_BYTES // place.row_bytes)
    file.seek(place.offset)
    for first in range(0, place.rows, step):
        rows = np.empty((min(step, place.rows - first), place.row_bytes), np.uint8)
        if file.readinto(rows.data) < rows.nbytes:
            raise JobError(f"{file.name} ends in {shown(place.name)}: it is not whole")
        yield first, rows


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


def _names(config: ModelConfig, module: nn.Module) -> Mapping[str, str]:
    """What the file calls each parameter."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    architecture = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == config.architecture)
    table = get_tensor_name_map(architecture, config.layers)
    found = {}
    for parameter, _ in module.named_parameters():
        owner, _, kind = parameter.rpartition(".")
        name = table.get_name(owner)
        if name is not None:
            found[parameter] = f"{name}.{kind}"
    return found


def _stored(place: TensorPlace, config: ModelConfig) -> Stored:
    """What llama.cpp's conversion of this architecture does to the tensor."""
    part = place.name.rpartition(".")[0].rpartition(".")[2]  # "attn_q" of "blk.3.attn_q.weight"
    values: Mapping[str, Any] = config.values
    if config.architecture == "llama" and part in ("attn_q", "attn_k"):
        return Stored(
            place, heads=values["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        )
    if config.architecture.startswith("gemma") and part.endswith("norm"):
        return Stored(place, plus_one=True)
    if config.architecture == "gpt2" and place.name.startswith("blk.") and len(place.shape) == 2:
        return Stored(place, transposed=True)
    return Stored(place)
