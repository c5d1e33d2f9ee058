"""The placement sweep: OP-Fence against its baselines, against the optimum where it can be computed, and against the clock.

    python tests/sweeps/placement.py [--instances 300] [--seed 1] [--no-large] [--json FILE]

Random instances have 3 to 12 devices, chains and DAGs with skips, some with little memory. By the step model `place` must never
be slower than equal-ops and equal-FLOPs; it must be legal, and not gain (0.1 % or more) if a device is removed. OP-Fence alone
is compared with the exact dynamic program of chains, and with all placements of DAGs that have few. Then it measures how long
one core takes to place GPT-2 XL on 48 peers, and 10 000 nodes on 1 000. Exit 0 if all of this is true.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import combinations, permutations
from math import comb, inf, perm
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.endings import interruptible
from support.instances import SIZES, Instance, instances, large_network, with_skips

from fusion.dag.cutting.cuts import legal_cuts, split
from fusion.dag.ir.errors import PlacementError
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.baselines import equal_flops, equal_ops, exact
from fusion.dag.placement.network import Network
from fusion.dag.placement.op_fence import op_fence
from fusion.dag.placement.place import Placement, place
from fusion.dag.placement.search_space import Choice, Space, space
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture.capture import capture_language_model
from fusion.runtime.capture.models import GPT
from fusion.runtime.job.spec import GPTConfig
from tests.support.stage_costs import stage_cost

EXACT_ENTRIES = 30_000_000
EVERY = 20_000  # placements that are tried one by one
SLOWER = 1e-6  # by a smaller share, it is not
NOISE = 1e-3  # the search is no exact one: what a device less may gain


def every(options: Space) -> float | None:
    """The seconds of the best placement of all; None if there are too many."""
    devices, inner = options.devices, len(options.segments.bounds) - 2
    counts = range(1, options.most_stages + 1)
    if sum(perm(devices, n) * comb(inner, n - 1) for n in counts) > EVERY:
        return None
    return min(
        options.estimate(Choice(order, (0, *cuts, inner + 1))).seconds
        for n in counts
        for order in permutations(range(devices), n)
        for cuts in combinations(range(1, inner + 1), n - 1)
    )


def illegal(graph: Graph, found: Placement, network: Network) -> str | None:
    """The rules that a placement breaks: stages are contiguous, without a cycle, each on a device of its own with enough memory."""
    if len(set(found.owners)) != len(found.owners) or not set(found.cuts) <= set(legal_cuts(graph)):
        return "owners or cuts"
    stages = split(graph, found.cuts)  # refuses cuts that are not contiguous
    if any(c <= e.producer for s in stages for e in s.sends for c in e.consumers):
        return "cycle"
    if any(m > network.device(o).memory_bytes for m, o in zip(found.memory_bytes, found.owners, strict=True)):
        return "memory"
    held = sum(stage_cost(s, SIZES).parameter_bytes for s in stages)
    return None if held <= sum(found.memory_bytes) else "weights"


def judge(instance: Instance) -> dict[str, Any]:
    graph, network, m = instance.graph, instance.network, instance.microbatches
    options = space(graph, network, SIZES, m)

    def seconds(choice: Choice | None) -> float:
        return options.estimate(choice).seconds if choice else inf

    began = time.process_time()
    alone = seconds(op_fence(options))
    took = time.process_time() - began
    chain = "chain" in instance.name
    optimum = exact(options, EXACT_ENTRIES)
    best = every(options)
    if best is None and chain and optimum is not None:
        best = seconds(optimum.choice)
    row = {
        "name": instance.name,
        "bounds": len(options.segments.bounds),
        "microbatches": m,
        "op_fence": alone,
        "equal_ops": seconds(equal_ops(options)),
        "equal_flops": seconds(equal_flops(options)),
        "dynamic_program": seconds(optimum.choice) if optimum else None,
        "exact": best,
        "cpu_seconds": took,
    }
    try:
        found = place(graph, network, SIZES, m)
    except PlacementError:
        return {**row, "place": None, "illegal": None, "fewer": None}
    one_less = Network(devices=network.devices[:-1], links=network.links)
    try:
        fewer = place(graph, one_less, SIZES, m).predicted_seconds
    except PlacementError:
        fewer = inf
    return {
        **row,
        "place": found.predicted_seconds,
        "stages": len(found.owners),
        "depth": found.depth,
        "bound": found.prediction.bound_seconds,
        "bottleneck": found.prediction.bottleneck,
        "illegal": illegal(graph, found, network),
        "fewer": fewer,
    }


def gpt2_xl() -> Graph:
    with torch.device("meta"):
        module = GPT(GPTConfig(vocabulary=50257, blocks=48, width=1600, heads=25, sequence=1024))
    return clean(capture_language_model(module, training=True, maximum_sequence=1024))


def timed(name: str, graph: Graph, network: Network, sizes: dict[str, int], limit: float) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    found = place(graph, network, sizes, 32)
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(
        f"{name}: {len(graph.nodes)} nodes on {len(network.devices)} peers in {took:.2f} s ({cpu:.2f} s of CPU), to be "
        f"under {limit:.0f}; {len(found.owners)} stages, step {found.predicted_seconds:.1f} s, {found.prediction.bottleneck}"
    )
    return {"name": name, "seconds": took, "cpu_seconds": cpu, "limit": limit, "stages": len(found.owners)}


def share(values: list[float]) -> str:
    low, middle, high = np.quantile(values, [0.0, 0.5, 0.95])
    return f"median {middle:.3f}, 95 % {high:.3f}, worst {max(values):.3f}, best {low:.3f} of {len(values)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-large", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = []
    for instance in instances(asked.instances, asked.seed):
        row = judge(instance)
        rows.append(row)
        shown = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}
        print(" | ".join(f"{k} {v}" for k, v in shown.items()), flush=True)
    placed = [r for r in rows if r["place"] is not None]
    worse = [r for r in placed if r["place"] > min(r["equal_ops"], r["equal_flops"]) * (1 + SLOWER)]
    alone_worse = [r for r in placed if r["op_fence"] > min(r["equal_ops"], r["equal_flops"]) * (1 + SLOWER)]
    broken = [r for r in placed if r["illegal"]]
    gains = [r for r in placed if r["fewer"] < r["place"] * (1 - SLOWER)]
    print(f"\n{len(rows)} instances, {len(rows) - len(placed)} of which fit nowhere")
    print(f"slower than a baseline: {len(worse)}; OP-Fence alone: {len(alone_worse)}; illegal: {len(broken)}")
    print(
        f"faster without one device: {len(gains)}; by {[round(r['place'] / r['fewer'] - 1, 4) for r in gains]}"
    )
    known = [r for r in placed if r["exact"] and r["exact"] < inf]
    print(f"OP-Fence alone / exact: {share([r['op_fence'] / r['exact'] for r in known])}")
    print(f"place / exact: {share([r['place'] / r['exact'] for r in known])}")
    for name in ("equal_ops", "equal_flops"):
        print(f"{name} / place: {share([r[name] / r['place'] for r in placed if r[name] < inf])}")
    near = float(np.median([r["place"] / r["exact"] for r in known])) <= 1.05
    large = []
    if not asked.no_large:
        large.append(
            timed("GPT-2 XL", gpt2_xl(), large_network(48, 6, 1), {"batch": 1, "sequence": 1024}, 2.0)
        )
        graph = with_skips(4348, 256, np.random.default_rng(0))
        large.append(timed("10 000 nodes", graph, large_network(1000, 50, 1, flops=1e9), SIZES, 60.0))
    if asked.json:
        asked.json.write_text(json.dumps({"instances": rows, "large": large}, indent=1))
    loses = [r for r in gains if r["fewer"] < r["place"] * (1 - NOISE)]
    held = not (worse or broken or loses) and near and all(r["seconds"] <= r["limit"] for r in large)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(interruptible(main))
