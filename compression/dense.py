"""`none`: the elements as they are in memory, little-endian. Neither side copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.compression.encoding import DTYPES, Encoded, byte_tensor, check_size, elements_of


class Dense:
    name = "none"

    def encode(self, tensor: torch.Tensor) -> Encoded:
        flat = tensor.detach().contiguous().reshape(-1)
        return Encoded((memoryview(flat.view(torch.uint8).numpy().data),))

    def cost(self, elements: int, dtype: str) -> int:
        return elements * DTYPES[dtype].itemsize

    def decode(self, payload: memoryview, shape: Sequence[int], dtype: str) -> torch.Tensor:
        check_size(payload, self.cost(elements_of(shape), dtype), shape, dtype)
        flat, torch_dtype = byte_tensor(payload), DTYPES[dtype]
        if torch_dtype is torch.bool:  # a bool of another byte than 0 and 1 is undefined behaviour
            return flat.ne(0).reshape(tuple(shape))
        return flat.view(torch_dtype).reshape(tuple(shape))


NONE = Dense()
