"""The client without the peer extra: seconds from the start of `fusion-peer generate` to its first token on loopback, and the size of
its environment. Imports take most of the time, so measure on quiet cores."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # its support is shared

from bench.baseline import say
from bench.decode import make_model
from support.light import light_environment, size_bytes

from fusion.cli.local.fleet import open_fleet

TOKENS = 4


async def measure_thin(count: int) -> dict[str, Any]:
    seconds, cpu = [], []
    async with open_fleet("fusion-thin-") as fleet:
        path = str(fleet.root / "llama")
        make_model(path)
        peer = await fleet.start_peer("peer-1")
        home = str(fleet.root / "client")
        await fleet.run("serve", "serve", path, "--name", "llama", "--home", home, "--peer", peer.address)
        command = light_environment(fleet.root / "thin")
        size = size_bytes(fleet.root / "thin" / "site")
        for number in range(count + 1):
            first, used = await _first_token(command, fleet.root / "thin", peer.address)
            if number:  # the first one fills the caches of the disk
                seconds.append(first)
                cpu.append(used)
                say(f"thin {number}: first token after {first:.2f} s, {used:.2f} s of CPU in all")
    say(f"thin: its environment has {size / 2**20:.0f} MiB")
    return {"first_token_seconds": seconds, "cpu_seconds": cpu, "environment_bytes": size}


async def _first_token(command: list[str], folder: Path, address: str) -> tuple[float, float]:
    """The seconds to the first token, and the processor time of the whole command."""
    started, before = time.perf_counter(), os.times()
    process = await asyncio.create_subprocess_exec(
        *(*command, "generate", "--prompt-ids", "1,2,3", "--max-tokens", str(TOKENS), "--peer", address),
        *("--home", str(folder / "home")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=folder,
    )
    assert process.stdout is not None
    await process.stdout.readexactly(1)
    first = time.perf_counter() - started
    await process.communicate()
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return first, used
