"""The interface of codecs: a tensor to bytes and back. A codec knows no peers, stages or edges.

The receiver decodes with the shape and dtype of its own plan, never with those of a header; with the codec they
determine the layout, so no payload has a header of its own.

Lossy codecs take float32, float16 and bfloat16; every other dtype, and every tensor that would not become smaller, is sent
dense. No codec hides a divergence: a NaN or an infinity of the input is decoded as NaN or infinity, for the gates that check
for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
LOSSY = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class Encoded:
    """`buffers`, one after another, are the payload of a frame; they may share memory with the tensor."""

    buffers: tuple[memoryview, ...]
    indices: torch.Tensor | None = (
        None  # int32 (kept,), ascending, into the flat tensor; None: all elements were sent
    )

    @property
    def payload_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class Decoded:
    tensor: torch.Tensor
    indices: torch.Tensor | None  # as in `Encoded`


class Codec(Protocol):
    @property
    def name(self) -> str:
        """The canonical spelling: `codec(name)` is this codec."""

    def encode(self, tensor: torch.Tensor) -> Encoded:
        """The bytes of a CPU tensor of any shape and strides."""

    def cost(self, elements: int, dtype: str) -> int:
        """The exact payload bytes of `encode` for a tensor of so many elements."""

    def decode(self, payload: memoryview, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """The tensor, which may share memory with `payload`. ValueError if the bytes do not encode one of that shape."""


@runtime_checkable
class Sparse(Codec, Protocol):
    """Sends some of the elements; the others are zero at the receiver. The gradient of what the receiver computed
    is then exact at those positions and unused elsewhere, so the backward pass sends values alone."""

    def decode_sparse(self, payload: memoryview, shape: Sequence[int], dtype: str) -> Decoded:
        """As `decode`, with the positions."""

    def encode_at(self, tensor: torch.Tensor, indices: torch.Tensor | None) -> Encoded:
        """Encode the values at `indices`, which `encode` or `decode_sparse` gave for a tensor of this shape and dtype.
        ValueError for others."""

    def decode_at(
        self, payload: memoryview, shape: Sequence[int], dtype: str, indices: torch.Tensor | None
    ) -> torch.Tensor:
        """The tensor with the values at `indices`, zero elsewhere. ValueError if the bytes do not encode that."""


def elements_of(shape: Sequence[int]) -> int:
    return math.prod(shape)


def check_size(payload: memoryview, expected: int, shape: Sequence[int], dtype: str) -> None:
    if payload.nbytes != expected:
        raise ValueError(f"{payload.nbytes} bytes for {dtype}{list(shape)}: {expected} are right")


def byte_tensor(payload: memoryview) -> torch.Tensor:
    """uint8 (bytes,) over the payload's memory; a copy where torch could not view it as elements of 8 bytes."""
    if payload.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # torch wants memory that may be written; a payload straight off the wire is, so this copies only in tests.
    flat = torch.frombuffer(bytearray(payload) if payload.readonly else payload, dtype=torch.uint8)
    return flat.clone() if flat.data_ptr() % 8 else flat
