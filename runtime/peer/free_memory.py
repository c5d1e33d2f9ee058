"""The memory that this process may still allocate: the machine's free memory, within the limits of its control groups (a container, a
service). The kernel kills a process whose group exceeds its limit, whatever the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from fusion.swarm.machine import groups

# Of version 2 and 1 of control groups: limit and usage of a group, and the reclaimable part of the usage.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> int:
    """Never below 0."""
    return max(0, min((int(psutil.virtual_memory().available), *_left_by_groups())))


def _left_by_groups() -> Iterator[int]:
    """The bytes left in each group of this process that has a limit."""
    for folder in groups("memory"):
        for limit, usage, cached in FILES:
            with suppress(OSError, ValueError):  # of the other version; "max": there is no limit
                most = int((folder / limit).read_text())
                yield most - int((folder / usage).read_text()) + _cached(folder, cached)


def _cached(folder: Path, name: str) -> int:
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
