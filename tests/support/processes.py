"""Queries of processes that may end meanwhile: no function raises because a process is gone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def state(process: int | psutil.Process) -> str:
    """psutil's status of the process; `psutil.STATUS_DEAD` if it does not exist any more."""
    with suppress(psutil.NoSuchProcess):
        if isinstance(process, int):
            process = psutil.Process(process)
        if process.is_running():
            return str(process.status())
    return str(psutil.STATUS_DEAD)


def alive(process: int | psutil.Process) -> bool:
    """Whether the process runs. A zombie does not: its parent has only not reaped it."""
    return state(process) not in (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)


def below(pid: int, where: Callable[[psutil.Process], bool] = lambda process: True) -> list[psutil.Process]:
    """The living descendants of a process for which `where` is true."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if alive(process) and where(process):
                    found.append(process)
    return found


def marked(folder: Path) -> list[str]:
    """The commands of the living processes that have `folder` as their temporary folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder) and alive(process):
                found.append(" ".join(process.cmdline()))
    return found
