"""`make bench-serve`: the speed of a served model for its users, as one table, and bench-serve.json with every sample.

    python tests/bench/serve.py [--rounds 3] [--only streams,wan,first,load] [--json]

    streams   1, 8 and 32 answers at once over 1 and 2 stages on loopback, against local `generate()`
    wan       a token around 4 stages 50 ms apart, with and without guesses (root, Linux)
    first     the first token of a long prompt over links of 20 ms, for others meanwhile, a chat's second turn (root, Linux)
    load      64 clients for a minute, 256 for ten seconds, some of which vanish, ask too much, or read nothing

Each part can be had alone and smaller; `serve_load.py` has more settings. Peers are real processes, one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.baseline import say
from bench.serving.first_token import first_token_rows, measure_first_token
from bench.serving.wan import measure_wan, wan_rows
from bench.streams import measure_streams, stream_rows
from bench.text_table import text_of
from box import kernel

RESULTS = Path("bench-serve.json")
PARTS = ("streams", "wan", "first", "load")


def measure(only: list[str], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rounds": rounds, "cores": os.cpu_count()}
    reason = kernel.unavailable()
    if "streams" in only:
        found["streams"] = asyncio.run(measure_streams(rounds, "cpu"))
    for part, work in (("wan", measure_wan), ("first", measure_first_token)):
        if part in only and reason:
            say(f"{part}: skipped: {reason}")
        elif part in only:
            found[part] = work(rounds)
    if "load" in only:
        from bench.serve_load import measure_all

        found["load"] = asyncio.run(measure_all())
    return found


def table(found: dict[str, Any]) -> str:
    rows = [("what", "baseline", "swarm", "ratio", "target")]
    rows += stream_rows(found["streams"]) if "streams" in found else []
    rows += wan_rows(found["wan"]) if "wan" in found else []
    rows += first_token_rows(found["first"]) if "first" in found else []
    if "load" in found:
        from bench.serving.load_verdict import load_rows

        rows += load_rows(found["load"])
    return text_of(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make bench-serve", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS), help="a comma between parts")
    parser.add_argument("--json", action="store_true", help="print the JSON alone")
    options = parser.parse_args()
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    results = measure(parts, options.rounds)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if not options.json:
        print(table(results))
        if "first" in results:
            print(f"bound of the first token: {results['first']['bound']}")
        print(f"(every sample: {RESULTS})", file=sys.stderr)
    print(json.dumps(results))
