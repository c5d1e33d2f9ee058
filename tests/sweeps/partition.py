"""Partitions a swarm for a while in the middle of training, with a whole pipeline on each side: python tests/sweeps/partition.py

Two hosts of a network in a box have two peers each, an owner and a standby. During the partition each side elects owners for
the stages that it lost and goes on training. After it there must be one history with the weights of a quiet run, and the
other side's owners must stand by again. Needs root and Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from box import kernel
from box.network import Box
from box.spec import Host, NetworkSpec
from support.endings import interruptible

from fusion.cli.local import chaos_job
from fusion.cli.local.chaos_swarm import Swarm
from fusion.cli.local.chaos_timeline import Commit, Timeline
from fusion.cli.local.fleet import FleetError, LocalPeer, open_fleet
from fusion.runtime.peer.client import ClientConfig, open_client

SIDES = ("left", "right")
STAGES = 2
TRIAL_STEPS = 80
BEGIN_SECONDS = 120.0
END_SECONDS = 300.0
POOL_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the cut")
    parser.add_argument("--before", type=float, default=10.0, help="training before the cut, in seconds")
    parser.add_argument("--after", type=float, default=40.0, help="training after it, about, in seconds")
    arguments = parser.parse_args()
    reason = kernel.unavailable()
    if reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    # The launcher and the one who asks at the end are on the first side.
    with Box(NetworkSpec(hosts=tuple(Host(name=side) for side in SIDES))) as box, box.entered(SIDES[0]):
        report = asyncio.run(_partition(box, arguments))
    print(json.dumps(report, indent=2))
    return 0 if report["passed"] else 1


@dataclass
class Run:
    timeline: Timeline
    shards: tuple[str, ...] | None = None
    commits: tuple[tuple[str, Commit], ...] = ()  # with the lead's name


async def _partition(box: Box, arguments: argparse.Namespace) -> dict[str, object]:
    async with open_fleet("fusion-partition-") as fleet:
        swarm = Swarm(fleet)
        plan = await fleet.in_thread(chaos_job.prepare, fleet.root / "plan", STAGES)
        sides: dict[str, str] = {}
        peers: list[LocalPeer] = []
        for name, side in zip(("peer-1", "peer-2", "peer-3", "peer-4"), SIDES * 2, strict=True):
            peers.append(await _start(swarm, box, name, side, peers))
            sides[name] = side
        trial = await _train(swarm, plan, "trial", TRIAL_STEPS, peers)
        rate = trial.timeline.rate(10)
        steps = int(rate * (arguments.before + arguments.seconds + arguments.after))
        quiet = await _train(swarm, plan, "quiet", steps, peers)
        cut: dict[str, float] = {}

        async def cut_and_heal() -> None:
            await asyncio.sleep(arguments.before)
            cut["at"] = time.time()
            await asyncio.to_thread(box.set_pair, *SIDES, loss=1.0)
            await asyncio.sleep(arguments.seconds)
            await asyncio.to_thread(box.set_pair, *SIDES, loss=0.0)
            cut["healed"] = time.time()

        try:
            run = await _train(swarm, plan, "cut", steps, peers, cut_and_heal)
            error = ""
        except FleetError as failure:
            return {"passed": False, "error": str(failure), "words": _words(swarm)}
        pool = await _pool(swarm, run.timeline.job, peers)
        per_side = [
            len({c.step for who, c in run.commits if sides[who] == side and cut["at"] < c.at < cut["healed"]})
            for side in SIDES
        ]
        leads = {who for who, c in run.commits if c.at > cut["healed"] + 15.0}
        merged = _merged(run, cut["healed"])
        exact = quiet.shards is not None and quiet.shards == run.shards
        ledgers = [r.timeline.last.get("ledger") for r in (quiet, run)]
        return {
            "passed": exact
            and ledgers[0] == ledgers[1]
            and min(per_side) > 0
            and len(leads) == 1
            and not pool["missing"],
            "exact": exact,
            "ledger_equal": ledgers[0] == ledgers[1],
            "ledger": ledgers[1],
            "samples": run.timeline.last.get("samples"),
            "steps": steps,
            "steps_per_second": round(rate, 2),
            "steps_committed_on_each_side_while_cut": per_side,
            "leads_15_s_after": sorted(leads),
            "one_history_after_seconds": merged,
            "pool": pool,
            "error": error,
            "words": {} if exact else _words(swarm),
        }


async def _start(swarm: Swarm, box: Box, name: str, side: str, others: list[LocalPeer]) -> LocalPeer:
    def hear(record: dict[str, object]) -> None:
        timeline = swarm.timelines.get(str(record.get("job")))
        if timeline is None:
            return
        before = len(timeline.commits)
        timeline.see(name, record)
        for commit in timeline.commits[before:]:
            COMMITS.setdefault(timeline.job, []).append((name, commit))
        swarm._changed.set()

    return await swarm.fleet.start_peer(
        name, "--tell-steps",
        bootstrap=[peer.address for peer in others],
        listen=box.listen(side),
        prefix=box.prefix(side),
        on_record=hear,
    )  # fmt: skip


COMMITS: dict[str, list[tuple[str, Commit]]] = {}


async def _train(
    swarm: Swarm, plan: chaos_job.ChaosJob, name: str, steps: int, peers: list[LocalPeer], meanwhile=None
) -> Run:  # type: ignore[no-untyped-def]
    job = chaos_job.another(plan, name, steps, [peer.peer_id for peer in peers[:STAGES]])
    timeline = swarm.follow(job.prepared.job)
    async with chaos_job.launched(job, swarm.fleet.root / f"launcher-{name}", peers[0].address) as holding:
        await swarm.until(lambda: bool(timeline.commits), BEGIN_SECONDS, f"the first step of the {name} run")
        other = asyncio.create_task(meanwhile()) if meanwhile is not None else None
        await swarm.until(lambda: timeline.ended_at is not None, END_SECONDS, f"the end of the {name} run")
        if other is not None:
            await other
        if not holding.done() and meanwhile is None:
            await asyncio.wait([holding], timeout=60.0)
    if timeline.last.get("state") != "done":
        raise FleetError(f"the {name} run {timeline.last.get('state')}: {timeline.last.get('error')}")
    shards = chaos_job.shards(str(timeline.last["snapshot"]), timeline.job, STAGES, swarm.homes)
    return Run(timeline, shards, tuple(COMMITS.get(timeline.job, ())))


def _merged(run: Run, healed: float) -> float | None:
    """The seconds from the end of the partition to the last commit of a lead other than the one that ended the job."""
    after = [(who, c) for who, c in run.commits if c.at > healed]
    if not after:
        return None
    final = after[-1][0]
    return round(max([0.0, *(c.at - healed for who, c in after if who != final)]), 2)


async def _pool(swarm: Swarm, job: str, peers: list[LocalPeer]) -> dict[str, object]:
    """Which peers know each other again once the job has ended."""
    deadline = time.monotonic() + POOL_SECONDS
    async with open_client(ClientConfig(home=swarm.fleet.root / "asker", peer=peers[0].address)) as context:
        while True:
            listed = {record.peer for record in await context.directory.peers()}
            missing = [peer.name for peer in peers if peer.peer_id not in listed]
            if not missing or time.monotonic() > deadline:
                return {"missing": missing, "listed": len(listed)}
            await asyncio.sleep(1.0)


def _words(swarm: Swarm) -> dict[str, str]:
    return {log.stem: swarm.fleet.last_lines(log.stem, 12) for log in swarm.fleet.root.glob("peer-*.log")}


if __name__ == "__main__":
    sys.exit(interruptible(main))
