"""What a peer that has no work costs: the share of one core that it and its p2pd take, in swarms of several sizes; and how
long `fusion-peer status` takes there, one after another through the same peer.

    python tests/bench/idle.py [--sizes 2,8,24] [--warm 90] [--seconds 60] [--asks 12] [--json]

Real processes on loopback, one swarm after the other. Counted is processor time, not the clock's: whoever else uses the
machine disturbs it little. Before that links are probed for `--warm` seconds, which is over once they are known.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass

import psutil
from baseline import say

from fusion.cli.local.fleet import Fleet, open_fleet

STARTING_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class Idle:
    """The cost of an idle swarm of `size` peers. A share is the part of one core that a peer takes, on average."""

    size: int
    python_share: float
    p2pd_share: float
    least_share: float  # of the peer that takes least, with its p2pd
    most_share: float
    status_seconds: tuple[float, ...]  # of one command after another, from its start to its end

    @property
    def share(self) -> float:
        return self.python_share + self.p2pd_share


async def measure_idle(size: int, warm_seconds: float, seconds: float, asks: int) -> Idle:
    async with open_fleet("fusion-bench-") as fleet:
        await _fill(fleet, size)
        say(f"{size} peers are up")
        await asyncio.sleep(warm_seconds)
        loop = asyncio.get_running_loop()
        before, began = _spent(fleet), loop.time()
        await asyncio.sleep(seconds)
        after, took = _spent(fleet), loop.time() - began
        status_seconds = [await _ask(fleet, size) for _ in range(asks)]
    python, p2pd = (
        [(now[part] - then[part]) / took for then, now in zip(before, after, strict=True)] for part in (0, 1)
    )
    both = [ours + theirs for ours, theirs in zip(python, p2pd, strict=True)]
    return Idle(
        size=size,
        python_share=statistics.mean(python),
        p2pd_share=statistics.mean(p2pd),
        least_share=min(both),
        most_share=max(both),
        status_seconds=tuple(status_seconds),
    )


async def _ask(fleet: Fleet, size: int) -> float:
    began = time.perf_counter()
    told = await fleet.run("status", "status", "--home", str(fleet.peers[-1].home))
    took = time.perf_counter() - began
    assert len(told[-1]["peers"]) == size, "status leaves a peer out"
    return took


async def _fill(fleet: Fleet, size: int) -> None:
    first = await fleet.start_peer("bootstrap", "--memory", "256MiB")
    turn = asyncio.Semaphore(STARTING_AT_ONCE)

    async def start(number: int) -> None:
        async with turn:
            await fleet.start_peer(f"peer-{number}", "--memory", "256MiB", bootstrap=[first.address])

    await asyncio.gather(*(start(number) for number in range(1, size)))


def _spent(fleet: Fleet) -> list[tuple[float, float]]:
    """The processor time of each peer so far: its own, and its p2pd's."""
    spent = []
    for peer in fleet.peers:
        process = psutil.Process(peer.process.pid)
        below = [child for child in process.children(recursive=True) if child.name() == "p2pd"]
        spent.append((_seconds(process), sum(map(_seconds, below))))
    return spent


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def table(found: list[Idle]) -> str:
    """The table, in percent of one core and in seconds."""
    rows = [("peers", "Python", "p2pd", "together", "least .. most", "status, p50 .. most")]
    for idle in found:
        parts = [idle.python_share, idle.p2pd_share, idle.share]
        spread = f"{100 * idle.least_share:.2f} .. {100 * idle.most_share:.2f}"
        asked = idle.status_seconds
        status = f"{statistics.median(asked):.2f} .. {max(asked):.2f}" if asked else "-"
        rows.append((str(idle.size), *(f"{100 * part:.2f} %" for part in parts), spread, status))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)


async def main(sizes: list[int], warm_seconds: float, seconds: float, asks: int) -> list[Idle]:
    found = []
    for size in sizes:
        found.append(await measure_idle(size, warm_seconds, seconds, asks))
        say(f"{size} peers: {100 * found[-1].share:.2f} % of a core each")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="2,8,24", help="a comma between sizes of swarms")
    parser.add_argument("--warm", type=float, default=90.0, help="seconds before the measurement")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of it")
    parser.add_argument("--asks", type=int, default=12, help="status commands in each")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    found = asyncio.run(main(sizes, options.warm, options.seconds, options.asks))
    print(json.dumps([asdict(idle) for idle in found]) if options.json else table(found))
