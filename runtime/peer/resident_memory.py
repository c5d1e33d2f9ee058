"""The resident memory of this process, trimmed to what is reserved for stages (`fusion.runtime.device.surplus`).

Only on Linux with glibc, where the kernel reports it and the allocator can return it; elsewhere nothing is done.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fusion.runtime.device.surplus import Surplus
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.job.worker import Worker

STATM, MAPS = Path("/proc/self/statm"), Path("/proc/self/maps")


def lent_memory(lent_bytes: int, working_bytes: int, worker: Worker) -> MemoryBudget:
    """A budget without reservations; from now on `worker` trims the process's memory to it. `working_bytes`: as in
    `fusion.runtime.planes.plane.Plane`."""
    budget = MemoryBudget(lent_bytes)
    worker.between_parts(_trimmer(budget, working_bytes))
    return budget


def _trimmer(budget: MemoryBudget, working_bytes: int) -> Callable[[], None]:
    """A function that trims where it is due, for one thread at a time. Takes 20 us, and milliseconds where memory is returned."""
    trim = _trim()
    if trim is None or not STATM.exists():
        return lambda: None
    trim()  # what measuring the device has freed
    surplus = Surplus(private_bytes(), budget.lent_bytes, working_bytes)

    def trim_if_due() -> None:
        if surplus.is_due(private_bytes(), sum(budget.by_place.values())):
            trim()
            surplus.returned(private_bytes())

    return trim_if_due


def drop_code_pages() -> None:
    """Drop the resident pages of libraries' code: pages that run again come back from the file cache in a few milliseconds. Imports and
    measuring the device run more of it than a stage does, 160 MiB with PyTorch."""
    with suppress(OSError, AttributeError, ValueError):
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for line in MAPS.read_text().splitlines():
            where, access, _, _, _, *path = line.split(maxsplit=5)
            # Not writable, so that all of it can be read from the file again.
            if access == "r-xp" and path and ".so" in path[0]:
                begin, end = (int(each, 16) for each in where.split("-"))
                madvise(begin, end - begin, mmap.MADV_DONTNEED)


def private_bytes() -> int:
    """Resident bytes that are not of a file: RssAnon."""
    _, resident, shared, *_ = STATM.read_bytes().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _trim() -> Callable[[], object] | None:
    with suppress(OSError, AttributeError):
        malloc_trim = ctypes.CDLL(None).malloc_trim
        malloc_trim.argtypes, malloc_trim.restype = [ctypes.c_size_t], ctypes.c_int
        return lambda: malloc_trim(0)
    return None
