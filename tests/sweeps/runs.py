"""The common part of the smaller sweeps: a quiet run as the reference, then runs of the same plan, each by a fresh swarm. Every
snapshot must equal the quiet run's."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from reports import say, tell
from theatre import ARMED, Theatre, end_launcher, launch
from training import BEGIN_SECONDS, RECOVER_SECONDS, Sweep, compare, quiet_truth

from fusion.cli.local.chaos import last_lines
from fusion.cli.local.chaos_job import another, prepare
from fusion.cli.local.chaos_swarm import Swarm
from fusion.cli.local.fleet import FleetError, open_fleet
from fusion.runtime.peer.client import ClientConfig, open_client

Row = dict[str, Any]
Act = Callable[[Sweep, argparse.Namespace], Awaitable[list[Row]]]


def options_of(doc: str | None, *, stages: int, standbys: int, run_seconds: float) -> argparse.ArgumentParser:
    """The options of all of them."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", type=int, default=stages)
    parser.add_argument("--standbys", type=int, default=standbys)
    parser.add_argument("--run-seconds", type=float, default=run_seconds, help="of quiet training")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser


def report(options: argparse.Namespace, acts: Sequence[tuple[str, Act]]) -> int:
    """Run each act in a run of its own, and print the report. Returns 0 if all succeeded."""
    return tell(asyncio.run(_report(options, acts)), options.json)


async def _report(options: argparse.Namespace, acts: Sequence[tuple[str, Act]]) -> Row:
    began = time.monotonic()
    rows: list[Row] = []
    async with open_fleet("fusion-sweep-plan-") as fleet:
        plan = await fleet.in_thread(prepare, fleet.root / "plan", options.stages, seed=options.seed)
        found = Sweep(plan)
        await quiet_truth(found, options.stages + options.standbys, int(options.run_seconds))
        for name, act in acts:
            try:
                rows += await act(found, options)
            except (FleetError, TimeoutError, ExceptionGroup) as error:
                found.problem(f"{name}: {error or 'timed out'}")
    return {
        "ok": not found.problems,
        "problems": found.problems,
        "rows": rows,
        "snapshots_compared": found.compared,
        "steps": found.steps,
        "seed": options.seed,
        "command": "python " + " ".join(sys.argv),
        "seconds": round(time.monotonic() - began, 1),
    }


@asynccontextmanager
async def running(
    found: Sweep, options: argparse.Namespace, name: str, *, observed: bool = True
) -> AsyncIterator[Theatre]:
    """A fresh swarm whose job has committed its first step, without its launcher. `observed`: with a client, through which
    peers may find each other. After the block the job runs to its end, and every snapshot that was seen is compared with the
    quiet run's."""
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet("fusion-sweep-"))
        swarm = Swarm(fleet, command=ARMED)
        stack.push_async_callback(swarm.aclose)
        await swarm.start(options.stages + options.standbys)
        owners = [peer.peer_id for peer in swarm.peers[: options.stages]]
        job = another(found.plan, name, found.steps, owners)
        theatre = Theatre(swarm, swarm.follow(job.prepared.job), job)
        swarm.on_record = theatre.hear
        await launch(theatre, swarm.peers[-1].address)
        stack.callback(end_launcher, theatre)
        if observed:
            config = ClientConfig(home=fleet.root / "observer", peer=swarm.peers[-1].address)
            theatre.client = await stack.enter_async_context(open_client(config))
        timeline = theatre.timeline
        try:
            await swarm.until(lambda: bool(timeline.commits), BEGIN_SECONDS, "the first step")
            await swarm.until(lambda: theatre.launcher_held, BEGIN_SECONDS, "the job handed over")
            yield theatre
            await swarm.until(
                lambda: timeline.ended_at is not None, 3 * found.steps / found.quiet_rate + RECOVER_SECONDS,
                f"the end, which stands at step {timeline.step}",
            )  # fmt: skip
        except FleetError:
            for peer, words in last_lines(swarm).items():
                say(f"    {peer}: {words}")
            raise
        finally:
            compare(found, theatre, name)
