"""The header of a GGUF file: its metadata, and where its tensors lie. Untrusted files are read without torch, a field at a time, within bounds
on memory and time; no tensor data is read.

The format, little-endian: "GGUF", version, count of tensors, count of key-values; the key-values (a name, a type, a value,
which may be a list); for each tensor its name, dimensions, type and offset; then, aligned, the tensors.
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import check_gguf, check_own

# The largest vocabularies of today have 262,144 tokens and as many merges, in 20 MB.
MAX_HEADER_BYTES = 64 << 20
MAX_ENTRIES = 1 << 16  # key-values
MAX_ELEMENTS = 1 << 21  # of all lists together
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 256  # of a key or a tensor
MAX_ALIGNMENT = 1 << 16
MAX_PARTS = 1 << 9  # DeepSeek-V3 in 16 bits has 30 of 50 GB

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]

_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SPLIT_COUNT, _SPLIT_NUMBER, _SPLIT_TENSORS = "split.count", "split.no", "split.tensors.count"
_BOOL, _STRING, _LIST = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorInfo:
    """The location and format of one tensor: rows of blocks, each of `block_elements` numbers in `block_bytes`."""

    name: str
    shape: tuple[int, ...]  # in torch's order: elements of the last dimension are adjacent
    kind: str  # "F32", "Q8_0", ...
    offset: int  # of its first byte in the file
    block_elements: int
    block_bytes: int
    file: Path

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.block_elements * self.block_bytes

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """The header of a model in one file, or in several of which this is the first. JobError, in one line, for a file that is damaged, of an
    unknown kind, or beyond the bounds, which all files of a model share."""
    first, size = _read(path, MAX_HEADER_BYTES)
    count = first.values.get(_SPLIT_COUNT, 1)
    if type(count) is int and count <= 1:
        return first
    name = _SPLIT_NAME.fullmatch(path.name)
    if type(count) is not int or name is None or int(name[3]) != count:
        raise JobError(
            f"{path} is one of {quoted(str(count))} parts, and is not called as one, NAME-00001-of-00003.gguf"
        )
    if count > MAX_PARTS:
        raise JobError(f"{path} is one of {count} parts; the limit is {MAX_PARTS}")
    parts = [path.with_name(f"{name[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if path != parts[0]:
        raise JobError(f"{path} is part {int(name[2])} of {count}: the first is {parts[0].name}")
    return _joined(first, size, parts)


def _joined(first: GGUFHeader, size: int, parts: Sequence[Path]) -> GGUFHeader:
    """The header of all parts together. `size`: the bytes of the first part's header."""
    tensors: dict[str, TensorInfo] = {}
    for number, path in enumerate(parts):
        header, used_bytes = first, 0
        if number:
            check_own(path, path.parent)
            header, used_bytes = _read(path, MAX_HEADER_BYTES - size)
        size += used_bytes
        _check_part(header, number, len(parts))
        if duplicates := tensors.keys() & header.tensors.keys():
            raise JobError(f"{path} has {quoted(min(duplicates))}, as another part does")
        tensors |= header.tensors
        if len(tensors) > MAX_TENSORS:
            raise JobError(f"{first.path} has more than {MAX_TENSORS} tensors in its parts")
    declared = first.values.get(_SPLIT_TENSORS, len(tensors))
    if declared != len(tensors):
        raise JobError(
            f"{first.path} says {_SPLIT_TENSORS} = {quoted(str(declared))}, and its parts have {len(tensors)}"
        )
    return GGUFHeader(first.path, first.values, tensors)


def _check_part(header: GGUFHeader, number: int, count: int) -> None:
    """JobError unless the part has the right number; parts after the first have no metadata of the model."""
    values = header.values
    if values.get(_SPLIT_COUNT) != count or values.get(_SPLIT_NUMBER) != number:
        raise JobError(f"{header.path} does not say that it is part {number + 1} of {count}")
    for key in sorted(values) if number else ():
        if not key.startswith(("split.", "general.")):
            raise JobError(f"{header.path} says {quoted(key)}, which is for the first part to say")


def _read(path: Path, limit: int) -> tuple[GGUFHeader, int]:
    """A file's header, of at most `limit` bytes, and its length in bytes."""
    check_gguf(path)
    try:
        with path.open("rb") as file:
            reader = _Reader(path, file, limit)
            return reader.header(), reader.position
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error


def quoted(name: str) -> str:
    """A name from a file, quoted and shortened for a message of one line."""
    return repr(name if len(name) <= 80 else name[:80] + "...")


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, limit: int) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._limit = limit
        self.position = 0
        self._elements = 0

    def header(self) -> GGUFHeader:
        self._read_bytes(8, "the header")  # check_gguf has seen them
        tensor_count, entry_count = struct.unpack("<QQ", self._read_bytes(16, "the header"))
        self._check_limit("tensors", tensor_count, MAX_TENSORS)
        self._check_limit("key-values", entry_count, MAX_ENTRIES)
        values: dict[str, Value] = {}
        for _ in range(entry_count):
            key = self._name("a key")
            if key in values:
                raise self._error(f"says {quoted(key)} twice")
            values[key] = self._value(self._uint32(f"the type of {quoted(key)}"), quoted(key))
        infos = [self._tensor() for _ in range(tensor_count)]
        return GGUFHeader(self._path, values, self._located(infos, self._alignment(values)))

    def _tensor(self) -> TensorInfo:
        """A tensor's info, with an offset from the start of the tensor data."""
        name = self._name("a tensor's name")
        count = self._uint32(f"the dimensions of {quoted(name)}")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._error(f"says that {quoted(name)} has {count} dimensions")
        shape = struct.unpack(f"<{count}Q", self._read_bytes(8 * count, f"the shape of {quoted(name)}"))[::-1]
        number, offset = struct.unpack("<IQ", self._read_bytes(12, f"the place of {quoted(name)}"))
        kind, block_elements, block_bytes = self._tensor_type(name, number)
        if min(shape) < 1 or shape[-1] % block_elements:
            raise self._error(f"says that {quoted(name)} has the shape {shape}, which {kind} cannot have")
        return TensorInfo(name, shape, kind, offset, block_elements, block_bytes, self._path)

    def _tensor_type(self, name: str, number: int) -> tuple[str, int, int]:
        from gguf.constants import (
            GGML_QUANT_SIZES,
            GGMLQuantizationType,
        )  # numpy and yaml: only for a GGUF file

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._error(f"has {quoted(name)} in a type that is not known ({number})") from None
        return (kind.name, *GGML_QUANT_SIZES[kind])

    def _located(self, tensors: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Tensor infos by name, with offsets in the file. JobError if two overlap or one ends beyond the file."""
        start = self.position + -self.position % alignment
        located: dict[str, TensorInfo] = {}
        end = start
        for each in sorted(tensors, key=lambda tensor: tensor.offset):
            offset = start + each.offset
            if each.offset % alignment or offset < end:
                raise self._error(f"has {quoted(each.name)} where another tensor lies")
            end = offset + each.size_bytes
            if end > self._size:
                raise self._error(
                    f"ends at byte {self._size}, in or before {quoted(each.name)}, which ends at {end}: it is not whole"
                )
            if each.name in located:
                raise self._error(f"has {quoted(each.name)} twice")
            located[each.name] = replace(each, offset=offset)
        return located

    def _alignment(self, values: Mapping[str, Value]) -> int:
        alignment = values.get("general.alignment", 32)
        if (
            type(alignment) is not int
            or alignment < 8
            or alignment & (alignment - 1)
            or alignment > MAX_ALIGNMENT
        ):
            raise self._error(
                f"says general.alignment = {quoted(str(alignment))}; a power of two, at least 8"
            )
        return alignment

    def _value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self._text(key)
        if kind in _NUMBERS:
            return self._numbers(kind, 1, key)[0]
        if kind != _LIST:
            raise self._error(f"has {key} in a type that is not known ({kind})")
        kind, count = struct.unpack("<IQ", self._read_bytes(12, key))
        self._elements += count
        self._check_limit("elements of lists", self._elements, MAX_ELEMENTS)
        if kind == _STRING:
            return tuple(self._text(key) for _ in range(count))
        if kind in _NUMBERS:
            return self._numbers(kind, count, key)
        raise self._error(f"has a list of lists, or of an unknown type ({kind}), in {key}")

    def _numbers(self, kind: int, count: int, key: str) -> tuple[Scalar, ...]:
        form = f"<{count}{_NUMBERS[kind]}"
        return struct.unpack(form, self._read_bytes(struct.calcsize(form), key))

    def _name(self, what: str) -> str:
        name = self._text(what, MAX_NAME_BYTES)
        if not name:
            raise self._error(f"has {what} that is empty")
        return name

    def _text(self, what: str, limit: int = MAX_HEADER_BYTES) -> str:
        (length,) = struct.unpack("<Q", self._read_bytes(8, what))
        if length > limit:
            raise self._error(f"says that {what} has {length} bytes; the limit is {limit}")
        try:
            return self._read_bytes(length, what).decode()
        except UnicodeDecodeError:
            raise self._error(f"has {what} in other bytes than UTF-8") from None

    def _uint32(self, what: str) -> int:
        value: int = struct.unpack("<I", self._read_bytes(4, what))[0]
        return value

    def _read_bytes(self, count: int, what: str) -> bytes:
        """The next bytes. Checks the length against the file's size first, so that a length from a file allocates nothing."""
        end = self.position + count
        if end > self._size:
            raise self._error(f"ends in {what}: it is not whole")
        if end > self._limit:
            raise self._error(f"has a header of more than {self._limit} bytes")
        data = self._file.read(count)
        if len(data) < count:
            raise self._error(f"ends in {what}: it is not whole")
        self.position = end
        return data

    def _check_limit(self, what: str, count: int, limit: int) -> None:
        if count > limit:
            raise self._error(f"says that it has {count} {what}; the limit is {limit}")

    def _error(self, what: str) -> JobError:
        return JobError(f"{self._path} {what}")
