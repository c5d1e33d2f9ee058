"""One run of a training sweep: the swarm, the job, and the role of each process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from fusion.cli.local.chaos_job import ChaosJob, shards
from fusion.cli.local.chaos_swarm import Swarm
from fusion.cli.local.chaos_timeline import Timeline
from fusion.cli.local.fleet import LocalPeer, Record
from fusion.runtime.job.context import Context
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError

HERE = Path(__file__).parent
ARMED = (sys.executable, str(HERE / "armed.py"))
STANDBY_SECONDS = 30.0  # for every stage to have a standby that is ready; then on without
CALM_STEPS = 5  # committed between a recovery and the next kill


@dataclass
class Theatre:
    """One run: its swarm, its job, and the role of each process."""

    swarm: Swarm
    timeline: Timeline
    job: ChaosJob
    launcher: asyncio.subprocess.Process | None = None
    launcher_held: bool = False
    listening: asyncio.Task[None] | None = None  # to the launcher
    bootstrap: LocalPeer | None = None
    client: Context | None = None
    found: dict[int, tuple[str, ...]] = field(default_factory=dict)
    fired: dict[int, Record] = field(default_factory=dict)  # kill id -> its last word

    def hear(self, name: str, record: Record) -> None:
        if record.get("event") == "fired":
            self.fired.setdefault(record["id"], record)
        if record.get("event") == "step" and record.get("job") == self.timeline.job:
            step = int(record["snapshot_step"])
            if record["snapshot"] and step not in self.found:
                # At once: peers keep the newest two.
                read = shards(record["snapshot"], self.timeline.job, self.job.stages, self.swarm.homes)
                if read is not None:
                    self.found[step] = read

    async def open_bootstrap(self) -> None:
        """Start the next bootstrap peer, which lends almost no memory, and which new peers join through."""
        self.bootstrap = await self.swarm.start_one("--memory", "1KiB")


def arm(peer: LocalPeer, order: Record) -> None:
    """Set a trap in a peer, atomically."""
    scratch = peer.home / "arm.new"
    scratch.write_text(json.dumps(order))
    scratch.replace(peer.home / "arm.json")


async def calm(theatre: Theatre, standbys: bool) -> None:
    """Wait until the job commits steadily, replacements run, and every stage has a ready standby."""
    swarm, timeline = theatre.swarm, theatre.timeline
    until = time.monotonic() + STANDBY_SECONDS
    await swarm.settle()
    attempt = len(timeline.attempts)
    start = len(timeline.commits)
    while timeline.ended_at is None and time.monotonic() < until:
        if len(timeline.attempts) != attempt:
            attempt, start = len(timeline.attempts), len(timeline.commits)
        steady = len(timeline.commits) >= start + CALM_STEPS and None not in timeline.owners
        if steady and (not standbys or await ready_standbys(theatre) == theatre.job.stages):
            return
        await asyncio.sleep(0.3)


async def ready_standbys(theatre: Theatre) -> int:
    """How many stages have a living standby that is published as ready."""
    assert theatre.client is not None
    living = {peer.peer_id for peer in theatre.swarm.peers}
    directory, job = theatre.client.directory, JobId(theatre.timeline.job)
    with contextlib.suppress(SwarmError, TimeoutError):
        async with asyncio.timeout(3.0):
            claims = await asyncio.gather(*(directory.claims(job, s) for s in range(theatre.job.stages)))
            return sum(
                any(c.role == "standby" and c.ready and c.peer in living for c in found) for found in claims
            )
    return 0


async def launch(theatre: Theatre, address: str) -> None:
    root = theatre.swarm.fleet.root
    with open(root / "launcher.log", "ab") as log:
        theatre.launcher = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "launcher.py"), str(theatre.job.store), theatre.timeline.job),
            *(str(root / "launcher"), address),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    theatre.listening = asyncio.create_task(_hear_launcher(theatre))


async def _hear_launcher(theatre: Theatre) -> None:
    assert theatre.launcher is not None and theatre.launcher.stdout is not None
    async for _ in theatre.launcher.stdout:
        theatre.launcher_held = True


def end_launcher(theatre: Theatre) -> None:
    if theatre.launcher is not None and theatre.launcher.returncode is None:
        theatre.launcher.send_signal(signal.SIGKILL)
    if theatre.listening is not None:
        theatre.listening.cancel()
