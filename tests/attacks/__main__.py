"""Attacks on real peers that train a job and serve a model, with a verdict for each.

    python tests/attacks [NAME...] [--together] [--plane jax] [--json FILE] [--logs]     all, or those named; a table
    python tests/attacks --list                      their names and descriptions

Exit 0: all were withstood. 1: one was not (see `attacks.verdict.Verdict.faults`). The attacker is a process of its own, which
is suspended whenever it has used more than a quarter of a core.

To add an attack, write an asynchronous function that gets an `attacks.stranger.Stranger` (an identity with p2pd, `peers`,
`scene` with the honest jobs, `call` and `everywhere` for hivemind's requests, `transport.open` for streams, `sealed` for
records, `others` for more identities) and goes on while `time_left`; name it in the ATTACKS of its
file in `scripts`:

    async def forged_end(one: Stranger) -> dict[str, Any]:
        \"""Publish records that the honest job was stopped.\"""
        sent = 0
        while one.time_left:
            record = job_record(one.identity, job=one.scene.training, state="stopped", term=9 + sent)
            await one.everywhere("store", store_request([one.sealed(record, 100.0)]))
            sent += 1
            await asyncio.sleep(0.5)
        return {"sent": sent}

    async def still_runs(ground: Ground, verdict: Verdict) -> None:
        record = await ground.reader.job(ground.training.job)
        if record is None or record.state != "running":
            verdict.notes["fault: record"] = f"readers believe {record}"

    ATTACKS = {"forged_end": Attack(forged_end, seconds=10.0, check=still_runs)}

Every attack is also checked for this: the job goes on with the losses of an undisturbed run, and every answer has the right tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from attacks import stranger
from attacks.catalog import ATTACKS
from attacks.ground import open_ground
from attacks.hold import hold
from attacks.stranger import Scene
from attacks.table import show
from attacks.verdict import Verdict

from fusion.runtime.peer.plane_choice import JAX, TORCH


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/attacks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attack", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="list the attacks and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts")
    parser.add_argument(
        "--together",
        action="store_true",
        help="use the same peers for several attacks: faster, but each meets what earlier ones left",
    )
    parser.add_argument("--plane", choices=(TORCH, JAX), default=TORCH, help="the peers' execution plane")
    parser.add_argument("--logs", action="store_true", help="print the peers' logs")
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks to run; all by default")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(ATTACKS))
    if unknown:
        parser.error(f"no attack is called {unknown[0]!r} (attacks: {', '.join(ATTACKS)})")
    if options.list:
        for name, attack in ATTACKS.items():
            print(f"{name:18} {attack.seconds:3.0f} s  {' '.join((attack.run.__doc__ or '').split())}")
        return 0
    if options.attack:
        asyncio.run(_strike(options.names[0], options.seconds))
        return 0
    names = options.names or list(ATTACKS)
    shared = [
        name for name in names if options.together and not (ATTACKS[name].alone or ATTACKS[name].closed)
    ]
    rounds = [shared] if shared else []
    rounds += [[name] for name in names if name not in shared]
    verdicts = [verdict for each in rounds for verdict in asyncio.run(_held(each, options))]
    show(verdicts)
    if options.json:
        options.json.write_text(json.dumps([verdict.to_json() for verdict in verdicts], indent=1) + "\n")
    return 1 if any(verdict.faults for verdict in verdicts) else 0


async def _held(names: Sequence[str], options: argparse.Namespace) -> list[Verdict]:
    """Run attacks one after the other on the same peers."""
    verdicts = []
    closed = any(ATTACKS[name].closed for name in names)
    async with open_ground(closed=closed, plane=options.plane) as ground:
        try:
            for name in names:
                verdict, _ = await hold(ground, name, ATTACKS[name])
                print(json.dumps(verdict.to_json()), file=sys.stderr, flush=True)
                verdicts.append(verdict)
        finally:
            for peer in ground.peers if options.logs else ():
                print(f"--- {peer.name}", ground.log(peer), sep="\n", file=sys.stderr)
    return verdicts


async def _strike(name: str, seconds: float) -> None:
    """The attacker's process: read a scene, print `ready`, wait for a line, attack, and print the notes."""
    attack = ATTACKS[name]
    scene = Scene.from_json(await asyncio.to_thread(sys.stdin.readline))
    async with stranger.stranger(scene, seconds, attack.identities) as one:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        one.begin()
        notes = await attack.run(one) or {}
        print(json.dumps({**notes, "calls": one.calls, "refused": one.refused}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
