"""`make what-if`: fifty consumer cards against four of a data centre, on paper. Makes docs/what-if.md, .png and .json.

    python tests/bench/what_if.py [--folder docs] [--mbps 10,100,1000,10000] [--workers 2] [--report]

Every figure is what `fusion-peer plan` says of a job file of examples/ on a swarm file of examples/: the product's own
search, step model and simulator. What is varied is the rate of every peer's line (`--line-mbps`), the precision, the codec of what
crosses a line and, where a model does not fit, how many devices there are. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.what_if_page import draw, page

from fusion.dag.cutting.costs import node_costs
from fusion.dag.ir import serialise
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.misfit import DoesNotFit
from fusion.dag.rewrites.mixed_precision import mixed_precision
from fusion.runtime.capture.trained_graph import HALVES
from fusion.runtime.job import spec
from fusion.runtime.job.manifest import CompressionConfig, Precision
from fusion.runtime.job.spec import JobSpec
from fusion.runtime.placing import swarm_file
from fusion.runtime.placing.offline_graph import training_graph
from fusion.runtime.placing.offline_plan import plan_graph
from fusion.runtime.placing.swarm_file import PeerEntry, SwarmFile

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
JOBS = ("bert-large", "gpt2-xl", "gpt3-width")
HOMES, CENTRE = "50x-rtx3080", "4x-h100"
MBPS = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
PRECISIONS: tuple[Precision, ...] = ("float32", "bf16")
FEWEST = (
    "h100-sxm",
    "rtx-4090",
    "rtx-3080",
)  # of which the fewest are sought that hold a model that does not fit
MOST = 256  # of them


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan of the study. `mbps` None: the rates of the swarm file."""

    job: str
    swarm: str
    mbps: float | None = None
    precision: Precision = "float32"
    codec: str = "none"

    @property
    def series(self) -> str:
        """The part of the case that does not depend on the rate."""
        links = "in one machine" if self.mbps is None else "over lines"
        parts = [self.swarm, links if self.swarm == CENTRE else "", self.precision, self.codec]
        return ", ".join(part for part in parts if part not in ("", "none"))


def cases(jobs: Iterable[str], mbps: Sequence[float]) -> list[Case]:
    """All cases, by job: the machine as it is, then for each rate the homes, and the machine's cards behind such lines."""
    found = []
    for job in jobs:
        found += [Case(job=job, swarm=CENTRE, precision=precision) for precision in PRECISIONS]
        for rate in mbps:
            found += [
                *(Case(job=job, swarm=HOMES, mbps=rate, precision=precision) for precision in PRECISIONS),
                Case(job=job, swarm=HOMES, mbps=rate, precision="bf16", codec="int8"),
                Case(job=job, swarm=CENTRE, mbps=rate, precision="bf16"),
            ]
    return found


@dataclass(frozen=True, eq=False)
class Study:
    """The folder of the job and swarm files, and the graphs of the jobs."""

    examples: Path
    graphs: Mapping[tuple[str, Precision], bytes]


def captured(examples: Path, job: str) -> dict[tuple[str, Precision], bytes]:
    """The graphs that a launch of the job would place, captured without weights."""
    full = training_graph(_asked(examples, job, "float32"))
    graphs = {"float32": full, **{name: mixed_precision(full, half) for name, half in HALVES.items()}}
    return {(job, precision): serialise.encode(graphs[precision]) for precision in PRECISIONS}


def outcome(study: Study, case: Case) -> dict[str, Any]:
    """The figures of a case's plan, or why there is none."""
    asked, swarm = _asked(study.examples, case.job, case.precision), _swarm(study.examples, case.swarm)
    if case.codec != "none":
        asked = replace(asked, compression=CompressionConfig(kind="uniform", codec=case.codec))
    if case.mbps is not None:
        swarm = swarm.with_lines(case.mbps)
    return {**asdict(case), "series": case.series, **_planned(study, asked, case.job, swarm)}


def fewest(study: Study, job: str, device: str, most: int = MOST) -> dict[str, Any]:
    """The plan in bf16 on the smallest number of such devices for which the search finds a placement. Links cost nothing, so
    that only memory decides."""
    low, high, found = 0, 1, _fits(study, job, device, 1)
    # A piece that no peer has room for is too large however many there are.
    while "misfit" in found and "on one peer" not in found["misfit"] and 2 * high <= most:
        low, high = high, 2 * high
        found = _fits(study, job, device, high)
    while "misfit" not in found and high - low > 1:
        middle = (low + high) // 2
        tried = _fits(study, job, device, middle)
        low, high, found = (middle, high, found) if "misfit" in tried else (low, middle, tried)
    return {"job": job, "device": device, "peers": None if "misfit" in found else high, **found}


def _fits(study: Study, job: str, device: str, count: int) -> dict[str, Any]:
    entry, free = PeerEntry(name="peer", count=count, device=device), swarm_file.LinkFigures(rtt_ms=0.0)
    swarm = SwarmFile(peers=entry.counted_out(), sites={}, links={}, default=free)
    return _planned(study, _asked(study.examples, job, "bf16"), job, swarm)


def _planned(study: Study, asked: JobSpec, job: str, swarm: SwarmFile) -> dict[str, Any]:
    try:
        plan = plan_graph(_graph(study.graphs[job, asked.train.precision]), asked, swarm)
    except DoesNotFit as error:
        return {"misfit": error.needed}
    rate, price = plan.samples_per_second, plan.price_usd
    return {
        "stages": len(plan.stages),
        "in_flight": plan.in_flight,
        "predicted_seconds": plan.predicted_seconds,
        "simulated_seconds": plan.simulated_seconds,
        "bound_seconds": plan.bound_seconds,
        "bottleneck": plan.bottleneck,
        "sequences_per_second": rate,
        "price_usd": price,
        "sequences_per_second_per_1000_usd": 1000 * rate / price if price else None,
        "computes": max(stage.busy for stage in plan.stages),
    }


def _asked(examples: Path, job: str, precision: Precision) -> JobSpec:
    asked = spec.load(examples / f"{job}.toml")
    return replace(asked, train=replace(asked.train, precision=precision))


@cache
def _graph(data: bytes) -> Graph:
    return serialise.decode(data)


@cache
def _swarm(examples: Path, name: str) -> SwarmFile:
    return swarm_file.load(examples / f"{name}.toml")


def compute_alone(study: Study, job: str, swarm: SwarmFile, precision: Precision) -> float:
    """Sequences a second if all peers always computed and nothing else took time."""
    train = _asked(study.examples, job, precision).train
    sizes = {"batch": train.microbatch_size, "sequence": train.sequence}
    costs = node_costs(_graph(study.graphs[job, precision]), sizes)
    flops = sum(cost.forward_flops + cost.backward_flops for cost in costs)
    return train.microbatch_size * sum(peer.flops_per_second(precision) for peer in swarm.peers) / flops


def measure(examples: Path, jobs: Sequence[str], mbps: Sequence[float], workers: int) -> dict[str, Any]:
    """The whole study, in the form of what_if.json."""
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        graphs: dict[tuple[str, Precision], bytes] = {}
        for each in pool.map(captured, [examples] * len(jobs), jobs):
            graphs.update(each)
        study = Study(examples, graphs)
        asked = cases(jobs, mbps)
        # Memory does not depend on the rate: a series that does not fit at one fits at none.
        first = [case for case in asked if case.mbps in (None, max(mbps))]
        done = dict(zip(first, pool.map(outcome, [study] * len(first), first), strict=True))
        short = {(case.job, case.series): plan for case, plan in done.items() if "misfit" in plan}
        rest = [case for case in asked if case not in done and (case.job, case.series) not in short]
        rest.sort(key=lambda case: (case.swarm != HOMES, -(case.mbps or 0.0)))  # the longest first
        done.update(zip(rest, pool.map(outcome, [study] * len(rest), rest), strict=True))
        found = [done.get(case) or {**short[case.job, case.series], "mbps": case.mbps} for case in asked]
        too_large = dict.fromkeys(job for job, _ in short)
        pairs = [(job, device) for job in too_large for device in FEWEST]
        held = list(pool.map(fewest, [study] * len(pairs), *zip(*pairs, strict=True))) if pairs else []
    swarms = {name: _swarm(examples, name) for name in (HOMES, CENTRE)}
    return {
        "jobs": {job: _about(study, job, swarms) for job in jobs},
        "swarms": {
            name: {
                "peers": len(swarm.peers),
                "device": swarm.peers[0].device,
                "efficiency": swarm.peers[0].efficiency or swarm_file.EFFICIENCY,
                "price_usd": swarm.price(swarm.by_name),
            }
            for name, swarm in swarms.items()
        },
        "mbps": list(mbps),
        "plans": found,
        "fewest": held,
        "seconds": time.monotonic() - begun,
        "cpu_seconds": sum(
            spent.ru_utime + spent.ru_stime
            for spent in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        ),
        "workers": workers,
    }


def _about(study: Study, job: str, swarms: Mapping[str, SwarmFile]) -> dict[str, Any]:
    asked = spec.load(study.examples / f"{job}.toml")
    return {
        "sequence": asked.train.sequence,
        "microbatches": asked.train.microbatches,
        "microbatch_size": asked.train.microbatch_size,
        "optimizer": asked.optimizer.kind,
        "compute_alone": {
            name: {precision: compute_alone(study, job, swarm, precision) for precision in PRECISIONS}
            for name, swarm in swarms.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--mbps", default=",".join(f"{rate:g}" for rate in MBPS))
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--report", action="store_true", help="page and picture anew, from what-if.json")
    asked = parser.parse_args()
    if asked.report:
        found = json.loads((asked.folder / "what-if.json").read_text())
    else:
        found = measure(EXAMPLES, JOBS, [float(rate) for rate in asked.mbps.split(",")], asked.workers)
        (asked.folder / "what-if.json").write_text(json.dumps(found, indent=1) + "\n")
    (asked.folder / "what-if.md").write_text(page(found))
    draw(asked.folder / "what-if.png", found)
    print(page(found))


if __name__ == "__main__":
    main()
