"""Seconds from `fusion-peer start` to announced in a swarm that is there already, and the speed that is announced; every other
start has a busy loop on each core beside it for its first second."""

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
    """Seconds until it was, and with how many FLOP/s."""
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
