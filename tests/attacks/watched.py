"""`fusion-peer` with a monitor of its event loop, for the attacks: python tests/attacks/watched.py REPORT ARGUMENTS...

It appends a line of JSON to REPORT every half second:

    at, block        unix seconds, and the longest time since the last line that the loop's thread computed without a pause
                     (processor time, so that a busy machine does not count)
    rss, set_aside   the process's memory, and the memory reserved for stages
    files, spent     open files, and the processor time of the peer and its p2pd
    where            the line of our code at which the loop was late most often
    threads, tasks, blocks, frames, records    counts; blocks of Python's memory, received frames, offered records

Each call that computes on the device takes DEVICE_SECONDS longer, as with larger models. Waiting then dominates the jobs, and
most of the machine's processor time is idle in quiet.

A day of the disk lasts 24 s, so that the files of ended jobs expire during a test.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from attacks.processor import family, spent_by
from sweeps.endurance.hurried import hurry

from fusion.cli.main import main
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.peer import machine
from fusion.swarm.dht import service
from fusion.swarm.streams import frame_parser
from fusion.swarm.streams.p2p import P2PTransport

DEVICE_SECONDS = 0.015
TICK_SECONDS = 0.01
LATE_SECONDS = 0.1
OURS, CALLS = str(Path(__file__).parents[2]), 4  # how many of the innermost calls in our code are reported
REPORT_SECONDS = 0.5

looked_at = {"frames": 0, "records": 0}  # by this peer, since its start
budgets: list[MemoryBudget] = []  # of this peer, once it has one


class Where:
    """A thread that samples the stack of the loop's thread whenever the loop is late."""

    def __init__(self) -> None:
        self.ticked = time.monotonic()
        self._thread = threading.get_ident()
        self._seen: Counter[str] = Counter()

    def look(self) -> None:
        while True:
            time.sleep(LATE_SECONDS / 2)
            if time.monotonic() - self.ticked > LATE_SECONDS:
                frame = sys._current_frames().get(self._thread)
                calls = [each for each in traceback.extract_stack(frame) if OURS in each.filename]
                self._seen[" < ".join(f"{each.name} {each.lineno}" for each in reversed(calls[-CALLS:]))] += 1

    def most(self) -> str:
        """The most frequent stack since the last call."""
        seen, self._seen = self._seen, Counter()
        return seen.most_common(1)[0][0] if seen else ""


async def watch(report: Path) -> None:
    process, worst, reported, where = psutil.Process(), 0.0, time.monotonic(), Where()
    threading.Thread(target=where.look, daemon=True, name="where the loop is").start()
    processes = family()  # p2pd runs by now; searching for it again would be slow
    with report.open("a", buffering=1) as lines:
        while True:
            before = time.thread_time()
            await asyncio.sleep(TICK_SECONDS)
            where.ticked = time.monotonic()
            worst = max(worst, time.thread_time() - before)
            if time.monotonic() - reported >= REPORT_SECONDS:
                line = {
                    "at": time.time(),
                    "block": worst,
                    "rss": process.memory_info().rss,
                    "set_aside": sum(sum(budget.by_place.values()) for budget in budgets),
                    "files": process.num_fds(),
                    "spent": spent_by(processes),
                    "where": where.most(),
                    "threads": threading.active_count(),
                    "tasks": len(asyncio.all_tasks()),
                    "blocks": sys.getallocatedblocks(),
                    **looked_at,
                }
                lines.write(json.dumps(line) + "\n")
                worst, reported = 0.0, time.monotonic()


def count_arrivals() -> None:
    """Count the frames that are parsed, and the records that a storing node checks."""

    def counted(module: Any, name: str, what: str) -> None:
        function = getattr(module, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            looked_at[what] += 1
            return function(*args, **kwargs)

        setattr(module, name, count)

    counted(frame_parser, "decode_head", "frames")
    counted(service, "check_offer", "records")


def remember_the_budget() -> None:
    lent = machine.lent_memory

    def remembered(*args: Any) -> MemoryBudget:
        budgets.append(lent(*args))
        return budgets[-1]

    machine.lent_memory = remembered


def slow_device() -> None:
    from fusion.runtime.job.worker import Worker
    from fusion.runtime.serving.ring.stage_session import StageRunner

    # These compute nothing: they reserve the memory of a session and free it.
    submit, quick = Worker.submit, (StageRunner.begin, StageRunner.free)

    def submit_slow(self: Worker, function: Any, *args: Any, **kwargs: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if getattr(function, "__func__", function) not in quick:
                time.sleep(DEVICE_SECONDS)
            return result

        return submit(self, slow, *args, **kwargs)

    Worker.submit = submit_slow  # type: ignore[method-assign, assignment]


def watched(report: Path) -> None:
    launch = P2PTransport.launch.__func__  # type: ignore[attr-defined]

    async def launch_and_watch(cls: type[P2PTransport], config: Any) -> P2PTransport:
        slow_device()
        count_arrivals()
        remember_the_budget()
        transport: P2PTransport = await launch(cls, config)
        transport._tasks.append(asyncio.create_task(watch(report)))  # ends with the transport
        return transport

    P2PTransport.launch = classmethod(launch_and_watch)  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    watched(Path(sys.argv.pop(1)))
    hurry()
    main()
