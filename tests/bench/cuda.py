"""Measures a GPU: one stage on it against `generate()`, and a job with a stage on the CPU and one on the GPU.

    python tests/bench/cuda.py [--only serve,train] [--rounds 3] [--dtype bfloat16]

Served: a Llama of 1.1 billion parameters by one real peer, 1, 8 and 32 answers at once, against batches of as many of transformers'
`generate()` on the same GPU, in turn. Trained: the GPT of `make bench` by two real peers, over two stages, against one process of
plain PyTorch on either device; and what `train` promised of a step's time. One table, and JSON behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.baseline import baseline, say
from bench.decode import PROMPT, TOKENS, make_model, served_llama
from bench.streams import STREAMS, answers_at_once
from bench.text_table import text_of
from bench.training import MICROBATCH_SIZE, MICROBATCHES, MODEL, SEQUENCE, WARM_UP, job_text

from fusion.cli.local.fleet import open_fleet
from fusion.runtime.peer.client import ClientConfig, open_client

LARGE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "initializer_range": 0.06,
}  # fmt: skip
STEPS = 30
# What each pair of peers computes on.
PAIRS = (("cuda", "cuda"), ("cpu", "cuda"))


async def serve(rounds: int, dtype: str) -> dict[str, Any]:
    """Tokens a second, by the number of answers at once."""
    own: dict[int, list[float]] = {n: [] for n in STREAMS}
    swarm: dict[int, list[dict[str, float]]] = {n: [] for n in STREAMS}
    make = partial(make_model, positions=2048, shape=LARGE, dtype=dtype)
    async with open_fleet("fusion-cuda-") as fleet:
        path, home, (peer,) = await served_llama(fleet, 1, (1,), "cuda", make)
        request = {"path": path, "prompt": PROMPT, "tokens": TOKENS, "device": "cuda", "dtype": dtype}
        async with open_client(ClientConfig(home=home, peer=peer.address)) as client:
            expected: dict[int, list[int]] = {}
            await answers_at_once(client, peer, 1, 1, {})  # loads what a first answer loads
            for _ in range(rounds):
                for n in STREAMS:
                    own[n].append(
                        max((await baseline("decode", {**request, "batch": n}))["tokens_per_second"])
                    )
                    swarm[n].append(await answers_at_once(client, peer, 1, n, expected))
                shown = ", ".join(
                    f"{n}: {own[n][-1]:.0f} and {swarm[n][-1]['tokens_per_second']:.0f}" for n in STREAMS
                )
                say(f"answers at once, generate() and one stage, tokens/s: {shown}")
    return {"dtype": dtype, "generate": own, "stage": swarm}


async def train(rounds: int) -> dict[str, Any]:
    """The seconds of a step."""
    request = {"model": MODEL, "sequence": SEQUENCE, "microbatches": MICROBATCHES,
               "microbatch_size": MICROBATCH_SIZE, "steps": 6}  # fmt: skip
    own: dict[str, list[float]] = {"cuda": [], "cpu": []}
    for _ in range(rounds):
        for device, seconds in own.items():
            answer = await baseline("train", {**request, "device": device})
            seconds.append(statistics.median(answer["step_seconds"][WARM_UP:]))
            say(f"one process on {device}: {seconds[-1]:.3f} s a step")
    rows = []
    for devices in PAIRS:
        async with open_fleet("fusion-cuda-") as fleet:
            first = await fleet.start_peer("peer-1", "--device", devices[0])
            await fleet.start_peer("peer-2", "--device", devices[1], bootstrap=(first.address,))
            (fleet.root / "text").write_bytes(bytes(range(256)) * 4096)
            for turn in range(rounds):
                launched: list[dict[str, Any]] = []
                job = fleet.root / f"job-{turn}.toml"
                job.write_text(job_text(f"bench-{turn}", fleet.root, STEPS))
                records = await fleet.run(
                    *(f"train-{turn}", "train", str(job), "--home", str(fleet.root / "trainer")),
                    *("--peer", first.address),
                    on_record=lambda record, to=launched: to.append(record),
                )
                progress = [
                    r for r in records if r["event"] == "progress" and r["step"] and r["tokens_per_second"]
                ]
                told = next(r for r in launched if r["event"] == "launched")
                tokens = MICROBATCHES * MICROBATCH_SIZE * SEQUENCE
                ended = [tokens * r["step"] / r["tokens_per_second"] for r in progress]
                steps = [r["step"] for r in progress]
                row = {
                    "devices": devices,
                    "predicted": told["predicted_seconds"],
                    "seen": (ended[-1] - ended[WARM_UP]) / (steps[-1] - steps[WARM_UP]),
                    "stages": told["plan"]["stages"],
                    "loss": progress[-1]["loss"],
                }
                say(f"{devices}: {row}")
                rows.append(row)
    return {"one_process": own, "swarm": rows}


def table(found: dict[str, Any]) -> str:
    rows = [("what", "baseline", "swarm", "ratio", "target")]
    if served := found.get("serve"):
        for n in STREAMS:
            own = statistics.median(served["generate"][n])
            rate = statistics.median(each["tokens_per_second"] for each in served["stage"][n])
            rows.append(
                (f"{n} at once in {served['dtype']} against generate(): tokens/s", f"{own:.0f}", f"{rate:.0f}",
                 f"{rate / own:.2f}", ">= 1.50")
            )  # fmt: skip
    if trained := found.get("train"):
        own = {device: statistics.median(each) for device, each in trained["one_process"].items()}
        for devices in PAIRS:
            mine = [row for row in trained["swarm"] if row["devices"] == devices]
            seen = statistics.median(row["seen"] for row in mine)
            promised = statistics.median(row["predicted"] / row["seen"] for row in mine)
            name = f"training on {' and '.join(devices)} against one process on "
            rows.append(
                (
                    name + "cuda: s a step",
                    f"{own['cuda']:.3f}",
                    f"{seen:.3f}",
                    f"{own['cuda'] / seen:.2f}",
                    "",
                )
            )
            rows.append(
                (name + "cpu: s a step", f"{own['cpu']:.3f}", f"{seen:.3f}", f"{own['cpu'] / seen:.2f}", "")
            )
            rows.append(("  what was promised of a step, to what came", "", "", f"{promised:.2f}", ""))
    return text_of(rows)


async def main(only: set[str], rounds: int, dtype: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "serve" in only:
        found["serve"] = await serve(rounds, dtype)
    if "train" in only:
        found["train"] = await train(rounds)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="serve,train", help="a comma between parts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    results = asyncio.run(main(set(options.only.split(",")), options.rounds, options.dtype))
    print(table(results))
    print(json.dumps(results))
