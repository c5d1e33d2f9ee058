"""The effect of codecs on training: validation loss after the same number of steps, on the same seeds, for every codec.

    python tests/bench/convergence.py [--minutes 60] [--seeds 0,1,2] [--folder docs] [--report]

A GPT on the sources of the standard library, in four stages of one process; what they send each other goes through the
codecs of a real job (`convergence_run`). AdaTopK is told that the stages are homes 3 to 6 of network B. Held-out text
is evaluated as in a job: never sparse. Runs are kept in FOLDER/convergence.json as they end, and not repeated. On one
quiet core a run takes about 45 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.convergence_run import Line
from bench.network_cases import text_files
from box.network_file import NETWORKS
from support.endings import end_as_if_interrupted

from fusion.compression.reference_speeds import REFERENCE
from fusion.compression.spec import MAX_MILLIONTHS, MIN_MILLIONTHS, Spec
from fusion.dag.cutting.cuts import split
from fusion.dag.ir.graph import Graph
from fusion.dag.placement.network import Network
from fusion.dag.placement.place import Placement, place
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.capture.sources import LanguageModel
from fusion.runtime.job.manifest import (
    CompressionConfig,
    DataConfig,
    EdgeCodecs,
    OptimizerConfig,
    TrainConfig,
)
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.placing.codec_choice import StageTraffic, choose_codecs, edges_of, ties_of
from fusion.runtime.placing.swarm_file import load
from fusion.runtime.training.data.batches import pack_text
from fusion.swarm.directory.records import Digest

DOCS = Path(__file__).parents[2] / "docs"
HOMES = ("home-3", "home-4", "home-5", "home-6")
RATIOS = (2, 5, 10, 30, 100)
DEFAULT = "adaptive (default)"
TEXT_BYTES = 1 << 20
ABOUT = """# Codecs and convergence, measured

`python tests/bench/convergence.py` makes this page: a GPT of 4 blocks of width 128 on the standard library's text, in four
stages whose activations and gradients go through the codec. The validation loss is that after the same number of steps,
evaluated without sparse codecs; it and the bytes are means over the seeds that dense was run with too. A ratio is one of
bytes, forward; backward sends the values at the same positions, unless "own gradients"; "adaptive (default)" is
`kind = "adaptive"` with nothing else said. `convergence.json` has every point, `convergence.png` the curves.

"""


@dataclass(frozen=True, kw_only=True)
class Study:
    model: GPTConfig
    train: TrainConfig

    @property
    def sizes(self) -> dict[str, int]:
        return self.train.sizes


def study(steps: int = 240) -> Study:
    model = GPTConfig(blocks=4, width=128, heads=4, sequence=128, tied=False)
    optimizer = OptimizerConfig(learning_rate=2e-3, schedule="cosine", warmup_steps=20)
    train = TrainConfig(
        steps=steps,
        microbatches=2,
        microbatch_size=4,
        sequence=model.sequence,
        seed=0,
        optimizer=optimizer,
        data=DataConfig(kind="tokens", train=Digest("0" * 64), held_out=Digest("1" * 64)),
        evaluate_every=20,
        evaluate_batches=16,
    )
    return Study(model=model, train=train)


def codecs(elements: int) -> dict[str, CompressionConfig]:
    """The codecs by name. `elements`: the size of a tensor between stages. A ratio is that of forward bytes."""
    found = {
        "dense": CompressionConfig(),
        "int8": CompressionConfig(kind="uniform", codec="int8"),
        "int4": CompressionConfig(kind="uniform", codec="int4"),
        DEFAULT: CompressionConfig(kind="adaptive"),
    }
    for ratio in RATIOS:
        found[f"top-k {ratio}"] = CompressionConfig(kind="uniform", codec=str(sparse(elements, ratio)))
    for ratio in RATIOS:
        found[f"AdaTopK {ratio}"] = CompressionConfig(kind="adaptive", ratio=float(ratio), families=("topk",))
    for ratio in (10, 100):
        own = replace(found[f"AdaTopK {ratio}"], reuse_mask=False)
        found[f"AdaTopK {ratio}, own gradients"] = own  # the paper's: its own choice of elements backward
        found[f"AdaTopK {ratio}, own gradients, error feedback"] = replace(own, error_feedback=True)
    return found


def sparse(elements: int, ratio: float) -> Spec:
    """The largest density, to three digits, whose payload is at most a `ratio`-th of the dense one."""
    low, high = MIN_MILLIONTHS, MAX_MILLIONTHS
    while low < high:
        middle = (low + high + 1) // 2
        spec = Spec(family="topk", millionths=middle)
        low, high = (
            (middle, high) if spec.payload_bytes(elements, 4) * ratio <= 4 * elements else (low, middle - 1)
        )
    digits = 10 ** max(0, len(str(low)) - 3)
    return Spec(family="topk", millionths=low // digits * digits)


@cache
def _model(config: GPTConfig, seed: int) -> LanguageModel:
    return sources.builtin(config, seed, byte_level=True, tokenizer=None)


def graph_of(plan: Study) -> Graph:
    training = _model(plan.model, 0).training
    assert training is not None
    return clean(training)


def homes() -> Network:
    network = load(NETWORKS / "b.toml").network()
    return Network(devices=tuple(network.device(home) for home in HOMES), links=network.links)


def placed(plan: Study, graph: Graph) -> Placement:
    """Four stages of equal FLOPs, on the homes in their order."""
    return place(
        graph, homes(), plan.sizes, plan.train.microbatches, stages=len(HOMES), scheduler="equal-flops"
    )


def edge_codecs(plan: Study, graph: Graph, compression: CompressionConfig) -> EdgeCodecs:
    found = placed(plan, graph)
    parts = split(graph, found.cuts)
    # Nothing is spared for being hidden behind computing: the ratio is what is looked at.
    traffic = StageTraffic(
        edges=edges_of(parts), ties=ties_of(parts, plan.sizes), sizes=plan.sizes, owners=found.owners, network=homes()
    )  # fmt: skip
    return choose_codecs(traffic, compression, REFERENCE, 0.0)


async def train(
    plan: Study, graph: Graph, seed: int, compression: CompressionConfig, folder: Path
) -> dict[str, Any]:
    """One training run: (step, validation loss) points, the training loss of each step, the bytes sent in a step."""
    config = replace(
        plan.train, seed=seed, compression=compression, codecs=edge_codecs(plan, graph, compression)
    )
    torch.manual_seed(seed)
    line = Line(
        graph,
        placed(plan, graph).cuts,
        _model(plan.model, seed).read,
        config,
        folder / "train",
        folder / "held_out",
    )
    began = time.monotonic()
    losses, validation = [], [(0, await line.evaluate(0))]
    before, training_bytes = line.sent_bytes, 0
    for step in range(config.steps):
        losses.append(await line.step(step))
        training_bytes += line.sent_bytes - before
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
            validation.append((step + 1, await line.evaluate(step + 1)))
        before = line.sent_bytes
    return {
        "validation": validation,
        "losses": losses,
        "sent_bytes": training_bytes / config.steps,
        "codecs": config.codecs,
        "seconds": time.monotonic() - began,
    }


def table(runs: Mapping[str, Mapping[str, Any]], names: list[str]) -> list[tuple[str, ...]]:
    """A row for each codec that was run with all seeds of dense: final losses, absolute and relative to dense."""
    head = (
        "codec",
        "runs",
        "validation loss",
        "of each seed",
        "against dense",
        "bytes of dense",
        "edges sent as",
    )
    dense = runs.get("dense", {})
    rows = [head]
    for name in names:
        own = runs.get(name, {})
        seeds = sorted(set(own) & set(dense), key=int)
        if not seeds:
            continue
        final = [own[s]["validation"][-1][1] for s in seeds]
        base = [dense[s]["validation"][-1][1] for s in seeds]
        sent = mean(own[s]["sent_bytes"] / dense[s]["sent_bytes"] for s in seeds)
        used = sorted({spec for _, *ways in own[seeds[0]]["codecs"] for spec in ways})
        rows.append(
            (
                name, str(len(seeds)), f"{mean(final):.4f}", ", ".join(f"{loss:.3f}" for loss in final),
                f"{100 * (mean(final) / mean(base) - 1):+.2f} %", f"{sent:.4f}", ", ".join(used) or "none",
            )
        )  # fmt: skip
    return rows


def report(found: Mapping[str, Any], names: list[str], folder: Path) -> None:
    rows = table(found["runs"], names)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    lines = [" | ".join(row) for row in rows]
    lines.insert(1, "|".join("---" for _ in rows[0]))
    text = ABOUT + "\n".join(f"| {line} |" for line in lines)
    (folder / "convergence.md").write_text(text + "\n")
    from bench.network_plots import draw

    curves = {}
    for name, runs in sorted(found["runs"].items(), key=lambda item: names.index(item[0])):
        points = zip(*(run["validation"][1:] for run in runs.values()), strict=True)
        curves[name] = [(seeds[0][0], mean(loss for _, loss in seeds)) for seeds in points]
    if curves:
        draw(folder / "convergence.png", "Validation loss, mean over seeds", "steps", curves)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run later")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--folder", type=Path, default=DOCS, help="where results are kept")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end_as_if_interrupted()
    until = time.monotonic() + 60.0 * options.minutes
    plan = study(options.steps)
    graph = graph_of(plan)
    offered = codecs(plan.train.microbatch_size * plan.model.sequence * plan.model.width)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "convergence.json"
    about = json.loads(json.dumps({"model": asdict(plan.model), "train": asdict(plan.train)}))
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"study": about, "runs": {}}
    if found["study"] != about:
        raise ValueError(f"{path} is of another model or schedule; move it away to begin anew")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, files, limit in zip(
            ("train", "held_out"), text_files(), (TEXT_BYTES, TEXT_BYTES // 8), strict=True
        ):
            (folder / name).write_bytes(pack_text(files, None, limit, plan.model.vocabulary).tobytes())
        for seed in map(int, options.seeds.split(",")):
            for name, compression in offered.items():
                runs = found["runs"].setdefault(name, {})
                if str(seed) in runs or options.report or time.monotonic() > until:
                    continue
                runs[str(seed)] = run = asyncio.run(train(plan, graph, seed, compression, folder))
                print(f"{name}, seed {seed}: {run['validation'][-1][1]:.4f} after {run['seconds']:.0f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
                written = path.with_suffix(".new")
                written.write_text(json.dumps(found) + "\n")
                written.replace(path)
    report(
        {"runs": {name: runs for name, runs in found["runs"].items() if runs}}, list(offered), options.folder
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
