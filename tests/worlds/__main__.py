"""`make worlds`: tests ownership, commit and recovery in simulated worlds, one for each seed.

    python tests/worlds [--worlds 1000] [--seed 1] [--processes 2] [--json]
    python tests/worlds --liars 3               one to three peers of each world lie (tests/worlds/liars.py)
    python tests/worlds --replay SEED           one world, with every frame that was sent
    python tests/worlds --digest FILE           SHA-256 of the events of each world, to compare two checkouts
    python tests/worlds --plant term            with a planted bug, which must be found (term, ready, promote,
                                                mistake; with --liars: proof, votes, belief, snapshot, witness)

Exit 0: no world has a violation. 1: some have; their seeds are printed, and the log of one world of each kind.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":  # so that sets of strings have the same order in every run
    os.environ.update(PYTHONHASHSEED="0", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.execv(sys.executable, [sys.executable, *sys.argv])
sys.path.insert(0, str(Path(__file__).parents[1]))

from worlds import plants, runner
from worlds.virtual_time import cpu_seconds

SHOWN = 6  # kinds of failures that are printed, each with the log of one world
LINES = 200  # the last lines of a log that are printed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/worlds", description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first world; the next worlds have the next seeds"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--stop-after", type=int, default=20, help="stop after this many failed worlds")
    parser.add_argument("--until", metavar="KIND", default="", help="stop at the first failure of this kind")
    parser.add_argument("--plant", choices=sorted(plants.PLANTS), default="")
    parser.add_argument("--liars", type=int, default=0, help="the most liars in a world, up to three")
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument(
        "--digest",
        type=Path,
        metavar="FILE",
        help="write a line for each world: its seed, the digests of its events and its log",
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if min(given.worlds, given.processes, given.stop_after) < 1:
        parser.error("--worlds, --processes and --stop-after: at least 1")
    if not 0 <= given.liars <= 3:
        parser.error("--liars: from 0 to 3")
    if given.replay is not None:
        return replay(given.replay, given.plant, given.liars)
    seeds = range(given.seed, given.seed + given.worlds)
    processes = min(given.processes, len(seeds))
    if given.digest is not None:
        return digest(seeds, processes, given)
    summary, seconds = runner.timed(seeds, processes, given.plant, given.stop_after, given.until, given.liars)
    found = {
        "worlds": summary.worlds,
        "failed": sorted(outcome.seed for outcome in summary.failed),
        "violations": {str(o.seed): o.violations[0].splitlines()[0] for o in summary.failed},
        "faulted_worlds": summary.faulted,
        "faults": dict(sorted(summary.faults.items())),
        "captured": summary.captured,
        "updates": summary.updates,
        "virtual_seconds": round(summary.virtual_seconds),
        "cpu_milliseconds_per_world": round(1000 * summary.cpu_seconds / max(1, summary.worlds), 1),
        "seconds": round(seconds, 1),
    }
    if given.json:
        print(json.dumps(found))
    else:
        show(found, summary, given.plant)
    return 1 if summary.failed else 0


def show(found: dict[str, object], summary: runner.Summary, plant: str) -> None:
    for key, value in found.items():
        if key != "violations":
            print(f"{key.replace('_', ' '):>28}  {value}")
    for outcomes in runner.kinds(summary.failed)[:SHOWN]:
        outcome = outcomes[0]
        others = ", ".join(str(other.seed) for other in outcomes[1:12])
        print(f"\n{len(outcomes)} worlds, seed {outcome.seed}" + f" and {others}" * bool(others))
        print(*outcome.violations, sep="\n  ")
        print("  ...", *outcome.log[-LINES:], sep="\n  ")
        print(
            f"  to replay it with every frame: python tests/worlds --replay {outcome.seed}"
            + f" --plant {plant}" * bool(plant)
            + f" --liars {runner.LIARS}" * bool(runner.LIARS)
        )


def digest(seeds: Sequence[int], processes: int, given: argparse.Namespace) -> int:
    found, total = runner.digests(seeds, processes, given.plant)
    given.digest.write_text("".join(f"{each}\n" for each in found))
    if given.json:
        print(
            json.dumps({"worlds": len(found), "seed": total.seed, "events": total.events, "log": total.log})
        )
    else:
        print(f"{len(found)} worlds from seed {total.seed}\nevents {total.events}\nlog    {total.log}")
    return 0


def replay(seed: int, plant: str, liars: int) -> int:
    runner.prepare(plant, liars)
    first, again = runner.replay(seed), runner.replay(seed)
    print(*first.log, sep="\n")
    print(
        f"seed {seed}: {first.virtual_seconds:.3f} s of virtual time, {1000 * first.cpu_seconds:.0f} ms of CPU"
    )
    print(*(first.violations or ("no violation",)), sep="\n")
    same = runner.fingerprint(first) == runner.fingerprint(again)
    print(
        f"the log {'repeats' if same else 'DOES NOT REPEAT'}: {runner.fingerprint(first)} ({cpu_seconds():.1f} s in all)"
    )
    return 1 if first.violations or not same else 0


if __name__ == "__main__":
    sys.exit(main())
