"""`fusion-peer chaos`: proof on your own machine that a swarm whose peers are killed trains as one that is left alone.

A swarm of real peers on loopback trains a small GPT on Python's standard library twice: once in peace, once while
peers are killed (and, if asked, frozen and cut off) at times and in roles that a seed decides. Both runs must end with
the same weights, bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from fusion.cli.local.chaos_plan import ChaosConfig, fault_plan, parse_seconds
from fusion.cli.local.chaos_report import ChaosReport, Run, show
from fusion.cli.local.chaos_swarm import Swarm
from fusion.cli.local.chaos_timeline import Timeline
from fusion.cli.local.fleet import FleetError, open_fleet, while_parent_lives
from fusion.cli.terminal import options
from fusion.cli.terminal.errors import FAILED
from fusion.cli.terminal.extras import need_peer_extra
from fusion.cli.terminal.loop import run
from fusion.cli.terminal.output import Output, bytes_text

if TYPE_CHECKING:
    from fusion.cli.local.chaos_job import ChaosJob

TRIAL_STEPS = 60  # to learn how fast this machine is
WARM_UP = 10
EXPECTED_GOODPUT = 0.85  # of the run with faults, to choose how many steps it has
BEGIN_SECONDS = 120.0
STALL_SECONDS = 60.0  # without a commit the run has failed
LAST_SECONDS = 5.0  # before the end no fault is injected: nothing would be left to show the recovery
WORDS = 6  # lines of each peer's log in the report of a run that failed


def chaos(
    peers: Annotated[
        int, typer.Option("--peers", help="Peers in all: those that train, a stage each, and the standbys.")
    ] = 6,
    kill_every: Annotated[
        str, typer.Option("--kill-every", metavar="TIME", help="Time between two kills, such as 15s.")
    ] = "15s",
    minutes: Annotated[
        float, typer.Option("--minutes", help="Approximate duration of the run with faults.")
    ] = 2.0,
    standbys: Annotated[
        int | None,
        typer.Option("--standbys", help="How many of the peers stand by (default: a third of them)."),
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="Also freeze peers for 3 to 10 seconds (SIGSTOP).")
    ] = False,
    partition: Annotated[
        bool, typer.Option("--partition", help="Also partition groups of peers off for 5 to 15 seconds.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the faults (default: drawn at random, and shown).")
    ] = None,
    json: options.Json = False,
    debug: options.Debug = False,
    stop_with: options.StopWith = None,
) -> None:
    """Train on peers of this machine, kill some meanwhile, and compare the result with that of a quiet run."""
    need_peer_extra("chaos")
    config = ChaosConfig(
        peers=peers,
        standbys=standbys,
        kill_every_seconds=parse_seconds(kill_every, "--kill-every"),
        minutes=minutes,
        stop=stop,
        partition=partition,
        seed=secrets.randbelow(1 << 31) if seed is None else seed,
    )
    # Progress goes to stderr when the last line of stdout is for a program.
    output = Output(stdout=sys.stderr if json else sys.stdout)
    report = run(while_parent_lives(stop_with, _chaos(config, output)), debug=debug)
    Output(as_json=json).emit(report.record())
    if not report.exact:
        raise typer.Exit(FAILED)


async def _chaos(config: ChaosConfig, output: Output) -> ChaosReport:
    began = time.monotonic()
    report = ChaosReport(config=config)
    async with open_fleet("fusion-chaos-") as fleet:
        swarm = Swarm(fleet)
        try:
            await _both_runs(report, swarm, output)
        except (FleetError, TimeoutError) as error:
            report.error = str(error) or "timed out"
        finally:
            if not report.exact:
                report.last_lines = last_lines(swarm)
            await swarm.aclose()
    report.seconds = time.monotonic() - began
    show(report, output)
    return report


async def _both_runs(report: ChaosReport, swarm: Swarm, output: Output) -> None:
    config = report.config
    output.print_line(
        f"1. {config.peers} peers start: {config.stages} train, {config.standby_count} stand by; "
        f"seed {config.seed}"
    )
    from fusion.cli.local import chaos_job

    preparing = asyncio.create_task(
        swarm.fleet.in_thread(chaos_job.prepare, swarm.fleet.root / "plan", config.stages, seed=config.seed)
    )
    await swarm.start(config.peers)
    plan = await preparing
    trial = await _trial(plan, swarm, output)
    report.steps = max(TRIAL_STEPS, int(trial * config.minutes * 60 * EXPECTED_GOODPUT))
    output.print_line(f"\n2. A quiet run of {report.steps} steps, about {report.steps / trial:.0f} s")
    report.quiet = await train(plan, "quiet", report.steps, swarm, output)
    # Longer than the run should take, in case it is slower than expected.
    report.plan = fault_plan(config, 3 * config.minutes * 60 + 120)
    output.print_line(
        f"\n3. The same {report.steps} steps, a peer killed every {config.kill_every_seconds:g} s"
    )
    report.faulted = await train(plan, "faulted", report.steps, swarm, output, report)


async def _trial(plan: ChaosJob, swarm: Swarm, output: Output) -> float:
    """Steps a second that this machine makes."""
    trial = await train(plan, "trial", TRIAL_STEPS, swarm, output)
    rate = trial.timeline.rate(WARM_UP)
    if rate <= 0:
        raise FleetError("the trial run committed too few steps to tell the speed")
    return rate


async def train(
    plan: ChaosJob, name: str, steps: int, swarm: Swarm, output: Output, report: ChaosReport | None = None
) -> Run:
    """Launch the plan as a job of so many steps and wait for its end, with the faults of `report.plan` if there is
    one. What was seen so far is in `report.faulted` even where this raises."""
    from fusion.cli.local import chaos_job

    owners = [peer.peer_id for peer in swarm.peers[: plan.stages]]
    job = chaos_job.another(plan, name, steps, owners)
    timeline = swarm.follow(job.prepared.job)
    run = Run(timeline=timeline)
    if report is not None:
        report.faulted = run
    launcher = swarm.fleet.root / f"launcher-{name}"
    async with chaos_job.launched(job, launcher, swarm.peers[0].address) as holding:
        await swarm.until(lambda: bool(timeline.commits), BEGIN_SECONDS, f"the first step of the {name} run")
        faults = asyncio.create_task(_faults(swarm, timeline, report, steps)) if report else None
        try:
            await _to_the_end(swarm, timeline, name, steps, output)
            if not holding.done() and report is None:
                await asyncio.wait([holding], timeout=chaos_job.HANDOVER_SECONDS)
        finally:
            if faults is not None:
                faults.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await faults
    output.end_status()
    if timeline.last.get("state") != "done":
        reason = timeline.last.get("error") or timeline.last.get("message")
        raise FleetError(f"the {name} run {timeline.last.get('state')}: {reason}")
    run.shard_step = int(timeline.last["snapshot_step"])
    run.shards = chaos_job.shards(timeline.last["snapshot"], timeline.job, plan.stages, swarm.homes)
    return run


async def _to_the_end(swarm: Swarm, timeline: Timeline, name: str, steps: int, output: Output) -> None:
    while timeline.ended_at is None:
        before = len(timeline.commits), len(timeline.attempts)
        await swarm.until(
            lambda before=before: (
                timeline.ended_at is not None  # type: ignore[misc]
                or (len(timeline.commits), len(timeline.attempts)) != before
            ),
            STALL_SECONDS,
            f"the {name} run stands at step {timeline.last.get('step')}"
            f" ({timeline.last.get('message') or 'its lead says nothing'})",
        )
        loss = timeline.last.get("loss")
        output.status(
            f"   step {timeline.last['step']:>6}/{steps}" + (f"  loss {loss:.3f}" if loss is not None else "")
            + (f"  {len(timeline.attempts) - 1} attempts failed" if len(timeline.attempts) > 1 else "")
            + f"  wire {bytes_text(timeline.last.get('sent_bytes') or 0)}"
        )  # fmt: skip


async def _faults(swarm: Swarm, timeline: Timeline, report: ChaosReport, steps: int) -> None:
    """Inject what is due, until cancelled."""
    began = timeline.commits[0].at
    for fault in report.plan:
        await asyncio.sleep(began + fault.at_seconds - time.time())
        left = steps - timeline.step
        if left < LAST_SECONDS * max(timeline.rate(), 1e-9):
            return
        done = await swarm.inject(fault, timeline)
        if done is not None:
            report.injected.append(done)


def last_lines(swarm: Swarm) -> dict[str, str]:
    """The stderr of every peer that ever ran, and what the live ones hold."""
    fleet = swarm.fleet
    names = sorted((log.stem for log in fleet.root.glob("peer-*.log")), key=lambda name: int(name[5:]))
    found = {name: fleet.last_lines(name, WORDS) for name in names}
    for peer in swarm.peers:
        stages = ", ".join(f"stage {stage} of {job[:8]}" for job, stage in swarm.holds.get(peer.name, ()))
        found[peer.name] = f"{found.get(peer.name, '')}\n(lives, holds {stages or 'nothing'})".strip()
    return {name: lines for name, lines in found.items() if lines}
