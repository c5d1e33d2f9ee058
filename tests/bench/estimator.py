"""Compares the step time that `fusion-peer train` predicts with the measured one, on peers of this machine with one thread each.

    python tests/bench/estimator.py [--only 1,2,7-9] [--rounds 1] [--json FILE]

Twenty cases, fixed before anything was measured: GPTs of three sizes, a convolutional network and an encoder; torch and JAX; one to
three peers; few and many microbatches; short and long jobs. Nothing is set that a user would not set: snapshots are as
always. Seen is the mean time of a step from the first progress line with a committed step to the last one, by the clock of
whoever reads them. Pairs of cases that differ in one or two peers alone give the speed-up, against the bound of
a pipeline with these stages: the first microbatch through both, the others at the pace of the slower.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.baseline import say
from bench.text_table import text_of

from fusion.cli.local.fleet import Fleet, LocalPeer, open_fleet

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_PEERS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    peers: int
    microbatches: int
    steps: int
    plane: str = "torch"

    @property
    def name(self) -> str:
        return f"{self.model} {self.plane} {self.peers}x{self.microbatches} {self.steps}"


# (blocks, width, heads, sequence, samples of a microbatch)
GPTS = {"small": (4, 128, 4, 128, 4), "medium": (4, 256, 4, 256, 2), "large": (8, 512, 8, 256, 1)}
CASES = tuple(
    Case(model=model, plane=plane, peers=peers, microbatches=microbatches, steps=steps)
    for model, plane, peers, microbatches, steps in (
        ("small", "torch", 1, 4, 14),
        ("small", "torch", 2, 4, 14),
        ("small", "torch", 3, 4, 14),
        ("small", "torch", 1, 8, 100),
        ("small", "torch", 2, 8, 100),
        ("medium", "torch", 1, 4, 14),
        ("medium", "torch", 2, 4, 14),
        ("medium", "torch", 1, 8, 30),
        ("medium", "torch", 2, 8, 30),
        ("medium", "torch", 3, 8, 30),
        ("large", "torch", 1, 4, 14),
        ("large", "torch", 2, 4, 14),
        ("large", "torch", 2, 8, 14),
        ("large", "torch", 3, 8, 14),
        ("resnet", "torch", 1, 3, 14),
        ("resnet", "torch", 2, 3, 14),
        ("encoder", "torch", 1, 4, 60),
        ("encoder", "torch", 2, 4, 60),
        ("medium", "jax", 1, 4, 14),
        ("medium", "jax", 2, 4, 14),
    )
)
PAIRS = tuple(
    (one, other)
    for one, a in enumerate(CASES)
    for other, b in enumerate(CASES)
    if (a.peers, b.peers) == (1, 2)
    and (a.model, a.plane, a.microbatches, a.steps) == (b.model, b.plane, b.microbatches, b.steps)
)


async def measure(numbers: list[int], rounds: int) -> list[dict[str, Any]]:
    """One row for each round and case, in the order of CASES."""
    found = []
    for plane in dict.fromkeys(CASES[n].plane for n in numbers):
        async with open_fleet("fusion-estimator-") as fleet:
            peers = await _peers(fleet, plane)
            await _packed(fleet)
            for turn in range(rounds):
                for number in (n for n in numbers if CASES[n].plane == plane):
                    row = await _run(fleet, peers[0], number, turn)
                    say(f"{number + 1:2d} {row['case']:28s} predicted {row['predicted']:.3f} s, seen {row['seen']:.3f} s, "
                        f"median {row['median']:.3f} s: {row['predicted'] / row['seen']:.2f}")  # fmt: skip
                    found.append(row)
    return found


async def _peers(fleet: Fleet, plane: str) -> list[LocalPeer]:
    first = await fleet.start_peer("peer-1", "--plane", plane)
    others = [
        await fleet.start_peer(f"peer-{i + 2}", "--plane", plane, bootstrap=(first.address,))
        for i in range(MOST_PEERS - 1)
    ]
    return [first, *others]


async def _packed(fleet: Fleet) -> None:
    (fleet.root / "text").write_bytes(bytes(range(256)) * 4096)
    for example in ("digits-resnet", "encoder"):
        folder = fleet.root / example
        folder.mkdir()
        for file in (EXAMPLES / example).iterdir():
            if file.suffix in (".py", ".toml"):
                (folder / file.name).write_bytes(file.read_bytes())
        process = await asyncio.create_subprocess_exec(sys.executable, str(folder / "pack.py"), cwd=folder)
        if await process.wait():
            raise RuntimeError(f"{example}/pack.py failed")


async def _run(fleet: Fleet, peer: LocalPeer, number: int, turn: int) -> dict[str, Any]:
    case, name = CASES[number], f"case-{number}-{turn}"
    job = _job(fleet.root, case, name)
    times: dict[int, float] = {}
    launched: list[dict[str, Any]] = []

    def see(record: dict[str, Any]) -> None:
        if record["event"] == "launched":
            launched.append(record)
        elif record["event"] == "progress" and record["step"] > 0:
            times.setdefault(record["step"], time.monotonic())

    home = str(fleet.root / "trainer")
    await fleet.run(name, "train", str(job), "--home", home, "--peer", peer.address, on_record=see)
    steps = sorted(times)
    plan = launched[0]["plan"]
    each = [(times[b] - times[a]) / (b - a) for a, b in pairwise(steps)]
    return {
        "case": case.name,
        "number": number,
        "predicted": launched[0]["predicted_seconds"],
        "seen": (times[steps[-1]] - times[steps[0]]) / (steps[-1] - steps[0]),
        "median": statistics.median(each),
        "steps": each,
        "stage_seconds": [stage["seconds"] for stage in plan["stages"]],
    }


def _job(root: Path, case: Case, name: str) -> Path:
    """Write the case's job file into the folder of the example that it is made from."""
    if case.model in GPTS:
        blocks, width, heads, sequence, size = GPTS[case.model]
        text = f"""
[model]
kind = "gpt"
blocks = {blocks}
width = {width}
heads = {heads}
[data]
files = ['{root}/text']
held_out = 0.0
[train]
sequence = {sequence}
microbatch_size = {size}
"""
    else:
        example = {"resnet": "digits-resnet", "encoder": "encoder"}[case.model]
        root = root / example
        dropped = ("name =", "steps =", "microbatches =", "evaluate_every =", "schedule =", "warmup_steps =")
        lines = (root / "job.toml").read_text().splitlines()
        text = "\n".join(line for line in lines if not line.startswith(dropped))
    text = text.replace(
        "[train]", f"[train]\nsteps = {case.steps}\nmicrobatches = {case.microbatches}\nevaluate_batches = 1"
    )
    path = root / f"{name}.toml"
    path.write_text(f'name = "{name}"\n{text}\n[placement]\nstages = {case.peers}\n')
    return path


def table(rows: list[dict[str, Any]]) -> str:
    lines = [("case", "predicted", "seen", "ratio", "")]
    for row in rows:
        lines.append((row["case"], f"{row['predicted']:.3f} s", f"{row['seen']:.3f} s",
                      f"{row['predicted'] / row['seen']:.2f}", ""))  # fmt: skip
    errors = sorted(abs(row["predicted"] / row["seen"] - 1) for row in rows)
    lines.append(("error, median and worst", "", "", f"{statistics.median(errors):.0%}, {errors[-1]:.0%}", "12 %, 35 %"))  # fmt: skip
    seen = {
        n: statistics.median(r["seen"] for r in rows if r["number"] == n) for n in {r["number"] for r in rows}
    }
    shares = []
    for one, two in PAIRS:
        if one in seen and two in seen:
            row = next(r for r in rows if r["number"] == two)
            bound = _bound(row["stage_seconds"], CASES[two].microbatches)
            shares.append(seen[one] / seen[two] / bound)
            lines.append((f"two peers against one: {CASES[two].name}", f"{bound:.2f}", f"{seen[one] / seen[two]:.2f}",
                          f"{shares[-1]:.2f}", ""))  # fmt: skip
    if shares:
        lines.append(("of the pipeline's bound, median", "", "", f"{statistics.median(shares):.2f}", "0.90"))
    return text_of(lines)


def _bound(stage_seconds: list[float], microbatches: int) -> float:
    """The greatest speed-up over one peer of a pipeline whose stages compute for so long in a step."""
    whole = sum(stage_seconds)
    return whole / (whole / microbatches + max(stage_seconds) * (microbatches - 1) / microbatches)


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first) - 1, int(last or first))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=f"1-{len(CASES)}", help="numbers of cases, as in 1,2,7-9")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    options = parser.parse_args()
    rows = asyncio.run(measure(_numbers(options.only), options.rounds))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
