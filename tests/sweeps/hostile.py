"""Eight strangers feed a peer hostile frames and records while it trains and serves for honest users.

    python tests/sweeps/hostile.py [--frames 1000000] [--minutes 30] [--seed 1] [--spare-rights]
        [--json FILE]

So many frames and records, changed recordings and invented ones (`endurance.traffic`), go to one of two real peers within so
many minutes of feeding, in turns with quiet seconds. The strangers' processes together are limited to half a core. Exit 0 if
both peers live, nothing of the strangers is believed, honest losses and tokens are those of an undisturbed run, the fed peer's
memory, files, threads and tasks in the quiet turns do not rise over the second half (by more than 5 % of their mean), and honest
users get at least 0.8 of what they get in the quiet turns. 1 otherwise; if a peer ended, the last items that each identity sent
are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from attacks import honest_training
from attacks.ground import Ground, open_ground
from attacks.processor import hold_to_share, spent_seconds
from sweeps.endurance.feeder import IDENTITIES
from sweeps.endurance.flatness import FLAT, rise
from sweeps.endurance.traffic import identity_of
from sweeps.reports import say, tell

from fusion.cli.local.fleet import LocalPeer
from fusion.runtime.belief.reading import read_belief
from fusion.runtime.job.protocol import STATUS
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId, call

HERE = Path(__file__).parent
SHARE = 0.5  # of a core, for all strangers and their p2pd
HONEST_SHARE = 0.8
FEED_SECONDS, QUIET_SECONDS, SETTLE_SECONDS = 60.0, 6.0, 1.0
FLAT_KINDS = ("memory", "p2pd_memory", "files", "p2pd_files", "threads", "tasks", "blocks")
LEAST_SAMPLES = 24  # in quiet, below which a slope says nothing
FEW = 8.0  # files, threads or tasks more or less are no slope
ANSWER_SECONDS = 90.0  # of the feeder, beyond the time that it was given

Row = dict[str, Any]


@dataclass
class Run:
    """The measurements and faults of a run."""

    began: float = field(default_factory=time.time)
    turns: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    fed: Row = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    last: list[list[str]] = field(default_factory=list)
    feeder_seconds: float = 0.0  # processor time

    def ratio(self, what: str) -> float:
        """The rate that honest users got while strangers fed, over their rate in quiet."""
        rates = []
        for fed in (True, False):
            turns = [turn for turn in self.turns if turn["fed"] is fed]
            seconds = sum(turn["seconds"] for turn in turns)
            rates.append(sum(turn[what] * turn["seconds"] for turn in turns) / seconds if seconds else 0.0)
        return rates[0] / rates[1] if rates[1] else 0.0


class Feeder:
    """The strangers' process, which carries out orders."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def order(self, words: str, seconds: float) -> Any:
        """Send an order and return the reply. TimeoutError or ValueError without one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(words.encode() + b"\n")
        async with asyncio.timeout(seconds + ANSWER_SECONDS):
            return json.loads(await self._process.stdout.readline())

    def spent(self) -> float:
        return spent_seconds(self._process.pid)


@asynccontextmanager
async def strangers(ground: Ground, seed: int, spared: bool) -> AsyncIterator[Feeder]:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            str(HERE / "endurance" / "feeder.py"),
            str(seed),
            ground.peers[0].peer_id,
            str(int(spared)),
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        limit=1 << 24,
    )
    feeder = Feeder(process)
    held: asyncio.Task[None] | None = None
    try:
        await feeder.order(ground.scene.to_json(), 0.0)
        held = asyncio.create_task(hold_to_share(process.pid, SHARE))
        yield feeder
    finally:
        if held is not None:
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def feed(options: argparse.Namespace) -> Row:
    run = Run()
    async with open_ground(2) as ground:
        run.began = time.time()
        hosted = [await _hosted(ground, peer) for peer in ground.peers]
        asking = asyncio.create_task(ground.answers.run())
        sampling = asyncio.create_task(_sample(run, ground))
        try:
            async with strangers(ground, options.seed, options.spare_rights) as feeder:
                await _turns(run, ground, feeder, options)
        finally:
            for task in (asking, sampling):
                task.cancel()
            await asyncio.gather(asking, sampling, return_exceptions=True)
        if all(peer.process.returncode is None for peer in ground.peers):
            run.faults += await _believed(ground, hosted, options.seed)
            run.faults += await asyncio.to_thread(honest_training.faults, ground.committed, ground.truth)
        run.faults += ground.answers.wrong[:3] + [error for _, error in ground.answers.errors][:3]
        for peer in ground.peers:
            run.faults += [f"{peer.name} logged: {line}" for line in ground.log(peer).splitlines()
                           if "Traceback" in line][:1]  # fmt: skip
            if options.logs:
                print(f"--- {peer.name}", ground.log(peer), sep="\n", file=sys.stderr)
    return _report(run, options)


async def _turns(run: Run, ground: Ground, feeder: Feeder, options: argparse.Namespace) -> None:
    total = options.minutes * 60.0
    feeds = max(1, round(total / min(FEED_SECONDS, max(5.0, total / 3))))
    seconds, quiet = total / feeds, min(QUIET_SECONDS, total / feeds)
    await _turn(run, ground, asyncio.sleep(quiet), fed=False)
    for number in range(feeds):
        before = feeder.spent()
        missing = options.frames - run.fed.get("sent", 0)
        order = feeder.order(f"feed {seconds} {missing // (feeds - number)}", seconds)
        try:
            run.fed = await _turn(run, ground, order, fed=True)
        except (TimeoutError, ValueError) as error:
            run.faults.append(f"the strangers' process ended or hung: {error!r}")
            return
        run.feeder_seconds += feeder.spent() - before
        dead = [peer.name for peer in ground.peers if peer.process.returncode is not None]
        if dead:
            run.faults.append(f"ended: {', '.join(dead)}")
            run.last = await feeder.order("last", 0.0)
            return
        await asyncio.sleep(SETTLE_SECONDS)
        await _turn(run, ground, asyncio.sleep(quiet), fed=False)


async def _turn(run: Run, ground: Ground, work: Any, *, fed: bool) -> Any:
    began = time.time()
    result = await work
    ended = time.time()
    row = {
        "fed": fed,
        "at": round(began - run.began, 1),
        "seconds": round(ended - began, 2),
        "steps": round(ground.committed.rate(began, ended), 3),
        "tokens": round(ground.answers.rate(began, ended), 3),
    }
    run.turns.append(row)
    sent = f", {result['sent']} sent" if fed else ""
    last = run.samples[-1] if run.samples else {}
    say(
        f"{'fed  ' if fed else 'quiet'} {row['steps']:6.2f} steps/s {row['tokens']:6.1f} tokens/s{sent} {last}"
    )
    return result


async def _sample(run: Run, ground: Ground) -> None:
    """Sample the fed peer: its own report (`attacks.watched`), and its p2pd from outside."""
    peer = ground.peers[0]
    while True:
        await asyncio.sleep(2.0)
        lines = ground.reports()[0][-1:]
        with contextlib.suppress(psutil.Error):
            daemons = psutil.Process(peer.process.pid).children(recursive=True)
            home = [path for path in peer.home.rglob("*") if path.is_file()]
            run.samples += [
                {
                    "at": round(line["at"] - run.began, 1),
                    "memory": line["rss"],
                    "files": line["files"],
                    **{name: line[name] for name in ("threads", "tasks", "blocks", "frames", "records")},
                    "block": round(line["block"], 3),
                    "p2pd_memory": sum(each.memory_info().rss for each in daemons),
                    "p2pd_files": sum(each.num_fds() for each in daemons),
                    "home_files": len(home),
                }
                for line in lines
            ]


# --- What must not be believed


async def _hosted(ground: Ground, peer: LocalPeer) -> list[Any]:
    frame = await call(ground.user.transport, PeerId(peer.peer_id), STATUS.name, "status")
    return sorted(frame.header["hosted"])


async def _believed(ground: Ground, hosted: Sequence[list[Any]], seed: int) -> list[str]:
    """Everything of the strangers that a peer or a reader of the directory believes."""
    found: list[str] = []
    enemies = {identity_of(number, seed).peer_id for number in range(IDENTITIES)}
    for peer, before in zip(ground.peers, hosted, strict=True):
        try:
            now = await _hosted(ground, peer)
        except SwarmError as error:
            found.append(f"{peer.name} does not say what it hosts: {error}")
            continue
        if now != before:
            found.append(f"{peer.name} hosts {now}, and {before} before")
    for prepared in (ground.training, ground.serving):
        job: JobId = prepared.job
        for stage in range(prepared.manifest.stages):
            owner = await ground.user.leases.owner(job, stage)
            if owner is None or owner.peer not in {peer.peer_id for peer in ground.peers}:
                found.append(
                    f"stage {stage} of {prepared.manifest.name} is said to be {owner and owner.peer}'s"
                )
        belief = await read_belief(ground.user, job)
        record = None if belief is None else belief.record
        if record is None or record.state != "running" or enemies & {record.lead, record.author}:
            found.append(f"of {prepared.manifest.name} is believed: {record}")
    return found


def _report(run: Run, options: argparse.Namespace) -> Row:
    # What strangers have open while they feed is theirs; what stays when they rest is ours.
    resting = [sample for sample in run.samples if any(turn["at"] + SETTLE_SECONDS <= sample["at"]
               <= turn["at"] + turn["seconds"] for turn in run.turns if not turn["fed"])]  # fmt: skip
    rises = {kind: round(rise([(s["at"], float(s[kind])) for s in resting]), 4) for kind in FLAT_KINDS}
    ratios = {what: round(run.ratio(what), 3) for what in ("steps", "tokens")}
    faults = list(run.faults)
    if len(resting) >= LEAST_SAMPLES:
        faults += [
            f"{kind} rises by {value:.1%}"
            for kind, value in rises.items()
            if value > FLAT and value * resting[-1][kind] > FEW
        ]
    faults += [f"{what} at {value} of quiet" for what, value in ratios.items() if value < HONEST_SHARE]
    sent = run.fed.get("sent", 0)
    if sent < 0.95 * options.frames:
        faults.append(f"only {sent} of {options.frames} were sent in time")
    seconds = sum(turn["seconds"] for turn in run.turns if turn["fed"])
    first, last = (run.samples[0], run.samples[-1]) if run.samples else ({}, {})
    verdict = "held" if not faults else "not held: " + "; ".join(faults)
    return {
        "ok": not faults,
        "verdict": f"{sent} frames and records in {seconds / 60:.1f} minutes, seed {options.seed}: {verdict}",
        "faults": faults,
        "broken": run.faults,  # of them, those that no busy machine explains
        "ratios": ratios,
        "rises": rises,
        "fed": run.fed,
        "looked_at": {what: last.get(what, 0) - first.get(what, 0) for what in ("frames", "records")},
        "strangers_cores": round(run.feeder_seconds / seconds, 3) if seconds else 0.0,
        "longest_block_seconds": max((sample["block"] for sample in run.samples), default=0.0),
        "first": first,
        "last": last,
        "last_sent": run.last,
        "turns": run.turns,
        "samples": run.samples,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000, help="frames and records in all")
    parser.add_argument("--minutes", type=float, default=30.0, help="of feeding; the quiet turns come on top")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--spare-rights", action="store_true",
        help="claims, takings and ends speak of jobs that nobody runs: the rest is judged without them",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--logs", action="store_true", help="show what the peers logged")
    options = parser.parse_args(arguments)
    report = asyncio.run(feed(options))
    code = tell(report, options.json, left_out="samples")
    print(report["verdict"])
    return code


if __name__ == "__main__":
    sys.exit(main())
