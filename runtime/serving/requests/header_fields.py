"""Typed fields of received messages, and token ids as bytes. JobError names the field."""

from __future__ import annotations

import array
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fusion.runtime.job.errors import JobError

TOKEN_BYTES = 8  # of a token id, on the wire and in memory


def whole(header: Mapping[str, Any], name: str, default: int) -> int:
    """An integer field. JobError for another type."""
    value = header.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise JobError(f"{name}: a whole number, not {type(value).__name__}")
    return value


def number(header: Mapping[str, Any], name: str, default: float) -> float:
    """A finite number. JobError for anything else."""
    value = header.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JobError(f"{name}: a number, not {type(value).__name__}")
    if not math.isfinite(value):
        raise JobError(f"{name}: a finite number, not {value}")
    return float(value)


def pairs(header: Mapping[str, Any], name: str, limit: int) -> tuple[tuple[int, float], ...]:
    """A field that is a list of at most `most` [token id, number]; empty where it is missing. JobError for anything else."""
    entries = header.get(name, [])
    values = []
    for entry in entries if isinstance(entries, list) and len(entries) <= limit else [None]:
        match entry:
            case [int() as token, int() | float() as value] if bool not in (type(token), type(value)):
                values.append((token, float(value)))
            case _:
                raise JobError(f"{name}: a list of at most {limit} [token id, number]")
    return tuple(values)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids on the wire: little-endian signed 64-bit, as in the models' inputs."""
    ids = array.array("q", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack_tokens(payload: memoryview) -> list[int]:
    """JobError where the bytes are not a whole number of ids."""
    if len(payload) % TOKEN_BYTES:
        raise JobError(f"token ids: {TOKEN_BYTES} bytes each")
    ids = array.array("q")
    ids.frombytes(payload)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
