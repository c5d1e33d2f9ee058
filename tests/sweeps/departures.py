"""Departures of peers that do not die: kills the libp2p daemon of each peer in turn, then stops the owner of each stage (Ctrl-C).

    python tests/sweeps/departures.py [--seed 1] [--stages 3] [--standbys 2] [--json FILE]

A peer whose daemon dies must be back with the same identity in the same process; its stages go to standbys. A peer that is
stopped hands its stage over at a step boundary: no step may be discarded or committed again. The weights of every snapshot
must be those of a quiet run. Exit 0 if all of this is true.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

from runs import Row, options_of, report, running
from support.endings import interruptible
from theatre import Theatre, calm
from training import RECOVER_SECONDS, Sweep, say

from fusion.cli.local.chaos_swarm import daemons
from fusion.cli.local.fleet import LocalPeer, Record

BACK_SECONDS = 60.0  # for a peer to be up again after its daemon was killed
GONE_SECONDS = 30.0  # for a peer that hands over to be gone

Events = list[tuple[float, str, Record]]  # when, which peer, what it printed


async def _run(
    name: str,
    act: Callable[[Sweep, Theatre, Events, list[Row]], Awaitable[None]],
    found: Sweep,
    options: argparse.Namespace,
) -> list[Row]:
    rows: list[Row] = []
    events: Events = []
    async with running(found, options, name) as theatre:

        def hear(peer: str, record: Record) -> None:
            events.append((time.time(), peer, record))
            theatre.hear(peer, record)

        theatre.swarm.on_record = hear
        await act(found, theatre, events, rows)
    return rows


async def _kill_daemons(found: Sweep, theatre: Theatre, events: Events, rows: list[Row]) -> None:
    swarm, timeline = theatre.swarm, theatre.timeline
    for peer in swarm.peers:
        await calm(theatre, True)
        if timeline.ended_at is not None:
            found.problem(f"the job ended before the daemon of {peer.name} was killed: longer --run-seconds")
            return
        stage, at = swarm.stage_of(timeline, peer), time.time()
        for process in daemons(peer):
            process.kill()

        def back(peer: LocalPeer = peer, at: float = at) -> float | None:
            ready = (t for t, who, record in events if who == peer.name and record.get("event") == "ready")
            return next((t - at for t in ready if t > at), None)

        await swarm.until(lambda: back() is not None, BACK_SECONDS, f"{peer.name} back after its daemon died")
        if stage is not None:
            await swarm.until(
                lambda at=at: timeline.ended_at is not None or timeline.recovery(at)[1] is not None,  # type: ignore[misc]
                RECOVER_SECONDS, "a new step",
            )  # fmt: skip
        first, new = timeline.recovery(at) if stage is not None else (None, None)
        same = [r["peer_id"] for _, who, r in events if who == peer.name and r.get("event") == "ready"]
        row = {
            "what": "p2pd killed",
            "stage": stage,
            "back_seconds": back(),
            "commit_seconds": first,
            "new_step_seconds": new,
            "stall_seconds": timeline.stall(at, time.time()),
        }
        rows.append(row)
        say(f"{peer.name}: {row}")
        if set(same) != {peer.peer_id} or peer.process.returncode is not None:
            found.problem(f"{peer.name} did not come back as itself in the same process")


async def _leave(found: Sweep, theatre: Theatre, events: Events, rows: list[Row]) -> None:
    swarm, timeline = theatre.swarm, theatre.timeline
    for stage in reversed(range(theatre.job.stages)):
        await calm(theatre, True)
        peer = swarm.owner(timeline, stage)
        if timeline.ended_at is not None or peer is None:
            found.problem(f"nobody to leave stage {stage}: longer --run-seconds")
            return
        before = timeline.last
        at = time.time()
        peer.process.send_signal(signal.SIGINT)
        swarm.fleet.forget(peer)
        async with asyncio.timeout(GONE_SECONDS):
            code = await peer.process.wait()
        gone = time.time() - at
        await swarm.until(
            lambda at=at: timeline.ended_at is not None or timeline.recovery(at)[1] is not None,  # type: ignore[misc]
            RECOVER_SECONDS, "a new step",
        )  # fmt: skip
        last = timeline.last
        row = {
            "what": "Ctrl-C",
            "stage": stage,
            "gone_seconds": gone,
            "exit": code,
            "stall_seconds": timeline.stall(at, at + gone),
            "discarded": last["discarded"] - before["discarded"],
            "replayed": last["replayed"] - before["replayed"],
        }
        rows.append(row)
        say(f"{peer.name}: {row}")
        if row["discarded"] or row["replayed"]:
            found.problem(
                f"stage {stage} left, and {row['discarded']} steps were discarded, {row['replayed']} replayed"
            )
        await swarm.start_one()


def main() -> int:
    options = options_of(__doc__, stages=3, standbys=2, run_seconds=100).parse_args()
    acts = (("daemons", _kill_daemons), ("leaving", _leave))
    return report(options, [(name, partial(_run, name, act)) for name, act in acts])


if __name__ == "__main__":
    sys.exit(interruptible(main))
