"""The resources of this process: its control groups (a container, a service's limit), and the cores that it may run on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The number of cores in our affinity mask, limited by the CPU quota of our groups (`docker run --cpus`): with more threads than that
    the kernel throttles all of them for a part of each tenth of a second."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return max(1, min((found, *_cores_of_groups())))


def groups(controller: str) -> Iterator[Path]:
    """The folders of our group and its parents, where the limits of `controller` may be read. In a container the group is at the root, and
    the path may exist on its host only."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:  # number:controllers:path; the second version has no controllers there
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = MOUNTED / controller if controllers else MOUNTED
        inside = PurePosixPath(path.lstrip("/"))
        yield from (root / each for each in (inside, *inside.parents))


def _cores_of_groups() -> Iterator[int]:
    """The CPU quota of each group, in whole cores, where it has one that can be read."""
    for folder in groups("cpu"):
        with suppress(OSError, ValueError):  # of the second version: "max 100000" without a limit
            quota, period = (folder / "cpu.max").read_text().split()
            yield math.ceil(int(quota) / max(int(period), 1))
        with suppress(OSError, ValueError):  # of the first: -1 without one
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                yield math.ceil(int(quota) / max(int(period), 1))
