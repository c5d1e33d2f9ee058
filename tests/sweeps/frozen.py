"""Frozen peers: stops the owner of each stage with SIGSTOP, for a moment and for long, in the middle of training.

    python tests/sweeps/frozen.py [--seed 1] [--stages 2] [--standbys 2] [--short 3] [--long 60] [--json FILE]

A freeze of `--short` seconds may only pause the job: the owners stay, and no step is discarded. After `--long` seconds the
stage must have another owner, and the frozen peer must give the stage up when it wakes, and stay idle. The weights of every
snapshot must be those of a quiet run. Exit 0 if all of this is true.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from functools import partial

from runs import Row, options_of, report, running
from support.endings import interruptible
from theatre import Theatre, calm
from training import RECOVER_SECONDS, Sweep, say

from fusion.cli.local.chaos_swarm import processes
from fusion.cli.local.fleet import FleetError

REJOIN_SECONDS = 30.0


async def _freeze_owner(stage: int, found: Sweep, options: argparse.Namespace) -> list[Row]:
    """Run the job once, and freeze the owner of this stage twice."""
    rows = []
    async with running(found, options, f"frozen-{stage}") as theatre:
        for seconds in (options.short, options.long):
            await calm(theatre, options.standbys > 0)
            rows.append(await _freeze(found, theatre, stage, seconds, takeover=seconds == options.long))
    return rows


async def _freeze(found: Sweep, theatre: Theatre, stage: int, seconds: float, *, takeover: bool) -> Row:
    swarm, timeline = theatre.swarm, theatre.timeline
    peer = swarm.owner(timeline, stage)
    if peer is None:
        raise FleetError(f"nobody owns stage {stage}")
    name = f"stage {stage} frozen for {seconds:g} s at step {timeline.step}"
    attempts, at = len(timeline.attempts), time.time()
    await swarm.freeze(processes(peer), seconds)
    await swarm.settle()
    awake = time.time()
    await swarm.until(
        lambda: timeline.ended_at is not None or any(c.at > awake for c in timeline.commits),
        RECOVER_SECONDS, f"{name}: no commit after it woke",
    )  # fmt: skip
    first, new = timeline.recovery(at)
    row = {"stage": stage, "seconds": seconds, "stall_seconds": timeline.stall(at, awake), "attempts":
           len(timeline.attempts) - attempts, "takeover_seconds": first, "new_step_seconds": new}  # fmt: skip
    say(f"{name}: {row}")
    if not takeover and len(timeline.attempts) != attempts:
        found.problem(f"{name}: a step was discarded")
    if not takeover and swarm.owner(timeline, stage) is not peer:
        found.problem(f"{name}: the stage changed hands")
    if takeover:
        if not any(at < commit.at < awake for commit in timeline.commits if commit.attempt.at > at):
            found.problem(f"{name}: nobody took over while it was frozen")
        with contextlib.suppress(FleetError):
            await swarm.until(
                lambda: (timeline.job, stage) not in swarm.holds.get(peer.name, []), REJOIN_SECONDS, "idle"
            )
        row["holds_after"] = [held for _, held in swarm.holds.get(peer.name, [])]
        if stage in row["holds_after"] and swarm.owner(timeline, stage) is not peer:
            found.problem(f"{name}: it still holds the stage after it woke")
        if peer.process.returncode is not None:
            found.problem(f"{name}: it has ended")
    return row


def main() -> int:
    parser = options_of(__doc__, stages=2, standbys=2, run_seconds=120)
    parser.add_argument("--short", type=float, default=3.0, help="seconds that must do nothing")
    parser.add_argument("--long", type=float, default=60.0, help="seconds after which another has the stage")
    options = parser.parse_args()
    stages = sorted({0, options.stages - 1})
    return report(options, [(f"stage {stage}", partial(_freeze_owner, stage)) for stage in stages])


if __name__ == "__main__":
    sys.exit(interruptible(main))
