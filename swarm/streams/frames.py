"""The wire format of a frame, and its caps. Pure: bytes in, values out.

    head     4 bytes  length of the header, big-endian; 0 is the end mark (a clean end)
             8 bytes  length of the payload
    header   msgpack of [kind, {...}]
    payload  raw bytes, tensor data as in memory

Both lengths are checked against `FrameLimits` before anything is read or allocated for them.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from fusion.swarm.errors import FrameError
from fusion.swarm.transport import Buffer, Header

_HEAD = struct.Struct(">IQ")
HEAD_BYTES = _HEAD.size
END = _HEAD.pack(0, 0)  # the end mark, last on a stream that its sender closed; without it the stream broke

MAX_KIND_CHARACTERS = 64
MAX_CONTAINERS = 4096  # lists and maps in one header: an empty one is a byte on the wire and 64 in memory
CONTAINER_BYTES = 96  # of memory, estimated for each in a header that waits to be sent
# Of memory for all values of one header: short texts take twenty times their bytes. The largest headers sent have 30 000 token
# ids, or are batches of 1024 headers; both fit.
MAX_VALUE_BYTES = 2 << 20
# A header of fewer bytes cannot exceed either: each list, map or value takes a byte on the wire, and no more memory for each of
# its bytes than an empty map.
SHORT_HEADER_BYTES = min(MAX_CONTAINERS, MAX_VALUE_BYTES // CONTAINER_BYTES)
_MAX_DEPTH = 16  # of lists and maps in a header


@dataclass(frozen=True, kw_only=True)
class FrameLimits:
    """Caps on one frame, the same for what we send and what we accept."""

    header_bytes: int = 256 * 1024
    payload_bytes: int = 512 * 1024 * 1024

    def __post_init__(self) -> None:
        if not 64 <= self.header_bytes <= 1 << 24:
            raise ValueError(f"header_bytes must lie between 64 and {1 << 24}, not {self.header_bytes}")
        if not 0 <= self.payload_bytes <= 1 << 40:
            raise ValueError(f"payload_bytes must lie between 0 and {1 << 40}, not {self.payload_bytes}")


DEFAULT_LIMITS = FrameLimits()
Message = tuple[bytes, list[memoryview], int]  # see `encode`


def encode(
    kind: str,
    header: Mapping[str, Any] | None,
    payload: Sequence[Buffer],
    limits: FrameLimits = DEFAULT_LIMITS,
) -> Message:
    """Head and header as one bytes object, the payload as flat byte views in order (nothing is copied), and the
    payload's length in bytes.

    Raises FrameError for a frame that passes `limits` and ValueError for a header msgpack cannot carry.
    """
    if not 0 < len(kind) <= MAX_KIND_CHARACTERS:
        raise FrameError(f"the kind of a frame has 1 to {MAX_KIND_CHARACTERS} characters, not {len(kind)}")
    views = [view for view in (_flat(part) for part in payload) if view.nbytes]
    size = sum(view.nbytes for view in views)
    try:
        packed: bytes = msgpack.packb([kind, {} if header is None else dict(header)])
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"header of a {kind!r} frame: {error}") from error
    _check(len(packed), size, limits)
    return _HEAD.pack(len(packed), size) + packed, views, size


def decode_head(data: Buffer, limits: FrameLimits = DEFAULT_LIMITS, offset: int = 0) -> tuple[int, int]:
    """Lengths in bytes of the header (0: a clean end) and the payload. Raises FrameError for lengths over the caps."""
    header_bytes, payload_bytes = _HEAD.unpack_from(data, offset)
    if header_bytes == 0:
        if payload_bytes:
            raise FrameError("a frame without a header")
        return 0, 0
    _check(header_bytes, payload_bytes, limits)
    return header_bytes, payload_bytes


def decode_header(data: Buffer) -> tuple[str, Header]:
    """Kind and header of a frame. Raises FrameError for bytes that are not exactly one header, or one of more than
    MAX_CONTAINERS lists and maps or MAX_VALUE_BYTES of memory."""
    # Shorter headers cannot exceed the caps.
    containers = _Containers() if len(data) > SHORT_HEADER_BYTES else None
    try:
        value = msgpack.unpackb(
            data,
            strict_map_key=True,
            list_hook=containers,
            object_hook=containers,
            ext_hook=_refused,
            max_ext_len=0,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=len(data),
            max_map_len=len(data),
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise FrameError(f"a header that is not msgpack: {type(error).__name__}") from error
    if not (isinstance(value, list) and len(value) == 2):
        raise FrameError("a header that is not [kind, map]")
    kind, header = value
    if not (isinstance(kind, str) and 0 < len(kind) <= MAX_KIND_CHARACTERS):
        raise FrameError("a frame without a kind")
    if not isinstance(header, dict):
        raise FrameError("a header that is not [kind, map]")
    _check_keys(header, _MAX_DEPTH)
    return kind, header


class _Containers:
    """msgpack hook, called with each decoded list and map: aborts the decoding of a header with too many of them, or too large
    ones."""

    __slots__ = ("count", "value_bytes")

    def __init__(self) -> None:
        self.count = 0
        self.value_bytes = 0  # of memory

    def __call__(self, made: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
        self.count += 1
        if self.count > MAX_CONTAINERS:
            raise FrameError(f"a header of more than {MAX_CONTAINERS} lists and maps")
        self.value_bytes += sum(map(sys.getsizeof, made))
        if isinstance(made, dict):
            self.value_bytes += sum(map(sys.getsizeof, made.values()))
        if self.value_bytes > MAX_VALUE_BYTES:
            raise FrameError(f"a header whose values take more than {MAX_VALUE_BYTES} bytes of memory")
        return made


def _refused(code: int, data: bytes) -> Any:
    raise FrameError("a header with an extension of msgpack's")  # an empty one: max_ext_len refuses others


def _check(header_bytes: int, payload_bytes: int, limits: FrameLimits) -> None:
    if header_bytes > limits.header_bytes:
        raise FrameError(f"a header of {header_bytes} bytes; at most {limits.header_bytes} are allowed")
    if payload_bytes > limits.payload_bytes:
        raise FrameError(f"a payload of {payload_bytes} bytes; at most {limits.payload_bytes} are allowed")


def _check_keys(value: dict[Any, Any] | list[Any], depth: int) -> None:
    if depth == 0:
        raise FrameError(f"a header nested deeper than {_MAX_DEPTH}")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise FrameError("a header with a key that is not text")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _check_keys(item, depth - 1)


def _flat(part: Buffer) -> memoryview:
    view = memoryview(part)
    if not view.c_contiguous:
        raise ValueError("a payload buffer must be contiguous")
    if not view.nbytes:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
