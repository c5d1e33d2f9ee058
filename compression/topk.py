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
        where = positions.pack(kept, elements)
        return Encoded((values.data, where.data), indices=torch.from_numpy(kept.astype(np.int32)))

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
        where = positions.unpack(data[value_bytes:].numpy(), elements, kept)
        values = self._packer.unpack(data[:value_bytes], kept)
        return Decoded(_scatter(values, where, shape, dtype), torch.from_numpy(where))

    def encode_at(self, tensor: torch.Tensor, indices: torch.Tensor | None) -> Encoded:
        where = self._known(indices, tensor.numel(), NAMES[tensor.dtype])
        if where is None:
            return NONE.encode(tensor)
        values = torch.from_numpy(flat_floats(tensor).numpy()[where])
        return Encoded((self._packer.pack(values).numpy().data,), indices=indices)

    def decode_at(
        self, payload: memoryview, shape: Sequence[int], dtype: str, indices: torch.Tensor | None
    ) -> torch.Tensor:
        elements = elements_of(shape)
        where = self._known(indices, elements, dtype)
        if where is None:
            return NONE.decode(payload, shape, dtype)
        right = self._spec.payload_bytes_at(elements, DTYPES[dtype].itemsize)
        check_size(payload, right, shape, dtype)
        return _scatter(self._packer.unpack(byte_tensor(payload), len(where)), where, shape, dtype)

    def _known(self, indices: torch.Tensor | None, elements: int, dtype: str) -> positions.Positions | None:
        """The indices of a tensor of that size, None where such a tensor goes whole."""
        dense = goes_dense(self._spec, elements, dtype)
        given = None if indices is None else len(indices)
        wanted = None if dense else self._spec.kept(elements)
        if given != wanted or (indices is not None and int(indices[-1]) >= elements):
            raise ValueError(
                f"{given} positions for {elements} elements of {dtype}: {self.name} keeps {wanted}"
            )
        return None if indices is None else indices.numpy()


def largest_positions(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ascending positions of the `count` (at least one) largest magnitudes, ties to the lower position."""
    # The bits of a float without its sign order as its magnitude does, with NaN above infinity: no comparison of
    # theirs is unordered, and integers are what NumPy selects fastest.
    bits = values.view(np.int32) & np.int32(0x7FFFFFFF)
    last = np.partition(bits, len(bits) - count)[len(bits) - count]
    chosen = bits > last
    ties = np.flatnonzero(bits == last)
    chosen[ties[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _scatter(
    values: torch.Tensor, where: positions.Positions, shape: Sequence[int], dtype: str
) -> torch.Tensor:
    flat = np.zeros(elements_of(shape), np.float32)
    flat[where] = values.numpy()
    return in_dtype(torch.from_numpy(flat), DTYPES[dtype]).reshape(tuple(shape))
