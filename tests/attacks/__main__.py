"""Attacks against real peers, with a verdict each.

    python tests/attacks [NAME...]          all, or those named; a line of JSON for each
    python tests/attacks --attack NAME ADDRESS...    only the stranger's part, against peers that run already

Exit 0: all were withstood. 1: one was not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from attacks import stranger
from attacks.catalog import ATTACKS
from attacks.ground import hold, open_ground


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/attacks", description=__doc__.splitlines()[0])
    parser.add_argument("--attack", action="store_true", help="only the stranger's part of the attack NAME")
    parser.add_argument("words", nargs="*", metavar="NAME", help=", ".join(ATTACKS))
    arguments = parser.parse_args()
    if arguments.attack:
        name, *addresses = arguments.words
        print(json.dumps(asyncio.run(_strike(name, addresses))), flush=True)
        return 0
    held = [asyncio.run(_hold(name)) for name in arguments.words or ATTACKS]
    return 0 if all(held) else 1


async def _hold(name: str) -> bool:
    async with open_ground() as ground:
        verdict = await hold(ground, name, check=ATTACKS[name].check)
    print(verdict, flush=True)
    return not verdict.faults


async def _strike(name: str, addresses: list[str]) -> dict[str, object]:
    attack = ATTACKS[name]
    async with stranger.stranger(addresses, attack.seconds) as one:
        notes = await attack.run(one) or {}
        spent = stranger.spent_seconds() - one.spent_before
        share = spent / (time.monotonic() - one.began)
        return {**notes, "share": round(share, 3), "calls": one.calls, "refused": one.refused}


if __name__ == "__main__":
    sys.exit(main())
