"""`fusion-peer` with a watch on its event loop, for the attacks: python tests/attacks/watched.py REPORT ARGUMENTS...

Every half second a line of JSON is added to REPORT: when, the longest that the loop's thread computed without letting
anybody else run since the last line (processor time, so that a busy machine does not count), and the process's memory.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from fusion.cli.main import main
from fusion.swarm.streams.p2p import P2PTransport

TICK_SECONDS = 0.01
REPORT_SECONDS = 0.5


async def watch(report: Path) -> None:
    process, worst, told = psutil.Process(), 0.0, time.monotonic()
    with report.open("a", buffering=1) as lines:
        while True:
            before = time.thread_time()
            await asyncio.sleep(TICK_SECONDS)
            worst = max(worst, time.thread_time() - before)
            if time.monotonic() - told >= REPORT_SECONDS:
                line = {"at": time.time(), "block": worst, "rss": process.memory_info().rss}
                lines.write(json.dumps(line) + "\n")
                worst, told = 0.0, time.monotonic()


def watched(report: Path) -> None:
    launch = P2PTransport.launch.__func__  # type: ignore[attr-defined]

    async def launch_and_watch(cls: type[P2PTransport], config: Any) -> P2PTransport:
        transport: P2PTransport = await launch(cls, config)
        transport._tasks.append(asyncio.create_task(watch(report)))  # ends with the transport
        return transport

    P2PTransport.launch = classmethod(launch_and_watch)  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    watched(Path(sys.argv.pop(1)))
    main()
