"""Measures the seconds from `fusion-peer start` until the peer is announced in an existing swarm, and the speed that it announces.
During the first second of every other start a busy loop runs on each core."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from bench.baseline import say

from fusion.cli.local.fleet import COMMAND, LISTEN, open_fleet

BUSY_SECONDS = 1.0
BUSY_LOOP = f"import time\nend = time.monotonic() + {BUSY_SECONDS}\nwhile time.monotonic() < end: pass"


async def measure_start(count: int) -> dict[str, Any]:
    seconds, speeds = list[float](), list[float]()
    async with open_fleet("fusion-bench-") as fleet:
        first = await fleet.start_peer("bootstrap")
        for number in range(count):
            home = str(fleet.root / f"peer-{number}")
            busy = bool(number % 2)
            took, speed = await _announced(home, first.address, busy=busy)
            seconds.append(took)
            speeds.append(speed)
            say(
                f"start {number + 1}{' beside busy loops' if busy else ''}: "
                f"announced {speed / 1e9:.1f} GFLOP/s after {took:.2f} s"
            )
    return {
        "announced_seconds": seconds,
        "flops_per_second": speeds,
        "apart": max(speeds) / min(speeds) - 1,
    }


async def _announced(home: str, bootstrap: str, *, busy: bool) -> tuple[float, float]:
    """The seconds until the peer was announced, and its announced FLOP/s."""
    loops = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", BUSY_LOOP)
        for _ in range(os.cpu_count() or 1 if busy else 0)
    ]
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "start", "--home", home, "--listen", LISTEN, "--threads", "1", "--json"),
        *("--stop-with", str(os.getpid()), "--bootstrap", bootstrap),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    speed = 0.0
    try:
        async for line in process.stdout:
            if (record := json.loads(line))["event"] == "ready":
                speed = float(record["flops_per_second"])
            elif record["event"] == "announced":
                return time.perf_counter() - started, speed
        raise RuntimeError("the peer ended before it was announced")
    finally:
        process.terminate()
        await process.communicate()
        for loop in loops:
            await loop.wait()
