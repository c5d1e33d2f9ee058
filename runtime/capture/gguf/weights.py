"""The tensors of a GGUF file, read as the parameters of a module: a tensor at a time, a few rows at once; blocks of quantised numbers
become numbers, or what our operators read.
"""

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
from fusion.runtime.capture.gguf.header import TensorPlace, shown
from fusion.runtime.capture.gguf.stored import Stored
from fusion.runtime.job.errors import JobError

CHUNK_BYTES = 8 << 20  # of the file, at once
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# The open file that a tensor lies in.
Opened = Callable[[Path], BufferedReader]


def read_tensor(
    opened: Opened, stored: Stored, dtype: torch.dtype, experts: range | None = None
) -> torch.Tensor:
    """The parameter's value, or that of these of its experts. Beside it, memory for CHUNK_BYTES of the file, and for its tensors as
    float32 where it is made of them. JobError where a file ends before."""
    if stored.made is not None:
        parts = [read_tensor(opened, alone(place), torch.float32) for place in stored.places]
        return stored.assembled(parts).to(dtype).reshape(stored.shape)
    chosen = range(stored.experts or 1) if experts is None else experts
    laid = stored.laid(len(chosen))
    value, at = torch.empty(math.prod(laid), dtype=dtype), 0
    for place, rows in _chunks(opened, stored, chosen):
        numbers = _decoded(rows, place.kind).flatten()
        value[at : at + len(numbers)] = numbers
        at += len(numbers)
    value = stored.ordered(value.view(laid))
    value = value.mT if stored.transposed else value
    shape = (len(chosen), *stored.shape[1:]) if stored.experts else stored.shape
    return value.reshape(shape).contiguous()


@contextmanager
def opened_files() -> Iterator[Opened]:
    """Files, each opened as it is first asked for. JobError for one that cannot be read."""
    files: dict[Path, BufferedReader] = {}
    with ExitStack() as stack:

        def opened(path: Path) -> BufferedReader:
            if path not in files:
                files[path] = stack.enter_context(path.open("rb"))
            return files[path]

        try:
            yield opened
        except OSError as error:
            name = error.filename or next(reversed(files), "a file")
            raise JobError(f"{name} cannot be read: {error.strerror}") from error


def layout(stored: Stored) -> Layout | None:
    """How the file has a parameter, where all of it is in one kind of block."""
    return layout_of(stored.places[0].kind) if stored.in_blocks else None


def alone(place: TensorPlace) -> Stored:
    return Stored((place,), place.shape)


def read_blocks(opened: Opened, stored: Stored, experts: range | None = None) -> tuple[torch.Tensor, ...]:
    """Of a matrix whose kind of block has a `layout_of`, or of those of experts: numbers, scales and perhaps minimums, of the
    rows of the file."""
    chosen = range(stored.experts or 1) if experts is None else experts
    chunks = [
        unpacked(rows, place.kind, place.block_bytes) for place, rows in _chunks(opened, stored, chosen)
    ]
    parts = [torch.cat(part) for part in zip(*chunks, strict=True)]
    rows = stored.laid(len(chosen))[:-1]
    return tuple(stored.ordered(part.view(*rows, -1)).contiguous() for part in parts)


def _chunks(
    opened: Opened, stored: Stored, experts: range
) -> Iterator[tuple[TensorPlace, npt.NDArray[np.uint8]]]:
    """Rows (rows, bytes), in the order of the parameter, each with where they are from."""
    for expert in experts:
        for place in stored.places:
            each = place.rows // (stored.experts or 1)
            step = max(1, CHUNK_BYTES // place.row_bytes)
            file = opened(place.file)
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

    # A scale may be no number; then neither are its weights
    with np.errstate(invalid="ignore", over="ignore"):
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))


@functools.cache
def readable(kind: str, block_bytes: int) -> bool:
    """Whether a tensor's kind of numbers is one that becomes floats."""
    try:
        _decoded(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
