"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024 ** (i + 1) for i, unit in enumerate("kmgt")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str, where: str) -> int:
    """Bytes of "4GiB", "500 MB", "2g", "1048576". ValueError, naming `where`, for anything else or less than a byte."""
    match = _SIZE.fullmatch(text)
    size = float(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0.0
    if not 1 <= size < 2**63:
        raise ValueError(f"{where}: {text!r:.60} is not a size such as 4GiB or 500MB")
    return int(size)
