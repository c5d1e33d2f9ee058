"""`make what-if`: fifty consumer cards against four of a data centre, on paper. Makes docs/what-if.md, .png and .json.

    python tests/bench/what_if.py [--folder docs] [--mbps 10,100,1000,10000] [--workers 2]

Every figure is what `fusion-peer plan` says of a job file of examples/ on a swarm file of examples/: the product's own
search, step model and simulator. What is varied is the rate of every peer's line (`--line-mbps`), the codec of what crosses it and,
where a model does not fit, how many devices there are. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
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
from fusion.dag.ir.errors import PlacementError
from fusion.dag.placement.misfit import DoesNotFit
from fusion.runtime.job import spec
from fusion.runtime.job.manifest import CompressionConfig
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
FEWEST = (
    "h100-sxm",
    "rtx-4090",
    "rtx-3080",
)  # of which the fewest are sought that hold a model that does not fit
MOST = 256  # of them


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan. `mbps` None: the lines are those of the swarm file."""

    job: str
    swarm: str
    mbps: float | None = None
    codec: str = "none"

    @property
    def series(self) -> str:
        return f"{self.swarm}, {'as it stands' if self.mbps is None else 'lines'}, {self.codec}"


def cases(jobs: Iterable[str], mbps: Sequence[float]) -> list[Case]:
    """By job: the homes over the rates, with and without a codec; the machine as it is, and its cards behind such lines."""
    found = []
    for job in jobs:
        found.append(Case(job=job, swarm=CENTRE))
        for rate in mbps:
            found += [
                Case(job=job, swarm=HOMES, mbps=rate),
                Case(job=job, swarm=HOMES, mbps=rate, codec="int8"),
                Case(job=job, swarm=CENTRE, mbps=rate),
            ]
    return found


@dataclass(frozen=True, eq=False)
class Study:
    """Where its job and swarm files lie, and the graphs of the jobs."""

    examples: Path
    graphs: Mapping[str, bytes]


def captured(examples: Path, job: str) -> bytes:
    """The graph that launching the job would place, captured without weights."""
    return serialise.encode(training_graph(spec.load(examples / f"{job}.toml")))


def outcome(study: Study, case: Case) -> dict[str, Any]:
    """The plan of a case in figures, or why there is none."""
    asked, swarm = _job(study, case), _swarm(study.examples, case.swarm)
    if case.mbps is not None:
        swarm = swarm.with_lines(case.mbps)
    return {**asdict(case), "series": case.series, **_planned(study, asked, case.job, swarm)}


def fewest(study: Study, job: str, device: str, most: int = MOST) -> dict[str, Any]:
    """The plan on the smallest number of such devices that the search finds a placement on; with links that cost nothing, so
    that memory alone decides."""
    asked = spec.load(study.examples / f"{job}.toml")
    low, high, found = 0, 1, None
    while found is None and high <= most:
        found = _fits(study, asked, job, device, high)
        low, high = (low, high) if found else (high, high * 2)
    while found and high - low > 1:
        middle = (low + high) // 2
        tried = _fits(study, asked, job, device, middle)
        low, high, found = (low, middle, tried) if tried else (middle, high, found)
    return {"job": job, "device": device, "tried": most, **(found or {"peers": None})}


def _fits(study: Study, asked: JobSpec, job: str, device: str, count: int) -> dict[str, Any] | None:
    entry = PeerEntry(name="peer", count=count, device=device)
    free = swarm_file.LinkFigures(rtt_ms=0.0)
    found = _planned(
        study, asked, job, SwarmFile(peers=entry.counted_out(), sites={}, links={}, default=free)
    )
    return None if "misfit" in found else {"peers": count, **found}


def _planned(study: Study, asked: JobSpec, job: str, swarm: SwarmFile) -> dict[str, Any]:
    try:
        plan = plan_graph(_graph(job, study.graphs[job]), asked, swarm)
    except DoesNotFit as error:
        return {"misfit": error.needed}
    except PlacementError as error:
        return {"misfit": str(error)}
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


def _job(study: Study, case: Case) -> JobSpec:
    asked = spec.load(study.examples / f"{case.job}.toml")
    if case.codec == "none":
        return asked
    return replace(asked, compression=CompressionConfig(kind="uniform", codec=case.codec))


@cache
def _graph(job: str, data: bytes) -> Any:
    return serialise.decode(data)


@cache
def _swarm(examples: Path, name: str) -> SwarmFile:
    return swarm_file.load(examples / f"{name}.toml")


def compute_alone(study: Study, job: str, swarm: SwarmFile) -> float:
    """Sequences a second if all peers computed all the time and nothing else took any."""
    train = spec.load(study.examples / f"{job}.toml").train
    sizes = {"batch": train.microbatch_size, "sequence": train.sequence}
    flops = sum(c.forward_flops + c.backward_flops for c in node_costs(_graph(job, study.graphs[job]), sizes))
    return train.microbatch_size * sum(peer.flops_per_second() for peer in swarm.peers) / flops


def measure(examples: Path, jobs: Sequence[str], mbps: Sequence[float], workers: int) -> dict[str, Any]:
    """The whole study, as what_if.json holds it."""
    begun = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        graphs = dict(zip(jobs, pool.map(captured, [examples] * len(jobs), jobs), strict=True))
        study = Study(examples, graphs)
        asked = cases(jobs, mbps)
        # Deep pipelines take longest to play out: first come those.
        turn = sorted(asked, key=lambda case: (case.swarm != HOMES, -(case.mbps or 0.0)))
        done = dict(zip(turn, pool.map(outcome, [study] * len(turn), turn), strict=True))
        found = [done[case] for case in asked]
        short = [job for job in jobs if any("misfit" in done[c] for c in asked if c.job == job)]
        pairs = [(job, device) for job in short for device in FEWEST]
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
        "workers": workers,
    }


def _about(study: Study, job: str, swarms: Mapping[str, SwarmFile]) -> dict[str, Any]:
    asked = spec.load(study.examples / f"{job}.toml")
    return {
        "sequence": asked.train.sequence,
        "microbatches": asked.train.microbatches,
        "microbatch_size": asked.train.microbatch_size,
        "optimizer": asked.optimizer.kind,
        "compute_alone": {name: compute_alone(study, job, swarm) for name, swarm in swarms.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--mbps", default=",".join(f"{rate:g}" for rate in MBPS))
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    asked = parser.parse_args()
    found = measure(EXAMPLES, JOBS, [float(rate) for rate in asked.mbps.split(",")], asked.workers)
    (asked.folder / "what-if.json").write_text(json.dumps(found, indent=1) + "\n")
    (asked.folder / "what-if.md").write_text(page(found))
    draw(asked.folder / "what-if.png", found)
    print(page(found))


if __name__ == "__main__":
    main()
