"""A tensor into bytes and back. A codec knows no peers, stages or edges.

The receiver decodes with the shape and dtype of its own plan, never with what a header says; a codec's header may
only hold what the plan does not determine (scales, counts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Encoded:
    """`buffers`, one after another, are the payload of a frame; they may share memory with the tensor."""

    buffers: tuple[memoryview, ...]
    header: Mapping[str, Any] = field(default_factory=dict)


class Codec(Protocol):
    name: str

    def encode(self, tensor: torch.Tensor) -> Encoded:
        """The bytes of a CPU tensor of any shape and strides."""

    def largest(self, shape: Sequence[int], dtype: str) -> int:
        """Bytes that a payload for this shape and dtype can have at most: the cap before anything is read."""

    def decode(
        self, payload: memoryview, header: Mapping[str, Any], shape: Sequence[int], dtype: str
    ) -> torch.Tensor:
        """The tensor, which may share memory with `payload`. ValueError where the bytes are not one of that shape."""


class Dense:
    """`none`: the elements as they lie in memory, little-endian. Nothing is copied on either side."""

    name = "none"

    def encode(self, tensor: torch.Tensor) -> Encoded:
        flat = tensor.detach().contiguous().reshape(-1)
        return Encoded((memoryview(flat.view(torch.uint8).numpy().data),))

    def largest(self, shape: Sequence[int], dtype: str) -> int:
        return _elements(shape) * DTYPES[dtype].itemsize

    def decode(
        self, payload: memoryview, header: Mapping[str, Any], shape: Sequence[int], dtype: str
    ) -> torch.Tensor:
        wanted = DTYPES[dtype]
        if payload.nbytes != self.largest(shape, dtype):
            raise ValueError(
                f"{payload.nbytes} bytes for {dtype}{list(shape)}: {self.largest(shape, dtype)} are right"
            )
        if payload.nbytes == 0:
            return torch.empty(tuple(shape), dtype=wanted)
        # torch wants memory that may be written; a payload straight off the wire is, so this copies only in tests.
        buffer = bytearray(payload) if payload.readonly else payload
        if wanted is torch.bool:  # any other byte than 0 and 1 is no bool, and what it would do is undefined
            return torch.frombuffer(buffer, dtype=torch.uint8).ne(0).reshape(tuple(shape))
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        if flat.data_ptr() % wanted.itemsize:
            flat = flat.clone()
        return flat.view(wanted).reshape(tuple(shape))


NONE = Dense()
CODECS: Mapping[str, Codec] = {NONE.name: NONE}


def codec(name: str) -> Codec:
    """ValueError for a codec that this peer does not have."""
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(
            f"codec {name[:40]!r} is not known here (known: {', '.join(sorted(CODECS))})"
        ) from None


def _elements(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
