"""TOML files of users: small, read whole, every mistake in one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from fusion.runtime.job.errors import JobError


def read(path: Path, most_bytes: int) -> str:
    """The text of a file. JobError if it cannot be read, is larger, or no UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)  # a file named by mistake may be larger than the memory
    except OSError as error:
        raise JobError(f"{path}: {error.strerror or error}") from None
    if len(data) > most_bytes:
        raise JobError(f"{path}: larger than {most_bytes} bytes")
    try:
        return data.decode("utf-8-sig")  # editors of Windows write a mark first
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: not UTF-8: {error}") from None


def tables(text: str, what: str) -> dict[str, Any]:
    """The tables of a TOML text that should be `what` ("a job"). JobError if it is no TOML."""
    try:
        return tomllib.loads(text)
    except ValueError as error:  # a number of thousands of digits, too
        raise JobError(f"not TOML: {error}") from None
    except RecursionError:
        raise JobError(f"not {what}: tables or lists nested too deep") from None
