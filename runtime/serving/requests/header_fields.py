"""Fields of a message from outside, each of the type that it has to be, and token ids as bytes. JobError names the field."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fusion.runtime.job.errors import JobError

TOKEN_BYTES = 8  # of an id, on the wire and where it is counted


def whole(header: Mapping[str, Any], name: str, default: int) -> int:
    """An integer field of a message from outside. JobError where it is something else."""
    value = header.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise JobError(f"{name}: a whole number, not {type(value).__name__}")
    return value


def number(header: Mapping[str, Any], name: str, default: float) -> float:
    """A number field of a message from outside, finite. JobError where it is something else."""
    value = header.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JobError(f"{name}: a number, not {type(value).__name__}")
    if not math.isfinite(value):
        raise JobError(f"{name}: a finite number, not {value}")
    return float(value)


def pairs(header: Mapping[str, Any], name: str, most: int) -> tuple[tuple[int, float], ...]:
    """A field of a message from outside that is a list of at most `most` [token id, number], or not there. JobError where it
    is something else."""
    entries = header.get(name, [])
    found = []
    for entry in entries if isinstance(entries, list) and len(entries) <= most else [None]:
        match entry:
            case [int() as token, int() | float() as value] if bool not in (type(token), type(value)):
                found.append((token, float(value)))
            case _:
                raise JobError(f"{name}: a list of at most {most} [token id, number]")
    return tuple(found)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids on the wire: little-endian signed 64-bit, as the models' inputs want them."""
    words = array.array("q", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def unpack_tokens(payload: memoryview) -> list[int]:
    """JobError where the bytes are not a whole number of ids."""
    if len(payload) % TOKEN_BYTES:
        raise JobError(f"token ids: {TOKEN_BYTES} bytes each")
    words = array.array("q")
    words.frombytes(payload)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tolist()
