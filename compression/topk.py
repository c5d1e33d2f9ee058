"""`topk:<density>`: the elements of largest magnitude and where they are; the others are zero at the receiver.

    values     of the kept elements in order of position, as fp16 or block-wise int8 (`values.py`)
    positions  `positions.py`

Exactly `Spec.kept` elements are kept; among equal magnitudes the first in memory, so that what is sent is a function of
the tensor. NaN and infinities count as the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fusion.compression import positions
from fusion.compression.dense import NONE
from fusion.compression.encoding import (
    DTYPES,
    NAMES,
    Decoded,
    Encoded,
    byte_tensor,
    check_size,
    elements_of,
)
from fusion.compression.packed import PACKERS, flat_floats, goes_dense, payload_bytes
from fusion.compression.spec import Spec
from fusion.compression.values import in_dtype


class TopK:
    def __init__(self, spec: Spec) -> None:
        self.name = str(spec)
        self._spec = spec
        self._packer = PACKERS[spec.values]

    def encode(self, tensor: torch.Tensor) -> Encoded:
        elements = tensor.numel()
        if goes_dense(self._spec, elements, NAMES[tensor.dtype]):
            return NONE.encode(tensor)
        flat = flat_floats(tensor).numpy()
        kept = largest_positions(flat, self._spec.kept(elements))
        values = self._packer.pack(torch.from_numpy(flat[kept])).numpy()
        packed_positions = positions.pack(kept, elements)
        return Encoded((values.data, packed_positions.data), indices=torch.from_numpy(kept.astype(np.int32)))

    def cost(self, elements: int, dtype: str) -> int:
        return payload_bytes(self._spec, elements, dtype)

    def decode(self, payload: memoryview, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return self.decode_sparse(payload, shape, dtype).tensor

    def decode_sparse(self, payload: memoryview, shape: Sequence[int], dtype: str) -> Decoded:
        elements = elements_of(shape)
        if goes_dense(self._spec, elements, dtype):
            return Decoded(NONE.decode(payload, shape, dtype), None)
        check_size(payload, self.cost(elements, dtype), shape, dtype)
        kept = self._spec.kept(elements)
        data = byte_tensor(payload)
        value_bytes = self._spec.payload_bytes_at(elements, DTYPES[dtype].itemsize)
        kept_positions = positions.unpack(data[value_bytes:].numpy(), elements, kept)
        values = self._packer.unpack(data[:value_bytes], kept)
        return Decoded(_scatter(values, kept_positions, shape, dtype), torch.from_numpy(kept_positions))

    def encode_at(self, tensor: torch.Tensor, indices: torch.Tensor | None) -> Encoded:
        kept_positions = self._checked_positions(indices, tensor.numel(), NAMES[tensor.dtype])
        if kept_positions is None:
            return NONE.encode(tensor)
        values = torch.from_numpy(flat_floats(tensor).numpy()[kept_positions])
        return Encoded((self._packer.pack(values).numpy().data,), indices=indices)

    def decode_at(
        self, payload: memoryview, shape: Sequence[int], dtype: str, indices: torch.Tensor | None
    ) -> torch.Tensor:
        elements = elements_of(shape)
        kept_positions = self._checked_positions(indices, elements, dtype)
        if kept_positions is None:
            return NONE.decode(payload, shape, dtype)
        expected_bytes = self._spec.payload_bytes_at(elements, DTYPES[dtype].itemsize)
        check_size(payload, expected_bytes, shape, dtype)
        return _scatter(
            self._packer.unpack(byte_tensor(payload), len(kept_positions)), kept_positions, shape, dtype
        )

    def _checked_positions(
        self, indices: torch.Tensor | None, elements: int, dtype: str
    ) -> positions.Positions | None:
        """The checked indices of a tensor of that size; None where such a tensor is sent dense. ValueError for others."""
        dense = goes_dense(self._spec, elements, dtype)
        count = None if indices is None else len(indices)
        expected = None if dense else self._spec.kept(elements)
        if count != expected or (indices is not None and int(indices[-1]) >= elements):
            raise ValueError(
                f"{count} positions for {elements} elements of {dtype}: {self.name} keeps {expected}"
            )
        return None if indices is None else indices.numpy()


def largest_positions(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ascending positions of the `count` (at least one) largest magnitudes, ties to the lower position."""
    # Without the sign, the bits of a float order as its magnitude does, with NaN above infinity: the order is total, and
    # NumPy selects integers fastest.
    bits = values.view(np.int32) & np.int32(0x7FFFFFFF)
    threshold = np.partition(bits, len(bits) - count)[len(bits) - count]
    selected = bits > threshold
    ties = np.flatnonzero(bits == threshold)
    selected[ties[: count - np.count_nonzero(selected)]] = True
    return np.flatnonzero(selected)


def _scatter(
    values: torch.Tensor, kept_positions: positions.Positions, shape: Sequence[int], dtype: str
) -> torch.Tensor:
    flat = np.zeros(elements_of(shape), np.float32)
    flat[kept_positions] = values.numpy()
    return in_dtype(torch.from_numpy(flat), DTYPES[dtype]).reshape(tuple(shape))
