"""Tensors in a file of the safetensors format, written and read one at a time: neither needs more memory than two copies of the largest
tensor, and nothing is mapped into memory.

The bytes are those that the library of the format writes: 8 bytes with the length of the header, the header (JSON, padded with
blanks to a multiple of 8), the tensors. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import torch

from fusion.dag.ir.graph import DTYPE_BYTES, TensorType, Variable
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.stage_graphs import file_bytes
from fusion.runtime.planes.input_sizes import TORCH_DTYPES
from fusion.runtime.planes.stage_values import checked_variable

# Names of our dtypes in the format. Tensors are stored by dtype, the last one first, then by name.
_FORMAT_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "int32": "I32", "float32": "F32", "float64": "F64", "int64": "I64",
}  # fmt: skip
STORED_DTYPES = {stored: name for name, stored in _FORMAT_DTYPES.items()}
_ORDER = {name: place for place, name in enumerate(_FORMAT_DTYPES)}

_MIN_HEADER_LIMIT = 64 << 10  # that any file may have
_ENTRY_BYTES = 512  # of a header for one tensor, without its name


@dataclass(frozen=True)
class WeightsBytes:
    """A file of variables: its size, and its bytes, which are produced while they are read."""

    size_bytes: int
    pieces: Iterator[bytes | memoryview]


def tensors_bytes_of(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> WeightsBytes:
    """The file of tensors that are in memory; none is copied."""
    types = {n: TensorType(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    return weights_bytes_of(
        [Variable(name, kind) for name, kind in types.items()],
        lambda variables: {v.name: tensors[v.name] for v in variables},
        metadata,
    )


def weights_bytes_of(
    variables: Iterable[Variable],
    read: Callable[[Iterable[Variable]], Mapping[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> WeightsBytes:
    """The file of `variables`; `read` is called for one at a time. JobError where it returns another shape or dtype."""
    ordered = sorted(variables, key=lambda v: (-_ORDER[v.type.dtype], v.name))
    shapes = [[d for d in v.type.shape if isinstance(d, int)] for v in ordered]
    ends = [0]
    for variable, shape in zip(ordered, shapes, strict=True):
        ends.append(ends[-1] + prod(shape) * DTYPE_BYTES[variable.type.dtype])
    entries = {
        v.name: {"dtype": _FORMAT_DTYPES[v.type.dtype], "shape": shape, "data_offsets": span}
        for v, shape, span in zip(ordered, shapes, pairwise(ends), strict=True)
    }
    named: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    text = json.dumps({**named, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text

    def pieces() -> Iterator[bytes | memoryview]:
        yield header
        for variable in ordered:
            value = checked_variable(read((variable,)), variable).detach()
            if value.numel():
                yield _bytes(value.cpu().contiguous())

    return WeightsBytes(len(header) + ends[-1], pieces())


def check_header(path: Path, names: Iterable[str], copies: int = 1) -> None:
    """Raises JobError where the header is longer than tensors of these names need, each `copies` times. The library takes seconds and
    gigabytes to parse a long one, and holds the GIL meanwhile."""
    most = _MIN_HEADER_LIMIT + copies * sum(_ENTRY_BYTES + len(name) for name in names)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if most < length <= path.stat().st_size:  # longer than the file: the library refuses it
        raise JobError(f"{path.name:.12} is no file of these tensors: a header of {length} bytes")


class WeightsFile(Mapping[str, torch.Tensor]):
    """An untrusted file of at most `tensors` tensors. Each lookup reads the tensor into new memory. Raises JobError for a malformed file;
    no length in it is believed beyond the size of the file."""

    def __init__(self, path: Path, tensors: int) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, file_bytes(0, tensors)):
                    raise JobError(
                        f"{path.name:.12} is no file of {tensors} tensors: a header of {length} bytes"
                    )
                header = json.loads(file.read(length))
        except OSError as error:
            raise JobError(f"{path}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise JobError(f"{path.name:.12} is no file of tensors: {str(error)[:100]}") from None
        if not isinstance(header, dict):
            raise JobError(f"{path.name:.12} is no file of tensors: its header is no object")
        self._start = 8 + length
        self._entries = {
            name: _entry(name, entry, size - self._start)
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape, start = self._entries[name]
        value = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        if value.numel():
            try:
                with self._path.open("rb", buffering=0) as file:
                    file.seek(self._start + start)
                    _fill(_bytes(value), file.readinto)
            except OSError as error:
                raise JobError(f"{self._path}: {error.strerror or error}") from None
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _entry(name: str, entry: object, most: int) -> tuple[str, tuple[int, ...], int]:
    """The dtype, shape and offset of a tensor. JobError where the entry is malformed, or exceeds `most` bytes."""
    match entry:
        case {
            "dtype": str() as dtype,
            "shape": list() as shape,
            "data_offsets": [int() as start, int() as end],
        }:
            sizes = [n for n in shape if type(n) is int and 0 <= n <= most]
            if (
                dtype in STORED_DTYPES
                and len(sizes) == len(shape) <= 16
                and 0 <= start <= end <= most
                and prod(sizes) * DTYPE_BYTES[STORED_DTYPES[dtype]] == end - start
            ):
                return STORED_DTYPES[dtype], tuple(sizes), start
    raise JobError(f"a file of tensors says nonsense of {name!r:.100}")


def _bytes(value: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    memory: memoryview = value.reshape(-1).view(torch.uint8).numpy().data
    return memory


def _fill(memory: memoryview, read: Callable[[memoryview], int | None]) -> None:
    while memory:
        count = read(memory)
        if not count:
            raise OSError("the file is shorter than it was")
        memory = memory[count:]
