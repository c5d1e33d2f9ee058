"""`make bench`: the figures of the README. One table, and bench-results.json with every sample behind it.

    python tests/bench [--rounds 5] [--only training,decode,streams,prefix,start,thin] [--device cpu|cuda] [--json]

What is compared is measured in turn (baseline, swarm, baseline, swarm, ...), because machines drift; the table shows
medians and the median of the ratios of neighbouring samples. Peers are real processes on loopback, one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.decode import measure_decode
from bench.prefix import measure_prefix
from bench.start import measure_start
from bench.streams import measure_streams, stream_rows
from bench.text_table import text_of
from bench.thin import measure_thin
from bench.training import measure_training

RESULTS = Path("bench-results.json")


async def main(only: set[str], rounds: int, device: str) -> dict[str, Any]:
    results: dict[str, Any] = {"device": device, "rounds": rounds, "cores": os.cpu_count()}
    if "training" in only:
        results["training"] = await measure_training(rounds, device)
    if "decode" in only:
        results["decode"] = await measure_decode(rounds, device)
    if "streams" in only:
        results["streams"] = await measure_streams(rounds, device)
    if "prefix" in only:
        results["prefix"] = await measure_prefix(rounds, device)
    if "start" in only:
        results["start"] = await measure_start(10)
    if "thin" in only:
        results["thin"] = await measure_thin(10)
    return results


def table(results: dict[str, Any]) -> str:
    rows = [("what", "baseline", "swarm", "ratio", "target")]
    if training := results.get("training"):
        rows.append(
            (
                "training, 2 peers against 1 process: seconds a step",
                f"{statistics.median(training['baseline_step_seconds']):.2f}",
                f"{statistics.median(training['swarm_step_seconds']):.2f}",
                f"{training['speed_up']:.2f}",
                ">= 1.6 (bound 1.78)",
            )
        )
    for decode in results.get("decode", {}).get("stages", []):
        rows.append(
            (
                f"decode, {decode['stages']} stage(s) against generate(): tokens/s",
                f"{statistics.median(decode['baseline_tokens_per_second']):.1f}",
                f"{statistics.median(decode['swarm_tokens_per_second']):.1f}",
                f"{decode['ratio']:.2f}",
                f">= {decode['target']:.2f}",
            )
        )
    if decode := results.get("decode"):
        rows.append(("decode, time a hop adds: ms", "", f"{1e3 * decode['hop_seconds']:.2f}", "", ""))
    rows += stream_rows(results["streams"]) if "streams" in results else []
    if prefix := results.get("prefix"):
        rows.append(
            (
                f"second turn after {prefix['history']} tokens against the first: s to the first token",
                f"{statistics.median(prefix['first_turn_seconds']):.3f}",
                f"{statistics.median(prefix['second_turn_seconds']):.3f}",
                f"{prefix['ratio']:.3f}",
                "<= 0.150",
            )
        )
    if start := results.get("start"):
        seconds = start["announced_seconds"]
        shown = f"{statistics.median(seconds):.2f} / {max(seconds):.2f}"
        rows.append((f"start to announced, p50 / max of {len(seconds)}: s", "", shown, "", ""))
        speed = f"{statistics.median(start['flops_per_second']) / 1e9:.1f}"
        rows.append(
            ("speed announced, p50: GFLOP/s; how far apart", "", speed, f"{start['apart']:.2f}", "<= 0.10")
        )
    if thin := results.get("thin"):
        seconds = thin["first_token_seconds"]
        shown = f"{statistics.median(seconds):.2f} / {max(seconds):.2f}"
        rows.append(
            (f"thin client, start to first token, p50 / max of {len(seconds)}: s", "", shown, "", "<= 0.70")
        )
        rows.append(
            ("thin client, its environment: MiB", "", f"{thin['environment_bytes'] / 2**20:.0f}", "", "")
        )
    for name, part in (("training", results.get("training")), ("decode", results.get("decode"))):
        if part:
            peers = ", ".join(f"{peak / 2**20:.0f}" for peak in part["peer_peak_bytes"])
            rows.append(
                (f"peak memory, {name}: MiB", f"{part['baseline_peak_bytes'] / 2**20:.0f}", peers, "", "")
            )
    return text_of(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", default="training,decode,streams,prefix,start,thin", help="a comma between parts"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="print the JSON alone")
    options = parser.parse_args()
    found = asyncio.run(main(set(options.only.split(",")), options.rounds, options.device))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    if not options.json:
        print(table(found))
        print(f"(every sample: {RESULTS})", file=sys.stderr)
    print(json.dumps(found))
