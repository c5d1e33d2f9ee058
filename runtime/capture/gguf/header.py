"""The header of a GGUF file: what it says of its model, and where its tensors lie. Read from a stranger's file without
torch, a field at a time, within bounds on memory and time; not one byte of a tensor.

The format, little-endian: "GGUF", version, count of tensors, count of key-values; the key-values (a name, a type, a value,
which may be a list); for each tensor its name, dimensions, type and place; then, aligned, the tensors.
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

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_COUNT, _NUMBER, _TENSORS = "split.count", "split.no", "split.tensors.count"
_BOOL, _STRING, _LIST = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor lies in its file, and how: `blocks` of `block_elements` numbers in `block_bytes`, row after row."""

    name: str
    shape: tuple[int, ...]  # as torch has it: the elements of its last dimension lie side by side
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
    tensors: Mapping[str, TensorPlace]


def read_header(path: Path) -> GGUFHeader:
    """Of a model in one file, or in several of which this is the first. JobError, in one line, for a file that is damaged, of an
    unknown kind, or beyond the bounds, which those of one model share."""
    first, size = _read(path, MAX_HEADER_BYTES)
    count = first.values.get(_COUNT, 1)
    if type(count) is int and count <= 1:
        return first
    name = _PART.fullmatch(path.name)
    if type(count) is not int or name is None or int(name[3]) != count:
        raise JobError(
            f"{path} is one of {shown(str(count))} parts, and is not called as one, NAME-00001-of-00003.gguf"
        )
    if count > MAX_PARTS:
        raise JobError(f"{path} is one of {count} parts; the limit is {MAX_PARTS}")
    parts = [path.with_name(f"{name[1]}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if path != parts[0]:
        raise JobError(f"{path} is part {int(name[2])} of {count}: the first is {parts[0].name}")
    return _joined(first, size, parts)


def _joined(first: GGUFHeader, size: int, parts: Sequence[Path]) -> GGUFHeader:
    """What all parts have. `size`: the bytes of the first one's header."""
    tensors: dict[str, TensorPlace] = {}
    for number, path in enumerate(parts):
        header, used = first, 0
        if number:
            check_own(path, path.parent)
            header, used = _read(path, MAX_HEADER_BYTES - size)
        size += used
        _check_part(header, number, len(parts))
        if twice := tensors.keys() & header.tensors.keys():
            raise JobError(f"{path} has {shown(min(twice))}, as another part does")
        tensors |= header.tensors
        if len(tensors) > MAX_TENSORS:
            raise JobError(f"{first.path} has more than {MAX_TENSORS} tensors in its parts")
    declared = first.values.get(_TENSORS, len(tensors))
    if declared != len(tensors):
        raise JobError(
            f"{first.path} says {_TENSORS} = {shown(str(declared))}, and its parts have {len(tensors)}"
        )
    return GGUFHeader(first.path, first.values, tensors)


def _check_part(header: GGUFHeader, number: int, count: int) -> None:
    """All but the first say of the model nothing more than which part they are."""
    values = header.values
    if values.get(_COUNT) != count or values.get(_NUMBER) != number:
        raise JobError(f"{header.path} does not say that it is part {number + 1} of {count}")
    for key in sorted(values) if number else ():
        if not key.startswith(("split.", "general.")):
            raise JobError(f"{header.path} says {shown(key)}, which is for the first part to say")


def _read(path: Path, most: int) -> tuple[GGUFHeader, int]:
    """A file's header, and how many bytes of at most so many it has."""
    check_gguf(path)
    try:
        with path.open("rb") as file:
            reader = _Reader(path, file, most)
            return reader.header(), reader.at
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error


def shown(name: str) -> str:
    """What the file calls something, safe to print in a line."""
    return repr(name if len(name) <= 80 else name[:80] + "...")


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, most: int) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._most = most
        self.at = 0
        self._elements = 0

    def header(self) -> GGUFHeader:
        self._take(8, "the header")  # check_gguf has seen them
        tensor_count, entry_count = struct.unpack("<QQ", self._take(16, "the header"))
        self._at_most("tensors", tensor_count, MAX_TENSORS)
        self._at_most("key-values", entry_count, MAX_ENTRIES)
        values: dict[str, Value] = {}
        for _ in range(entry_count):
            key = self._name("a key")
            if key in values:
                raise self._bad(f"says {shown(key)} twice")
            values[key] = self._value(self._whole(f"the type of {shown(key)}"), shown(key))
        found = [self._tensor() for _ in range(tensor_count)]
        return GGUFHeader(self._path, values, self._placed(found, self._alignment(values)))

    def _tensor(self) -> TensorPlace:
        """With an offset from where the tensors begin."""
        name = self._name("a tensor's name")
        count = self._whole(f"the dimensions of {shown(name)}")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._bad(f"says that {shown(name)} has {count} dimensions")
        shape = struct.unpack(f"<{count}Q", self._take(8 * count, f"the shape of {shown(name)}"))[::-1]
        number, offset = struct.unpack("<IQ", self._take(12, f"the place of {shown(name)}"))
        kind, block_elements, block_bytes = self._kind(name, number)
        if min(shape) < 1 or shape[-1] % block_elements:
            raise self._bad(f"says that {shown(name)} has the shape {shape}, which {kind} cannot have")
        return TensorPlace(name, shape, kind, offset, block_elements, block_bytes, self._path)

    def _kind(self, name: str, number: int) -> tuple[str, int, int]:
        from gguf.constants import (
            GGML_QUANT_SIZES,
            GGMLQuantizationType,
        )  # numpy and yaml: only for a GGUF file

        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._bad(f"has {shown(name)} in a type that is not known ({number})") from None
        return (kind.name, *GGML_QUANT_SIZES[kind])

    def _placed(self, tensors: list[TensorPlace], alignment: int) -> dict[str, TensorPlace]:
        """By name, with offsets in the file; JobError where two share bytes or one reaches beyond the file."""
        start = self.at + -self.at % alignment
        placed: dict[str, TensorPlace] = {}
        end = start
        for each in sorted(tensors, key=lambda tensor: tensor.offset):
            offset = start + each.offset
            if each.offset % alignment or offset < end:
                raise self._bad(f"has {shown(each.name)} where another tensor lies")
            end = offset + each.size_bytes
            if end > self._size:
                raise self._bad(
                    f"ends at byte {self._size}, in or before {shown(each.name)}, which ends at {end}: it is not whole"
                )
            if each.name in placed:
                raise self._bad(f"has {shown(each.name)} twice")
            placed[each.name] = replace(each, offset=offset)
        return placed

    def _alignment(self, values: Mapping[str, Value]) -> int:
        found = values.get("general.alignment", 32)
        if type(found) is not int or found < 8 or found & (found - 1) or found > MAX_ALIGNMENT:
            raise self._bad(f"says general.alignment = {shown(str(found))}; a power of two, at least 8")
        return found

    def _value(self, kind: int, key: str) -> Value:
        if kind == _STRING:
            return self._text(key)
        if kind in _NUMBERS:
            return self._numbers(kind, 1, key)[0]
        if kind != _LIST:
            raise self._bad(f"has {key} in a type that is not known ({kind})")
        kind, count = struct.unpack("<IQ", self._take(12, key))
        self._elements += count
        self._at_most("elements of lists", self._elements, MAX_ELEMENTS)
        if kind == _STRING:
            return tuple(self._text(key) for _ in range(count))
        if kind in _NUMBERS:
            return self._numbers(kind, count, key)
        raise self._bad(f"has a list of lists, or of an unknown type ({kind}), in {key}")

    def _numbers(self, kind: int, count: int, key: str) -> tuple[Scalar, ...]:
        form = f"<{count}{_NUMBERS[kind]}"
        return struct.unpack(form, self._take(struct.calcsize(form), key))

    def _name(self, what: str) -> str:
        found = self._text(what, MAX_NAME_BYTES)
        if not found:
            raise self._bad(f"has {what} that is empty")
        return found

    def _text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        (length,) = struct.unpack("<Q", self._take(8, what))
        if length > most:
            raise self._bad(f"says that {what} has {length} bytes; the limit is {most}")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._bad(f"has {what} in other bytes than UTF-8") from None

    def _whole(self, what: str) -> int:
        found: int = struct.unpack("<I", self._take(4, what))[0]
        return found

    def _take(self, count: int, what: str) -> bytes:
        """The next bytes. Never asks for more than the file has, so that a length out of a file sets nothing aside."""
        end = self.at + count
        if end > self._size:
            raise self._bad(f"ends in {what}: it is not whole")
        if end > self._most:
            raise self._bad(f"has a header of more than {self._most} bytes")
        found = self._file.read(count)
        if len(found) < count:
            raise self._bad(f"ends in {what}: it is not whole")
        self.at = end
        return found

    def _at_most(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise self._bad(f"says that it has {count} {what}; the limit is {most}")

    def _bad(self, what: str) -> JobError:
        return JobError(f"{self._path} {what}")
