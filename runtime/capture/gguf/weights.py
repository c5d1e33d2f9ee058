"""Reads the tensors of a GGUF file as parameters of a module, a few rows at a time. Quantised blocks become floats, or the matrices that our
operators read."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fusion.dag.rewrites.quantise import Layout
from fusion.runtime.capture.gguf.blocks import layout_of, unpacked
from fusion.runtime.capture.gguf.header import TensorInfo, quoted
from fusion.runtime.capture.gguf.stored import StoredParameter
from fusion.runtime.job.errors import JobError

CHUNK_BYTES = 8 << 20  # read at once
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Opens a file, or returns it if it is open.
OpenFile = Callable[[Path], BufferedReader]


def read_tensor(
    open_file: OpenFile, stored: StoredParameter, dtype: torch.dtype, experts: range | None = None
) -> torch.Tensor:
    """The parameter's value, or that of these experts. Beside the value, it takes memory for CHUNK_BYTES of the file, and for the tensors in
    float32 if the parameter is combined of them. JobError where a file ends too early."""
    if stored.combine is not None:
        parts = [read_tensor(open_file, single_tensor(info), torch.float32) for info in stored.tensors]
        return stored.assembled(parts).to(dtype).reshape(stored.shape)
    chosen = range(stored.experts or 1) if experts is None else experts
    stacked_shape = stored.stacked_shape(len(chosen))
    value, position = torch.empty(math.prod(stacked_shape), dtype=dtype), 0
    for info, rows in _chunks(open_file, stored, chosen):
        numbers = _dequantised(rows, info.kind).flatten()
        value[position : position + len(numbers)] = numbers
        position += len(numbers)
    value = stored.reordered(value.view(stacked_shape))
    value = value.mT if stored.transposed else value
    shape = (len(chosen), *stored.shape[1:]) if stored.experts else stored.shape
    return value.reshape(shape).contiguous()


@contextmanager
def opened_files() -> Iterator[OpenFile]:
    """Opens each file at its first use and closes all at the end. JobError for one that cannot be read."""
    files: dict[Path, BufferedReader] = {}
    with ExitStack() as stack:

        def open_file(path: Path) -> BufferedReader:
            if path not in files:
                files[path] = stack.enter_context(path.open("rb"))
            return files[path]

        try:
            yield open_file
        except OSError as error:
            name = error.filename or next(reversed(files), "a file")
            raise JobError(f"{name} cannot be read: {error.strerror}") from error


def layout(stored: StoredParameter) -> Layout | None:
    """The layout of a parameter that lies in the file in one kind of block; else None."""
    return layout_of(stored.tensors[0].kind) if stored.in_blocks else None


def single_tensor(info: TensorInfo) -> StoredParameter:
    return StoredParameter((info,), info.shape)


def read_blocks(
    open_file: OpenFile, stored: StoredParameter, experts: range | None = None
) -> tuple[torch.Tensor, ...]:
    """Numbers, scales and perhaps minimums of a matrix with a `layout`, or of these of its experts."""
    chosen = range(stored.experts or 1) if experts is None else experts
    chunks = [
        unpacked(rows, info.kind, info.block_bytes) for info, rows in _chunks(open_file, stored, chosen)
    ]
    parts = [torch.cat(part) for part in zip(*chunks, strict=True)]
    rows = stored.stacked_shape(len(chosen))[:-1]
    return tuple(stored.reordered(part.view(*rows, -1)).contiguous() for part in parts)


def _chunks(
    open_file: OpenFile, stored: StoredParameter, experts: range
) -> Iterator[tuple[TensorInfo, npt.NDArray[np.uint8]]]:
    """Raw rows (rows, bytes) in the order of the parameter, each with their tensor."""
    for expert in experts:
        for info in stored.tensors:
            row_count = info.rows // (stored.experts or 1)
            step = max(1, CHUNK_BYTES // info.row_bytes)
            file = open_file(info.file)
            file.seek(info.offset + expert * row_count * info.row_bytes)
            for first in range(0, row_count, step):
                rows = np.empty((min(step, row_count - first), info.row_bytes), np.uint8)
                if file.readinto(rows.data) < rows.nbytes:
                    raise JobError(f"{file.name} ends in {quoted(info.name)}: it is not whole")
                yield info, rows


def _dequantised(rows: npt.NDArray[np.uint8], kind: str) -> torch.Tensor:
    dtype = _FLOATS.get(kind)
    if dtype is not None:
        return torch.from_numpy(rows).view(dtype)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # A scale may be NaN; then so are its weights
    with np.errstate(invalid="ignore", over="ignore"):
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))


@functools.cache
def is_readable(kind: str, block_bytes: int) -> bool:
    """Whether tensors of this kind can be dequantised."""
    try:
        _dequantised(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
