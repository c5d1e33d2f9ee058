"""Compares decoding and training of this checkout and another, in turn, since a machine drifts by more than releases differ.

    python tests/bench/against.py CHECKOUT [--only decode,training] [--rounds 18] [--json]

Each has three peers of its own, started with the interpreter of its own `.venv`. They serve the Llama of `make bench` over one,
two and three stages and are asked for the same 128 tokens, and two of them train its GPT for six steps; one checkout after the
other, and who is first changes. Printed are the mean of the ratio of speeds and twice its standard error: new over old.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
STAGES = (1, 2, 3)
PARTS = {"decode": tuple(f"decode over {stages}" for stages in STAGES), "training": ("training over 2",)}


async def answer_requests() -> None:
    """A checkout's process: reply to each line that names a measurement with tokens or steps a second, and the tokens."""
    from bench.decode import PROMPT, TOKENS, served_llama
    from bench.training import _swarm_step_seconds

    from fusion.cli.local.fleet import open_fleet
    from fusion.runtime.peer.client import ClientConfig, open_client
    from fusion.runtime.serving.requests.client import complete
    from fusion.runtime.serving.requests.request import GenerateRequest

    loop, trained = asyncio.get_running_loop(), 0
    async with open_fleet("fusion-against-") as fleet:
        _, home, (first, *_) = await served_llama(fleet, 3, STAGES, "cpu")
        async with open_client(ClientConfig(home=home, peer=first.address)) as client:
            print("ready", flush=True)
            while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
                what, _, stages = line.split()
                if what == "training":
                    trained += 1
                    print(
                        json.dumps([1 / await _swarm_step_seconds(fleet, trained, first.address), []]),
                        flush=True,
                    )
                    continue
                request = GenerateRequest(
                    model=f"llama-{stages}", prompt_ids=tuple(PROMPT), max_tokens=TOKENS
                )
                started = time.perf_counter()
                answer = await complete(client.transport, first.peer_id, request)
                seconds = time.perf_counter() - started
                print(json.dumps([TOKENS / seconds, answer.tokens]), flush=True)


class Checkout:
    """A checkout's process, which runs its peers and measures them."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        code = (
            f"import sys; sys.path[:0] = [{str(folder / 'tests')!r}]; import asyncio, runpy; "
            f"asyncio.run(runpy.run_path({str(Path(__file__).resolve())!r})['answer_requests']())"
        )
        self._process = stack.enter_context(
            subprocess.Popen(
                [str(folder / ".venv/bin/python"), "-c", code],
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def until_ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{self._process.args[0]}: its peers did not start")  # type: ignore[index]

    def measure(self, what: str) -> tuple[float, list[int]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        rate, tokens = json.loads(self._process.stdout.readline())
        return rate, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "checkout", type=Path, help="of another commit, in which `make .venv/.installed-dev` was run"
    )
    parser.add_argument("--only", default="decode,training", help="a comma between parts")
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: at least 2")
    parts = given.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only: {' or '.join(PARTS)}, not {unknown[0]!r}")
    if not (given.checkout / ".venv/bin/python").exists():
        parser.error(f"{given.checkout} has no .venv: make -C {given.checkout} .venv/.installed-dev")
    measured = [what for part in parts for what in PARTS[part]]
    ratios: dict[str, list[float]] = {what: [] for what in measured}
    with ExitStack() as stack:
        old, new = (Checkout(stack, folder) for folder in (given.checkout.resolve(), HERE))
        for each in (old, new):
            each.until_ready()
        for number in range(-1, given.rounds):  # the first is for warming up
            for what in measured:
                rates = {each: each.measure(what) for each in ((old, new) if number % 2 else (new, old))}
                if rates[old][1] != rates[new][1]:
                    raise SystemExit(f"{what} stages the two answer differently")
                if number >= 0:
                    ratios[what].append(rates[new][0] / rates[old][0])
    if given.json:
        print(json.dumps({"ratios": ratios}))
        return
    for what, each in ratios.items():
        error = 2 * statistics.stdev(each) / math.sqrt(len(each))
        print(f"{what} stages: {statistics.mean(each):.3f} +- {error:.3f}")


if __name__ == "__main__":
    main()
