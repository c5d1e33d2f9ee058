"""What is missing where nobody holds a stage, in words for people."""

from __future__ import annotations

from collections.abc import Sequence


def needs(stage: int, memory_bytes: Sequence[int], of: str = "") -> str:
    """E.g. "stage 2 of demo needs a peer with 1.2 GiB free". `memory_bytes`: of each stage, as far as it is known; `of`:
    the job's name, where it does not go without saying."""
    named = f"stage {stage} of {of}" if of else f"stage {stage}"
    if stage >= len(memory_bytes):
        return f"{named} needs a peer"
    need = memory_bytes[stage]
    shown = f"{need / 2**30:.1f} GiB" if need >= 100 << 20 else f"{max(1, -(-need // 2**20))} MiB"
    return f"{named} needs a peer with {shown} free"
