"""Two peers with one thread each against one process with one thread, on the same GPT."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.baseline import baseline, peak_bytes, say

from fusion.cli.local.fleet import Fleet, open_fleet

MODEL = {"blocks": 8, "width": 512, "heads": 8}
SEQUENCE, MICROBATCHES, MICROBATCH_SIZE = 256, 8, 1
STEPS, WARM_UP = 6, 2  # of each sample; the first steps fill caches on both sides


async def measure_training(rounds: int, device: str) -> dict[str, Any]:
    request = {
        "model": MODEL,
        "sequence": SEQUENCE,
        "microbatches": MICROBATCHES,
        "microbatch_size": MICROBATCH_SIZE,
        "steps": STEPS,
        "device": device,
    }
    own, swarm, peaks = [], [], []
    async with open_fleet("fusion-bench-") as fleet:
        first = await fleet.start_peer("peer-1", "--device", device)
        second = await fleet.start_peer("peer-2", "--device", device, bootstrap=(first.address,))
        for number in range(rounds):
            answer = await baseline("train", request)
            own.append(statistics.median(answer["step_seconds"][WARM_UP:]))
            peaks.append(answer["peak_bytes"])
            swarm.append(await _swarm_step_seconds(fleet, number, first.address))
            say(f"training, round {number + 1}: {own[-1]:.2f} s alone, {swarm[-1]:.2f} s by two peers")
        peer_peaks = [peak_bytes(peer) for peer in (first, second)]
    return {
        "baseline_step_seconds": own,
        "swarm_step_seconds": swarm,
        "speed_up": statistics.median(a / b for a, b in zip(own, swarm, strict=True)),
        "baseline_peak_bytes": max(peaks),
        "peer_peak_bytes": peer_peaks,
    }


async def _swarm_step_seconds(fleet: Fleet, number: int, address: str) -> float:
    """The median duration of the steps after the warm-up, as the lead measures them."""
    job = fleet.root / f"bench-{number}.toml"
    job.write_text(job_text(f"bench-{number}", fleet.root, STEPS))
    (fleet.root / "text").write_bytes(bytes(range(256)) * 4096)
    home = str(fleet.root / "trainer")
    records = await fleet.run(f"train-{number}", "train", str(job), "--home", home, "--peer", address)
    tokens = MICROBATCHES * MICROBATCH_SIZE * SEQUENCE
    # The lead tells its speed since the first step began, so each step's length is a difference of two such times.
    ended = {0: 0.0}
    for record in records:
        if record["event"] == "progress" and record["tokens_per_second"] and record["step"] <= STEPS:
            ended.setdefault(record["step"], tokens * record["step"] / record["tokens_per_second"])
    return statistics.median(ended[k] - ended[k - 1] for k in range(WARM_UP + 1, STEPS + 1))


def job_text(name: str, root: Path, steps: int) -> str:
    """A job file for two stages of the GPT on the file `text` of a folder."""
    settings = "\n".join(f"{key} = {value}" for key, value in MODEL.items())
    return f"""
name = "{name}"
[model]
kind = "gpt"
{settings}
[data]
files = ['{root}/text']
held_out = 0.0
[train]
steps = {steps}
sequence = {SEQUENCE}
microbatches = {MICROBATCHES}
microbatch_size = {MICROBATCH_SIZE}
snapshot_every = 1000
evaluate_batches = 1
[optimizer]
learning_rate = 1e-4
[placement]
stages = 2
"""
