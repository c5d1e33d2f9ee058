"""Seconds from `fusion-peer start` to announced in a swarm that is there already."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

from bench.baseline import say

from fusion.cli.local.fleet import COMMAND, LISTEN, open_fleet


async def measure_start(count: int) -> dict[str, Any]:
    seconds = []
    async with open_fleet("fusion-bench-") as fleet:
        first = await fleet.start_peer("bootstrap")
        for number in range(count):
            home = str(fleet.root / f"peer-{number}")
            seconds.append(await _announced_seconds(home, first.address))
            say(f"start {number + 1}: announced after {seconds[-1]:.2f} s")
    return {"announced_seconds": seconds}


async def _announced_seconds(home: str, bootstrap: str) -> float:
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "start", "--home", home, "--listen", LISTEN, "--threads", "1", "--json"),
        *("--stop-with", str(os.getpid()), "--bootstrap", bootstrap),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            if json.loads(line)["event"] == "announced":
                return time.perf_counter() - started
        raise RuntimeError("the peer ended before it was announced")
    finally:
        process.terminate()
        await process.communicate()
