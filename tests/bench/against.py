"""Decoding of this checkout against that of another, in turn: a machine drifts by more than two releases differ.

    python tests/bench/against.py CHECKOUT [--rounds 18] [--json]

Each serves the Llama of `make bench` by three peers of its own over one, two and three stages, with the interpreter of its own
`.venv`; both are asked for the same 128 tokens one after the other, and who is first changes. Printed are the ratio's mean and
twice its standard error: new over old.
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


async def answer_requests() -> None:
    """In a process of a checkout: a line with a number of stages is answered with tokens/s and the tokens."""
    from bench.decode import PROMPT, TOKENS, served_llama

    from fusion.cli.local.fleet import open_fleet
    from fusion.runtime.peer.client import ClientConfig, open_client
    from fusion.runtime.serving.requests.client import complete
    from fusion.runtime.serving.requests.request import GenerateRequest

    loop = asyncio.get_running_loop()
    async with open_fleet("fusion-against-") as fleet:
        _, home, (first, *_) = await served_llama(fleet, 3, STAGES, "cpu")
        async with open_client(ClientConfig(home=home, peer=first.address)) as client:
            print("ready", flush=True)
            while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
                request = GenerateRequest(model=f"llama-{line}", prompt_ids=tuple(PROMPT), max_tokens=TOKENS)
                started = time.perf_counter()
                answer = await complete(client.transport, first.peer_id, request)
                seconds = time.perf_counter() - started
                print(json.dumps([TOKENS / seconds, answer.tokens]), flush=True)


class Checkout:
    """Peers of one, and who asks them."""

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

    def ask(self, stages: int) -> tuple[float, list[int]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{stages}\n")
        self._process.stdin.flush()
        rate, tokens = json.loads(self._process.stdout.readline())
        return rate, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "checkout", type=Path, help="of another commit, in which `make .venv/.installed-dev` was run"
    )
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: at least 2")
    if not (given.checkout / ".venv/bin/python").exists():
        parser.error(f"{given.checkout} has no .venv: make -C {given.checkout} .venv/.installed-dev")
    ratios: dict[int, list[float]] = {stages: [] for stages in STAGES}
    with ExitStack() as stack:
        old, new = (Checkout(stack, folder) for folder in (given.checkout.resolve(), HERE))
        for each in (old, new):
            each.until_ready()
        for number in range(-1, given.rounds):  # the first is for warming up
            for stages in STAGES:
                rates = {each: each.ask(stages) for each in ((old, new) if number % 2 else (new, old))}
                if rates[old][1] != rates[new][1]:
                    raise SystemExit(f"over {stages} stages the two answer differently")
                if number >= 0:
                    ratios[stages].append(rates[new][0] / rates[old][0])
    found = {
        stages: (statistics.mean(each), 2 * statistics.stdev(each) / math.sqrt(len(each)))
        for stages, each in ratios.items()
    }
    if given.json:
        print(json.dumps({"ratios": ratios}))
    else:
        for stages, (mean, error) in found.items():
            print(f"{stages} stages: {mean:.3f} +- {error:.3f}")


if __name__ == "__main__":
    main()
