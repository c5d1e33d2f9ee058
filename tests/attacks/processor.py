"""Measures the processor time of processes, and limits a process to a share of a core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

SHARE = 0.25  # of a core, p2pd included
BURST_SECONDS = 0.2  # of unused processor time that may be saved up
LOOK_SECONDS = 0.02


def spent_seconds(pid: int | None = None) -> float:
    """Processor time of the process `pid` (by default this one) and its descendants."""
    return spent_by(family(pid))


def spent_by(processes: Iterable[psutil.Process]) -> float:
    return sum(_spent(process) for process in processes)


async def hold_to_share(pid: int, share: float = SHARE) -> None:
    """Suspend a process and its descendants whenever they have used more than `share` of a core, until cancelled."""
    processes = family(pid)  # an attack starts no more of them, and searching again would be slow
    credit, looked, before, stopped = 0.0, time.monotonic(), spent_by(processes), False
    try:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now, spent = time.monotonic(), spent_by(processes)
            credit = min(BURST_SECONDS, credit + share * (now - looked) - (spent - before))
            looked, before = now, spent
            if stopped != (credit < 0.0):
                stopped = not stopped
                _signal(processes, stopped)
    finally:
        if stopped:
            _signal(processes, False)


def _signal(processes: Iterable[psutil.Process], stop: bool) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.suspend() if stop else process.resume()


def family(pid: int | None = None) -> list[psutil.Process]:
    with suppress(psutil.Error):
        head = psutil.Process(pid)
        return [head, *head.children(recursive=True)]
    return []


def _spent(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
