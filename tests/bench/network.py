"""`make bench-network`: real peers train a GPT over slow links; network x scheduler x codec -> step time, bytes, loss.

    python tests/bench/network.py [--networks A,B,my.toml] [--rounds 3] [--curves] [--minutes 60] [--only "equal-ops/dense"]

Peers are real processes in network namespaces (root and Linux), joined by links as slow as the network's file says. The
cases run in turn, round after round, a job each; results are kept in docs/network.json after each job, and what is
there is not measured again, so it may be stopped at any time and gone on with. With --curves whole trainings follow,
whose validation loss is drawn against wall-clock time. `--report` only writes the table from what is there.

All peers share the cores of this machine, and the predictions know it: what a bare message costs those cores, what idle
peers do, and what payloads get of a link's rate is measured before any job; how much dearer a message of a job is, by
what the baseline's jobs took of the cores; what a stage needs, by running each placement with the box's limits lifted
and one microbatch at a time. Where the machine is others' too, a job waits until it is as
fast as it can be, a minute at most, and runs again if it was not after it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.network_cases import (
    BASELINE,
    CODECS,
    Bench,
    Case,
    busiest_pairs,
    measurable,
    placed,
    seconds_of,
)
from bench.network_machine import (
    WAIT_SECONDS,
    Pace,
    frame_cost,
    frame_goodput,
    unlimited,
    useful_cores,
)
from bench.network_results import Results, alone, expected, report
from bench.network_run import Testbed, open_testbed
from bench.network_table import step_lengths, step_seconds
from box import kernel
from box.network import Box
from box.network_file import read_network
from support.endings import end_as_if_interrupted
from support.stolen import MOST_STOLEN, Stolen

from fusion.cli.local.fleet import FleetError
from fusion.compression.codec_speed import measure_families
from fusion.runtime.job.errors import JobError

DOCS = Path(__file__).parents[2] / "docs"
CURVES = (
    ("equal-ops", "dense"), ("equal-ops", "adaptive"),
    ("op-fence", "dense"), ("op-fence", "adaptive"), ("op-fence, 6", "adaptive"),
)  # fmt: skip
LONGER = 1.5  # the other curves have so many times the baseline's steps: they may need a few more
ADDED_SECONDS = 20.0  # what a job takes beside its steps, about: to know whether there is time for one
TRIES = 2  # of a job that fails
REPEATS = 3  # of a job while others kept this machine busy: the least disturbed counts
RESTARTS = 10  # of a network's peers
SETTLE_SECONDS = 30.0  # until new peers have measured their links
FAMILIES = ("bf16", "fp16", "int8", "int4", "topk")

T = TypeVar("T")


async def measure_stages(
    bench: Bench,
    box: Box,
    testbed: Testbed,
    cases: Sequence[Case],
    results: Results,
    options: argparse.Namespace,
) -> None:
    """Measure what stages and idle peers take of this machine, if it is not measured yet. FleetError as `measure`."""
    results.data["speeds"] = {family: asdict(speed) for family, speed in measure_families(FAMILIES).items()}
    machine = results.data["machine"][bench.name]
    if "idle_cores" not in machine:
        await asyncio.sleep(SETTLE_SECONDS)
        machine["idle_cores"] = await asyncio.to_thread(testbed.idle_cores)
        say(f"{bench.name}: {machine}")
    with unlimited(box, list(testbed.peers)):
        for number in range(options.rounds):
            for case in cases:
                if len(results.jobs("alone", alone(bench, case))) <= number:
                    await _job(
                        bench, testbed, "alone", case, (bench.least[0], bench.alone_steps), results, options
                    )


async def measure(
    bench: Bench, testbed: Testbed, cases: Sequence[Case], results: Results, options: argparse.Namespace
) -> None:
    """Run the missing jobs of one network while there is time. FleetError: the peers have failed."""
    for number in range(options.rounds):
        for case in cases:
            if len(results.jobs("jobs", case.name)) <= number:
                await _job(bench, testbed, "jobs", case, None, results, options)
    if not options.curves:
        return
    for scheduler, codec in CURVES:
        case = Case(network=bench.name, scheduler=scheduler, codec=codec)
        if case in cases and not results.jobs("curves", case.name):
            longer = 1.0 if (scheduler, codec) == BASELINE else LONGER
            steps = round(longer * bench.curve_steps)
            await _job(bench, testbed, "curves", case, (bench.least[0], steps), results, options)


async def _job(
    bench: Bench,
    testbed: Testbed,
    kind: str,
    case: Case,
    steps: tuple[int, int] | None,
    results: Results,
    options: argparse.Namespace,
) -> None:
    """Run one job. `steps`: those of the warm-up and of the whole job; None: as many as the timing needs."""
    known = results.jobs("jobs", case.name)
    step = step_seconds(known) if known else expected(bench, results, case).simulated_seconds
    warm_up, all_steps = steps or bench.steps(step)
    needs = ADDED_SECONDS + all_steps * step
    if time.monotonic() + needs > options.until:
        say(f"{case.name}: about {needs:.0f} s, no time left for it")
        return
    if results.failures(kind, case) >= TRIES:
        return
    try:
        sample, stolen = await undisturbed(
            case.name,
            lambda: testbed.run(case, warm_up, all_steps, evaluate=kind == "curves", alone=kind == "alone"),
            options,
        )
    except FleetError as error:
        results.data["failed"].append([kind, case.name, str(error)])
        results.save()
        raise
    results.jobs(kind, alone(bench, case) if kind == "alone" else case.name).append(
        asdict(sample) | {"stolen": stolen}
    )
    results.save()
    lengths = step_lengths(asdict(sample))
    say(f"{kind} {case.name}: {median(lengths):.3f} s a step ({min(lengths):.3f}-{max(lengths):.3f}), "
        f"{sample.cpu_seconds:.3f} s of CPU, loss {sample.losses[-1]:.3f}")  # fmt: skip


async def undisturbed(
    what: str, measured: Callable[[], Awaitable[T]], options: argparse.Namespace
) -> tuple[T, float]:
    """The result of `measured()`, and the share of the cores that others used meanwhile."""
    found: list[tuple[T, float]] = []
    for _ in range(REPEATS):
        await asyncio.to_thread(options.pace.quiet_within, WAIT_SECONDS)
        others = Stolen()
        found.append((await measured(), others.share()))
        if found[-1][1] <= MOST_STOLEN:
            break
        say(f"{what}: others had {100 * found[-1][1]:.0f} % of the cores, once more")
    return min(found, key=lambda one: one[1])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default="A,B,C")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="", help="SCHEDULER/CODEC, with ; between several; the baseline is added"
    )
    parser.add_argument("--curves", action="store_true", help="train to the baseline's loss as well")
    parser.add_argument("--minutes", type=float, default=90.0, help="begin no job that would end later")
    parser.add_argument("--folder", type=Path, default=DOCS, help="where results are kept")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    end_as_if_interrupted()
    options.pace = Pace()
    options.until = time.monotonic() + 60.0 * options.minutes
    options.folder.mkdir(parents=True, exist_ok=True)
    results = Results(options.folder / "network.json")
    chosen = []
    try:
        for name in options.networks.split(","):
            bench = measurable(name)
            results.open(bench)
            chosen.append((bench, distinct(bench, _chosen(bench.cases(), options.only))))
    except (JobError, ValueError) as error:
        say(f"bench-network: {error}")
        return 2
    reason = kernel.unavailable()
    if reason:
        say(f"skipped: {reason}")
    elif not options.report:
        try:
            for bench, cases in chosen:
                measure_network(bench, cases, results, options)
        except KeyboardInterrupt:
            say("interrupted; the same command goes on from here")
            return 130
    report(results, chosen, options.folder)
    return 0


def measure_network(
    bench: Bench, cases: Sequence[Case], results: Results, options: argparse.Namespace
) -> None:
    spec = read_network(bench.path)
    used = {owner for case in cases for owner in placed(bench, case).placement.owners}
    hosts = [host.name for host in spec.hosts if host.name in used]

    async def scenario() -> None:
        # Connections that have known no limits have buffers far too large for slow links: the jobs get peers of their own.
        if any(len(results.jobs("alone", alone(bench, case))) < options.rounds for case in cases):
            async with open_testbed(bench, box, hosts) as testbed:
                await measure_stages(bench, box, testbed, cases, results, options)
        async with open_testbed(bench, box, hosts) as testbed:
            await measure(bench, testbed, cases, results, options)

    with Box(spec) as box:
        if bench.name not in results.data["machine"]:
            measured = undisturbed(bench.name, lambda: asyncio.to_thread(_machine, bench, box), options)
            results.data["machine"][bench.name] = asyncio.run(measured)[0]
        with box.entered(hosts[0]):  # where the launcher is
            for _ in range(RESTARTS):
                try:
                    asyncio.run(scenario())
                    break
                except (
                    FleetError
                ) as error:  # what is still running of the job would be in the way of the next
                    say(f"once more with other peers: {error}")


def _machine(bench: Bench, box: Box) -> dict[str, float]:
    """Measure the `Machine`; its goodput on the busiest link of the baseline."""
    pairs = busiest_pairs(bench, bench.baseline)
    goodput = frame_goodput(box, pairs, lambda bytes_: seconds_of(bench.network, pairs, bytes_))
    rates = [bench.network.rate(*ends) for ends in (pairs[0], pairs[0][::-1])]
    message, byte, packet = frame_cost(box, *pairs[0], rates)
    return {
        "goodput": goodput,
        "cores": useful_cores(),
        "message_seconds": message,
        "byte_seconds": byte,
        "packet_seconds": packet,
    }


def distinct(bench: Bench, cases: Sequence[Case]) -> list[Case]:
    """The cases without those that would repeat an earlier one exactly."""
    found: dict[tuple[object, ...], Case] = {}
    for case in cases:
        one = placed(bench, case)
        runs = (
            case.network,
            case.codec,
            one.placement.cuts,
            one.placement.owners,
            one.placement.depth,
            one.codecs,
        )
        found.setdefault(runs, case)
    return list(found.values())


def _chosen(cases: Sequence[Case], only: str) -> list[Case]:
    """The cases that `only` names. ValueError for one that does not exist."""
    if not only:
        return list(cases)
    wanted = [BASELINE, *(tuple(part.strip() for part in name.rsplit("/", 1)) for name in only.split(";"))]
    for name in wanted:
        if len(name) != 2 or name[1] not in CODECS or not any(case.scheduler == name[0] for case in cases):
            raise ValueError(f"--only: {'/'.join(name)} is not one of {sorted({c.name for c in cases})}")
    return [case for case in cases if (case.scheduler, case.codec) in wanted]


if __name__ == "__main__":
    sys.exit(main())
