"""The effect of half precision on training: the demo's job in float32, bf16 and fp16, the same steps on the same samples.

    python tests/bench/precision.py [--steps 600] [--only float32,bf16,fp16] [--seed 0]

Three stages in one process, what they send encoded and decoded as between peers (`convergence_run`). Prints, for each precision, the
mean training loss of the last tenth of the steps, the loss on held-out text and the bytes a step, and what they are against float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.convergence_run import Line

from fusion.cli.demo import job_text
from fusion.dag.placement.network import Device, Network
from fusion.dag.placement.place import place
from fusion.runtime.capture import sources
from fusion.runtime.capture.trained_graph import trained_graph
from fusion.runtime.job import spec
from fusion.runtime.job.manifest import DataConfig, Precision
from fusion.runtime.job.spec import GPTConfig
from fusion.runtime.launch.prepare import train_config
from fusion.runtime.training.data.batches import pack_text
from fusion.swarm.directory.records import Digest

STAGES = 3
PEERS = tuple(Device(peer=f"peer-{i}", flops_per_second=1e11, memory_bytes=1 << 40) for i in range(STAGES))


async def train(precision: Precision, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    asked = spec.parse(job_text([peer.peer for peer in PEERS], steps), folder)
    assert isinstance(asked.model, GPTConfig)
    asked = replace(asked, train=replace(asked.train, precision=precision, seed=seed))
    for name, files in (("train", asked.data.files), ("held_out", asked.data.held_out)):
        path = folder / name
        if not path.exists():
            path.write_bytes(pack_text(files, None, asked.data.limit_bytes, 256).tobytes())
    config = train_config(asked, DataConfig(kind="tokens", train=Digest(""), held_out=Digest("")))
    model = sources.builtin(asked.model, seed, byte_level=True, tokenizer=None)
    assert model.training is not None
    graph = trained_graph(model.training, precision)
    sizes = config.sizes
    cuts = place(graph, Network(devices=PEERS), sizes, config.microbatches, scheduler="equal-flops").cuts
    line = Line(graph, cuts, model.read, config, folder / "train", folder / "held_out")
    began, losses = time.process_time(), []
    for step in range(steps):
        losses.append(await line.step(step))
    sent = line.sent_bytes
    return {
        "precision": precision,
        "steps": steps,
        "seed": seed,
        "loss": mean(losses[-max(1, steps // 10) :]),
        "held_out": await line.evaluate(steps),
        "bytes_a_step": sent / steps,
        "skipped": line.skipped,
        "cpu_seconds": time.process_time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only", default="float32,bf16,fp16")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision in asked.only.split(","):
            found = asyncio.run(train(precision, asked.steps, asked.seed, Path(folder)))
            first = first or found
            against = {key: found[key] / first[key] - 1 for key in ("loss", "held_out", "bytes_a_step")}
            print(json.dumps({**found, "against_the_first": against}), flush=True)


if __name__ == "__main__":
    main()
