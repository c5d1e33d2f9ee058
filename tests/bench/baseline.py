"""Runs the baselines, and has what all measurements share."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from fusion.cli.local.fleet import LocalPeer

SCRIPT = Path(__file__).with_name("one_process.py")


async def baseline(kind: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a baseline in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SCRIPT), kind, json.dumps(request)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    out, err = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"baseline {kind}: {err.decode()[-500:]}")
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def peak_bytes(peer: LocalPeer) -> int:
    """The peak resident size of the peer's process."""
    status = Path(f"/proc/{peer.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
