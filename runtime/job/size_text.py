"""Sizes as people write them and read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def needs(stage: int, memory_bytes: Sequence[int], of: str = "") -> str:
    """E.g. "stage 2 of demo needs a peer with 1.2 GiB free". `memory_bytes`: of each stage, where it is known; `of`: the job's name,
    or empty to leave it out."""
    named = f"stage {stage} of {of}" if of else f"stage {stage}"
    if stage >= len(memory_bytes):
        return f"{named} needs a peer"
    need = memory_bytes[stage]
    shown = f"{need / 2**30:.1f} GiB" if need >= 100 << 20 else f"{max(1, -(-need // 2**20))} MiB"
    return f"{named} needs a peer with {shown} free"
