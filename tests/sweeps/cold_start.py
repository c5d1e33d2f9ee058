"""Cold start: kills every peer at once with SIGKILL in the middle of a step, then starts all of them again, in any order.

    python tests/sweeps/cold_start.py [--times 3] [--seed 1] [--stages 3] [--standbys 1] [--json FILE]

The peers start with their homes and ports and no bootstrap address, since they know each other from before. The job must go
on from the newest durable snapshot, and end with the weights of a quiet run. Exit 0 if it did each time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from functools import partial

from runs import Row, options_of, report, running
from support.endings import interruptible
from theatre import end_launcher
from training import RECOVER_SECONDS, Sweep, say


async def _cold_start(
    chance: random.Random, number: int, found: Sweep, options: argparse.Namespace
) -> list[Row]:
    name = f"cold start {number}"
    async with running(found, options, f"cold-{number}", observed=False) as theatre:
        swarm, timeline = theatre.swarm, theatre.timeline
        goal = chance.uniform(0.3, 0.8) * found.steps
        await swarm.until(
            lambda: timeline.step >= goal and bool(timeline.snapshots), 600.0, "the middle of the job"
        )
        await asyncio.sleep(chance.uniform(0.0, 2.0 / found.quiet_rate))  # anywhere in a step
        everybody = swarm.peers
        end_launcher(theatre)
        for peer in everybody:
            peer.process.kill()
        at, step, durable = time.time(), timeline.step, max(timeline.snapshots)
        await asyncio.gather(*(peer.process.wait() for peer in everybody))
        attempts = len(timeline.attempts)
        chance.shuffle(everybody)
        say(f"{name}: all killed at step {step}, newest snapshot {durable}; back in the order "
            + ", ".join(peer.name for peer in everybody))  # fmt: skip
        for peer in everybody:
            await swarm.restart(peer)
            await asyncio.sleep(chance.uniform(0.0, 1.0))
        up = time.time()
        await swarm.until(
            lambda: len(timeline.attempts) > attempts, RECOVER_SECONDS, "the job goes on after the start"
        )
        resumed = timeline.attempts[attempts]
        if resumed.step < durable:
            found.problem(f"{name}: it went on from step {resumed.step}, not {durable}")
    row = {"killed_at_step": step, "durable": durable, "resumed_at": resumed.step,
           "seconds_from_the_kill": round(resumed.at - at, 2),
           "seconds_from_the_last_start": round(resumed.at - up, 2)}  # fmt: skip
    say(f"{name}: {row}")
    return [row]


def main() -> int:
    parser = options_of(__doc__, stages=3, standbys=1, run_seconds=40)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    numbers = range(1, options.times + 1)
    return report(options, [(f"cold start {n}", partial(_cold_start, chance, n)) for n in numbers])


if __name__ == "__main__":
    sys.exit(interruptible(main))
