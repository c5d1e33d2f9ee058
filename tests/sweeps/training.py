"""The training kill sweep: kills every role in every phase of a step, in real processes, and compares with a quiet run.

    python tests/sweeps/training.py [--kills 40] [--seed 1] [--stages 4] [--standbys 2] [--json FILE]
        [--roles lead,last] [--phases fp,commit] [--run-seconds 60] [--read-seconds 0.05]

A GPT on Python's standard library trains in runs of one plan, each by a fresh swarm with a launcher and a bootstrap peer of its
own, while traps in the peers (`armed.py`) carry out the kills of `kills.py` one after the other. Every snapshot of every run
must equal the quiet run's of that step, bit for bit. Exit 0 if all did and the job recovered from every kill, 1 otherwise.

With `--read-seconds` the runs with kills simulate a slow disk and leave the machine to others; the quiet run does not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from armed import READ_SECONDS
from kills import PHASES, ROLES, Kill, kills, trap_phase
from reports import say, tell
from support.endings import interruptible
from theatre import ARMED, CALM_STEPS, Theatre, arm, calm, end_launcher, launch, ready_standbys

from fusion.cli.local import chaos_job
from fusion.cli.local.chaos import last_lines
from fusion.cli.local.chaos_job import ChaosJob, another, prepare
from fusion.cli.local.chaos_swarm import Swarm
from fusion.cli.local.fleet import FleetError, LocalPeer, open_fleet
from fusion.cli.terminal.output import percentile
from fusion.runtime.peer.client import ClientConfig, open_client
from fusion.swarm.errors import SwarmError

TRIAL_STEPS, WARM_UP = 60, 10
# Of quiet training between two snapshots: about what pays where somebody dies every ten seconds.
SNAPSHOT_SECONDS = 1.5
BEGIN_SECONDS = 120.0
FIRE_SECONDS = 30.0  # for a trap to be reached
TRIES = 5  # looks for the peer that a kill is for
RECOVER_SECONDS = 90.0
END_SHARE = 0.97  # of the run, after which nobody is killed any more
SLOW_SECONDS = 1.0  # of a recovery: what the peers waited for meanwhile is kept


@dataclass
class Sweep:
    """The results of a sweep so far."""

    plan: ChaosJob
    steps: int = 0
    truth: dict[int, tuple[str, ...]] = field(default_factory=dict)  # step -> shards of the quiet run
    ledger: dict[str, Any] = field(default_factory=dict)
    quiet_rate: float = 0.0
    done: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    compared: int = 0
    discarded: int = 0
    replayed: int = 0

    def problem(self, text: str) -> None:
        say(f"PROBLEM {text}")
        self.problems.append(text)


async def sweep(options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    stages, every = options.stages, kills(
        options.kills, options.seed, options.stages, chaos_job.MICROBATCHES,
        options.roles.split(","), options.phases.split(","),
    )  # fmt: skip
    async with open_fleet("fusion-sweep-plan-") as fleet:
        plan = await fleet.in_thread(prepare, fleet.root / "plan", stages, seed=options.seed)
        found = Sweep(plan)
        rate = 1.0 / (options.read_seconds * chaos_job.MICROBATCHES) if options.read_seconds else None
        await quiet_truth(found, options.stages, options.run_seconds, rate)
        left = list(every)
        attempts = 0
        while left and attempts < len(every) + 3:
            attempts += 1
            before = len(left)
            say(f"run {attempts}: {before} kills to do")
            try:
                await _run(found, options, left, f"run-{attempts}")
            except (FleetError, SwarmError, TimeoutError) as error:
                found.problem(f"run {attempts}: {error or 'timed out'}")
            if len(left) == before:
                found.problem(f"run {attempts} did none of its kills; given up: {', '.join(map(str, left))}")
                break
    return _report(found, options, time.monotonic() - began)


async def quiet_truth(found: Sweep, peers: int, run_seconds: int, rate: float | None = None) -> None:
    """Measure the speed of this machine if no `rate` (steps a second) is given, then the reference: the shards of every
    snapshot of a quiet run."""
    async with open_fleet("fusion-sweep-") as fleet:
        swarm = Swarm(fleet, command=ARMED)
        await swarm.start(peers)
        if rate is None:
            trial = await _train_quietly(found, swarm, "trial", TRIAL_STEPS, 1000)
            rate = trial.timeline.rate(WARM_UP)
        found.steps = max(TRIAL_STEPS, int(rate * run_seconds))
        found.plan = another(found.plan, "plan", found.steps, [""] * found.plan.stages,
                             snapshot_every=max(5, int(rate * SNAPSHOT_SECONDS)))  # fmt: skip
        say(f"a quiet run of {found.steps} steps, about {run_seconds} s")
        run = await _train_quietly(found, swarm, "quiet", found.steps)
        found.truth, found.quiet_rate = run.found, run.timeline.rate()
        found.ledger = {k: run.timeline.last[k] for k in ("samples", "ledger") if k in run.timeline.last}
        say(f"{found.quiet_rate:.1f} steps/s, {len(found.truth)} snapshots")


async def _train_quietly(found: Sweep, swarm: Swarm, name: str, steps: int, *every: int) -> Theatre:
    owners = [peer.peer_id for peer in swarm.peers[: found.plan.stages]]
    job = another(found.plan, name, steps, owners, **({"snapshot_every": every[0]} if every else {}))
    theatre = Theatre(swarm, swarm.follow(job.prepared.job), job)
    swarm.on_record = theatre.hear
    async with chaos_job.launched(job, swarm.fleet.root / name, swarm.peers[0].address):
        await swarm.until(lambda: bool(theatre.timeline.commits), BEGIN_SECONDS, f"the first step of {name}")
        await swarm.until(
            lambda: theatre.timeline.ended_at is not None, 10 * 60 + steps, f"the end of the {name} run"
        )
    if steps not in theatre.found:
        raise FleetError(
            f"the {name} run ended {theatre.timeline.last.get('state')} without its last snapshot"
        )
    return theatre


async def _run(found: Sweep, options: argparse.Namespace, left: list[Kill], name: str) -> None:
    """Run the job once with as many of the kills `left` as fit, which are removed from the list."""
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(open_fleet("fusion-sweep-"))
        command = ("env", f"{READ_SECONDS}={options.read_seconds}", *ARMED)
        swarm = Swarm(fleet, command=command, replace_seconds=1.0)
        stack.push_async_callback(swarm.aclose)
        bootstrap = await swarm.start_one("--memory", "1KiB")
        await swarm.start(options.stages + options.standbys)
        owners = [peer.peer_id for peer in swarm.peers if peer is not bootstrap][: options.stages]
        job = another(found.plan, name, found.steps, owners)
        theatre = Theatre(swarm, swarm.follow(job.prepared.job), job, bootstrap=bootstrap)
        swarm.on_record = theatre.hear
        await launch(theatre, swarm.peers[-1].address)
        stack.callback(end_launcher, theatre)
        # Through a peer that is never killed by role: the last of the standbys may be, and then it finds others.
        home = fleet.root / "observer"
        theatre.client = await stack.enter_async_context(
            open_client(ClientConfig(home=home, peer=swarm.peers[-1].address))
        )
        timeline = theatre.timeline
        try:
            await swarm.until(lambda: len(timeline.commits) > CALM_STEPS, BEGIN_SECONDS, "the first steps")
            await swarm.until(lambda: theatre.launcher_held, BEGIN_SECONDS, "the job handed over")
            while timeline.ended_at is None:
                kill = _next(left, theatre)
                if kill is None or timeline.step > END_SHARE * found.steps:
                    break
                if await _kill_once(found, theatre, kill, options):
                    left.remove(kill)
            await swarm.until(
                lambda: timeline.ended_at is not None,
                max(found.steps / max(found.quiet_rate, 0.1), options.run_seconds) * 3 + RECOVER_SECONDS,
                f"the end of {name}, which stands at step {timeline.step}",
            )
            if timeline.last["state"] != "done":
                found.problem(
                    f"{name} ended {timeline.last['state']} at step {timeline.last['step']}: "
                    f"{timeline.last.get('error')}; last said: {timeline.waits(0.0, time.time())[-3:]}"
                )
        except FleetError:
            for peer, words in last_lines(swarm).items():
                for line in words.splitlines():
                    say(f"    {peer}: {line}")
            for line in timeline.waits(0, time.time())[-20:]:
                say(f"    {line}")
            raise
        finally:
            compare(found, theatre, name)


def compare(found: Sweep, theatre: Theatre, name: str) -> None:
    timeline = theatre.timeline
    for step, states in sorted(theatre.found.items()):
        truth = found.truth.get(step)
        if truth is None:
            # A snapshot that is due while another is under way is left out; not all runs leave out the same.
            if step == found.steps:
                found.problem(f"{name}: the quiet run has no final snapshot to compare with")
            continue
        found.compared += 1
        wrong = [stage for stage, (a, b) in enumerate(zip(truth, states, strict=True)) if a != b]
        if wrong:
            found.problem(f"{name}: at step {step} the states of stages {wrong} differ from the quiet run's")
    if timeline.ended_at is not None and found.steps not in theatre.found:
        found.problem(f"{name}: its final snapshot was not found")
    if timeline.ended_at is not None:
        ledger = {key: timeline.last.get(key) for key in found.ledger}
        if ledger != found.ledger:
            found.problem(f"{name}: the ledger is {ledger}, not {found.ledger}")
    found.discarded += timeline.discarded
    found.replayed += timeline.replayed


def _next(left: list[Kill], theatre: Theatre) -> Kill | None:
    """The first kill whose victim lives. A run has one launcher, so at most one is killed."""
    alive = theatre.launcher is not None and theatre.launcher.returncode is None
    return next((kill for kill in left if kill.role != "launcher" or alive), None)


# --- one kill


async def _kill_once(found: Sweep, theatre: Theatre, kill: Kill, options: argparse.Namespace) -> bool:
    """Carry out one kill. Returns False if the job ended before."""
    swarm, timeline = theatre.swarm, theatre.timeline
    for _ in range(TRIES):
        await calm(theatre, options.standbys > 0)
        if timeline.ended_at is not None:
            return False
        row: dict[str, Any] = {
            **kill.record(),
            "step": timeline.step,
            "ready_standbys": await ready_standbys(theatre),
        }
        trapped = swarm.owner(timeline, kill.trapped)
        victim, pid = _victim(theatre, kill, trapped)
        if trapped is not None and pid is not None:
            break
        await asyncio.sleep(1.0)  # a stage may change hands while the standbys are asked for
    if trapped is None or pid is None:
        found.problem(f"{kill}: nobody plays that role")
        return True
    armed = [trapped]
    order = {"id": kill.id, "phase": trap_phase(kill), "count": kill.count, "side": kill.side,
             "delay": kill.delay_seconds, "victim": 0 if victim is trapped else pid}  # fmt: skip
    if kill.role == "standby" and kill.phase == "recovery":  # whichever of them takes over
        armed = swarm.idle(timeline)
        order |= {"phase": "takeover", "victim": 0, "side": "before"}
    for peer in armed:
        arm(peer, order)
    began: float | None = None  # the recovery that the kill falls into
    if kill.other is not None:
        await asyncio.sleep(0.2)  # the traps are looked for every 20 ms
        began = time.time()
        # The peer that was to go first may own the trapped stage as well.
        stages = (kill.other, *range(options.stages))
        owners = (swarm.owner(timeline, stage) for stage in stages)
        other = next((owner for owner in owners if owner is not None and owner is not trapped), None)
        if other is not None:
            await swarm.kill(other)
    try:
        await swarm.until(
            lambda: kill.id in theatre.fired or timeline.ended_at is not None, FIRE_SECONDS,
            f"{kill} was not reached",
        )  # fmt: skip
    except FleetError as error:
        for peer in armed:
            arm(peer, {"id": kill.id, "phase": ""})
        row |= {"fired": False, "message": str(error)}
        found.done.append(row)
        found.problem(str(error))
        return True
    if kill.id not in theatre.fired:
        return False
    fired = theatre.fired[kill.id]
    for peer in armed:
        if peer.process.pid != fired["victim"]:
            arm(peer, {"id": kill.id, "phase": ""})
    await _bury(theatre, kill, fired["victim"])
    # Where the victim held no stage, what counts is the recovery that it fell into, however far that was.
    lost = fired["at"] if kill.stage is not None or kill.role == "standby" or began is None else began
    await _recover(found, theatre, kill, row, lost)
    return True


def _victim(theatre: Theatre, kill: Kill, trapped: LocalPeer | None) -> tuple[LocalPeer | None, int | None]:
    swarm = theatre.swarm
    if kill.role == "launcher":
        return None, theatre.launcher.pid if theatre.launcher else None
    if kill.role == "bootstrap":
        peer = theatre.bootstrap
    elif kill.role == "standby":
        peer = next((p for p in swarm.idle(theatre.timeline) if p is not theatre.bootstrap), None)
    else:
        peer = trapped
    return peer, peer.process.pid if peer is not None else None


async def _bury(theatre: Theatre, kill: Kill, pid: int) -> None:
    """Replace a victim that is dead by another peer."""
    swarm = theatre.swarm
    if kill.role == "launcher":
        return
    peer = next((p for p in swarm.fleet.peers if p.process.pid == pid), None)
    if peer is None:
        return
    swarm.fleet.forget(peer)
    await peer.process.wait()
    if peer is theatre.bootstrap:
        await theatre.open_bootstrap()
    else:
        swarm.replace_soon()


async def _recover(found: Sweep, theatre: Theatre, kill: Kill, row: dict[str, Any], at: float) -> None:
    swarm, timeline = theatre.swarm, theatre.timeline
    # Who held no stage is missed by nobody: then the next commit is what counts.
    missed = kill.stage is not None or kill.phase == "recovery"

    def seconds() -> tuple[float | None, float | None]:
        if missed:
            return timeline.recovery(at)
        after = next((commit.at - at for commit in timeline.commits if commit.at > at), None)
        return after, after

    try:
        await swarm.until(
            lambda: seconds()[1] is not None or timeline.ended_at is not None, RECOVER_SECONDS,
            f"no new step after {kill}",
        )  # fmt: skip
    finally:
        first, new = seconds()
        row |= {"fired": True, "at": at, "recovery_seconds": first, "new_step_seconds": new}
        if first is None or first > SLOW_SECONDS:
            row["waits"] = timeline.waits(at, at + (first or RECOVER_SECONDS))
            row["said"] = last_lines(swarm)
        found.done.append(row)
        shown = "never" if first is None else f"{first:.2f} s"
        anew = "never" if new is None else f"{new:.2f} s"
        say(f"{len(found.done):>3}. {kill!s:<44} step {row['step']:>5}  commit after {shown}, new step {anew}"
            f"  ({row['ready_standbys']} standbys ready)")  # fmt: skip


# --- the report


def _report(found: Sweep, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    fired = [row for row in found.done if row.get("fired")]
    owners = [row for row in fired if row["stage"] is not None]
    first = [row["recovery_seconds"] for row in owners if row["recovery_seconds"] is not None]
    never = sum(row["recovery_seconds"] is None for row in owners)
    phases = {}
    for phase in PHASES:
        times = [r["recovery_seconds"] for r in owners if r["phase"] == phase and r["recovery_seconds"]]
        phases[phase] = {"kills": len(times), "p50": percentile(times, 0.5), "max": max(times, default=None)}
    return {
        "ok": not found.problems and len(fired) >= options.kills,
        "problems": found.problems,
        "kills": len(fired),
        "owner_kills": len(owners),
        "snapshots_compared": found.compared,
        "recovery_p50_seconds": percentile(first, 0.5),
        "recovery_p95_seconds": percentile(first, 0.95),
        "recovery_max_seconds": max(first, default=None),
        "new_step_p95_seconds": percentile([r["new_step_seconds"] for r in owners if r["new_step_seconds"]], 0.95),
        "unrecovered": never,
        "by_phase": phases,
        "discarded_steps": found.discarded,
        "replayed_steps": found.replayed,
        "steps": found.steps,
        "quiet_steps_per_second": found.quiet_rate,
        "ledger": found.ledger,
        "seed": options.seed,
        "command": "python " + " ".join(sys.argv),
        "done": found.done,
        "seconds": seconds,
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--standbys", type=int, default=2)
    parser.add_argument("--run-seconds", type=int, default=60, help="of quiet training in each run")
    parser.add_argument(
        "--read-seconds", type=float, default=0.0, help="for a microbatch, of runs with kills"
    )
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--json", type=Path, help="write the report, every kill in it, to this file")
    return parser


def main() -> int:
    options = parser().parse_args()
    return tell(asyncio.run(sweep(options)), options.json, left_out="done")


if __name__ == "__main__":
    sys.exit(interruptible(main))
