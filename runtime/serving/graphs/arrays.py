"""Named arrays in a frame: names, dtypes and shapes in its header, their little-endian bytes, concatenated, in its payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fusion.dag.ir.graph import DTYPE_BYTES
from fusion.swarm.errors import FrameError
from fusion.swarm.transport import Buffer

MAX_ARRAYS = 256
MAX_RANK = 8
MAX_NAME = 256
FIELD = "arrays"  # of the header


@dataclass(frozen=True)
class Array:
    """The size of `data` matches shape and dtype."""

    name: str
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    data: Buffer

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


def described(arrays: Sequence[Array]) -> dict[str, list[list[Any]]]:
    """The header field; the payload is their `data`, in the same order."""
    return {FIELD: [[a.name, a.dtype, list(a.shape)] for a in arrays]}


def read_arrays(header: Mapping[str, Any], payload: Buffer) -> list[Array]:
    """Views of the arrays in a payload, without copies. FrameError where header and payload do not match."""
    entries = header.get(FIELD)
    if not isinstance(entries, list) or len(entries) > MAX_ARRAYS:
        raise FrameError(f"arrays: a list of at most {MAX_ARRAYS}")
    view, offset, arrays = memoryview(payload), 0, list[Array]()
    for each in entries:
        name, dtype, shape = each if isinstance(each, list) and len(each) == 3 else (None, None, None)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not isinstance(dtype, str):
            raise FrameError("arrays: each is [name, dtype, shape]")
        if dtype not in DTYPE_BYTES:
            raise FrameError(f"arrays: {name:.80} is of an unknown dtype, {dtype!r:.40}")
        if not isinstance(shape, list) or len(shape) > MAX_RANK:
            raise FrameError(f"arrays: the shape of {name:.80} is a list of at most {MAX_RANK} sizes")
        if not all(type(size) is int and 0 < size <= len(view) for size in shape):
            raise FrameError(f"arrays: {name:.80} has a size that is not from 1 to the bytes of the payload")
        bytes_ = prod(shape) * DTYPE_BYTES[dtype]
        if offset + bytes_ > len(view):
            raise FrameError(f"arrays: {name:.80} does not fit the payload")
        arrays.append(Array(name, dtype, tuple(shape), view[offset : offset + bytes_]))
        offset += bytes_
    if offset != len(view) or len({a.name for a in arrays}) != len(arrays):
        raise FrameError("arrays: each by its own name, and nothing else in the payload")
    return arrays
