"""What this process may use of its machine: the control groups that it is in (a container, a service's limit), and the cores that
it may run on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNTED = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Those that this process may run on, and no more than the time that its groups may have amounts to (`docker run --cpus`): with
    more threads than that the kernel stops all of them for a part of each tenth of a second."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return max(1, min((found, *_cores_of_groups())))


def groups(controller: str) -> Iterator[Path]:
    """The folder of our group, and of those that it lies in, where what `controller` limits may be read. A container sees its own at the
    root, and may be told a path that is there for its host alone."""
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
    """What each group has, in whole cores, as far as it has a limit and the kernel tells."""
    for folder in groups("cpu"):
        with suppress(OSError, ValueError):  # of the second version: "max 100000" without a limit
            quota, period = (folder / "cpu.max").read_text().split()
            yield math.ceil(int(quota) / max(int(period), 1))
        with suppress(OSError, ValueError):  # of the first: -1 without one
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                yield math.ceil(int(quota) / max(int(period), 1))
