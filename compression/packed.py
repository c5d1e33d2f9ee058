"""`fp16`, `bf16`, `int8`, `int4`: every element in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fusion.compression.dense import NONE
from fusion.compression.encoding import (
    DTYPES,
    LOSSY,
    NAMES,
    Encoded,
    byte_tensor,
    check_size,
    elements_of,
)
from fusion.compression.spec import Spec
from fusion.compression.values import BFloat16, Blocks, Half, Packer, in_dtype

PACKERS: Mapping[str, Packer] = {"fp16": Half(), "bf16": BFloat16(), "int8": Blocks(8), "int4": Blocks(4)}


class Packed:
    def __init__(self, spec: Spec) -> None:
        self.name = str(spec)
        self._spec = spec
        self._packer = PACKERS[spec.family]

    def encode(self, tensor: torch.Tensor) -> Encoded:
        if goes_dense(self._spec, tensor.numel(), NAMES[tensor.dtype]):
            return NONE.encode(tensor)
        return Encoded((self._packer.pack(flat_floats(tensor)).numpy().data,))

    def cost(self, elements: int, dtype: str) -> int:
        return payload_bytes(self._spec, elements, dtype)

    def decode(self, payload: memoryview, shape: Sequence[int], dtype: str) -> torch.Tensor:
        elements = elements_of(shape)
        if goes_dense(self._spec, elements, dtype):
            return NONE.decode(payload, shape, dtype)
        check_size(payload, self.cost(elements, dtype), shape, dtype)
        values = self._packer.unpack(byte_tensor(payload), elements)
        return in_dtype(values, DTYPES[dtype]).reshape(tuple(shape))


def goes_dense(spec: Spec, elements: int, dtype: str) -> bool:
    return dtype not in LOSSY or spec.is_dense(elements, DTYPES[dtype].itemsize)


def payload_bytes(spec: Spec, elements: int, dtype: str) -> int:
    return (
        spec.payload_bytes(elements, DTYPES[dtype].itemsize) if dtype in LOSSY else NONE.cost(elements, dtype)
    )


def flat_floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32).contiguous().reshape(-1)
