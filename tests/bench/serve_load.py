"""Loads real peers through OpenAI's API over HTTP, and checks that every answer has its tokens and that nothing is left behind.

    python tests/bench/serve_load.py [--clients 64] [--seconds 60] [--only steady,vanish,memory,abuse] [--json]

    steady    clients that ask one question after the other: no error but 429, no token lost or doubled, memory flat
    vanish    clients that are switched off in the middle of answers: until every stage is free of them
    memory    more long answers at once than the stages lend memory for
    abuse     an honest client beside one that opens --clients answers and reads none

Exits with 1 where something does not hold. Its clients are one process; the peers are two, a stage each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.baseline import say
from bench.serving.load import abused, overcommitted, steady, vanishing
from bench.serving.load_site import open_site
from bench.serving.load_verdict import held, load_rows
from bench.text_table import text_of

PARTS = ("steady", "vanish", "memory", "abuse")
MANY_CLIENTS, MANY_SECONDS = 256, 10.0
VANISHING, ABUSING = 32, 64
LONG_ANSWERS, LENT_SESSIONS = 16, 3.0  # at once, and for how many there is memory


async def measure_load(only: list[str], clients: int, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if set(only) & {"steady", "vanish", "abuse"}:
        async with open_site() as site:
            if "steady" in only:
                found["steady"] = [await _told(steady(site, clients, seconds))]
            if "vanish" in only:
                found["vanish"] = await _told(vanishing(site, min(clients, VANISHING)))
            if "abuse" in only:
                found["abuse"] = await _told(abused(site, min(clients, ABUSING), min(seconds, MANY_SECONDS)))
    if "memory" in only:
        async with open_site(LENT_SESSIONS) as site:
            found["memory"] = await _told(overcommitted(site, LONG_ANSWERS))
    return found


async def measure_all() -> dict[str, Any]:
    """The loads of `make bench-serve`: 64 clients for a minute, 256 for ten seconds, and the other checks."""
    found = await measure_load(list(PARTS), 64, 60.0)
    found["steady"] += (await measure_load(["steady"], MANY_CLIENTS, MANY_SECONDS))["steady"]
    return found


async def _told(work: Any) -> dict[str, Any]:
    found: dict[str, Any] = await work
    say(f"load: {json.dumps(found)}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="serve_load.py", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default=",".join(PARTS), help="a comma between parts")
    parser.add_argument("--json", action="store_true", help="print the JSON alone")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if not 1 <= options.clients <= 1024 or not 0 < options.seconds <= 3600:
        parser.error("--clients: 1 to 1024; --seconds: up to 3600")
    results = asyncio.run(measure_load(parts, options.clients, options.seconds))
    if not options.json:
        print(text_of([("what", "baseline", "swarm", "ratio", "target"), *load_rows(results)]))
    print(json.dumps(results))
    sys.exit(0 if held(results) else 1)
