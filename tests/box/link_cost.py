"""Measures the cost of link measurements for peers in a box, idle and in training, and the time until a cut link is noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from box.link_accuracy import Watch, start_all, true_mbps
from box.network import Box
from box.network_file import read_network
from support.text_job import write_job

from fusion.cli.local.fleet import LocalPeer, open_fleet

NOTICED = 2.0  # times the new rate: from there on the cut counts as noticed
LONGEST_SECONDS = 240.0
CUTS, WHOLE_SECONDS = 3, 25.0  # of a link with traffic, which is whole again in between
FAST = 140.0  # Mbps: of such a link no more is known than that
JOB = {"sequence": 256, "microbatch_size": 8, "microbatches": 4}  # 256 KiB for each microbatch and direction


async def show(path: Path, hosts: int, seconds: float) -> None:
    """Print bytes over `seconds` of idling and of training on the network's last `hosts` hosts, then the seconds until
    a cut to a tenth is noticed, on a link with traffic and on an idle one."""
    with Box(read_network(path)) as box:
        async with open_fleet("fleet-") as fleet:
            watch = Watch()
            peers = await start_all(box, fleet, watch)
            await asyncio.sleep(30.0)
            _bytes("until 30 s after joining", {host: {} for host in box.hosts}, watch.last)
            before = dict(watch.last)
            await asyncio.sleep(seconds)
            _bytes(f"{seconds:.0f} s idle", before, watch.last)
            workers = box.hosts[-hosts:]
            idle = await _cut(box, watch, peers, *_idle_pair(box, watch, peers, workers))
            print(f"cut of an idle link noticed after {idle:.1f} s", flush=True)
            job = write_job(
                fleet.root / "job.toml", "cost", steps=10_000, stages=hosts,
                peers=tuple(peers[host].peer_id for host in workers), live=False, **JOB,
            )  # fmt: skip
            training = asyncio.create_task(
                fleet.run(
                    "train",
                    "train",
                    str(job),
                    "--home",
                    str(fleet.root / "laptop"),
                    "--peer",
                    peers[box.hosts[0]].address,
                    prefix=box.prefix(box.hosts[0]),
                )
            )
            try:
                await _until(lambda: min(_sent(watch, host) for host in workers) > 2e6)
                before = dict(watch.last)
                await asyncio.sleep(seconds)
                _bytes(f"{seconds:.0f} s of training", before, watch.last)
                rates = watch.last[workers[0]]
                print(
                    f"{workers[0]} sends {rates['mbps'].get(peers[workers[1]].peer_id, 0):.1f} Mbps at most"
                )
                before = dict(watch.last)
                for _ in range(CUTS):
                    busy = await _cut(box, watch, peers, workers[0], workers[1])
                    print(f"cut of a link with traffic noticed after {busy:.1f} s", flush=True)
                    await asyncio.sleep(WHOLE_SECONDS)
                _bytes("meanwhile", before, watch.last)
            finally:
                training.cancel()
                await asyncio.gather(training, return_exceptions=True)


def _bytes(what: str, before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> None:
    print(what)
    for host, now in after.items():
        then = before[host]
        probes, sent = (now[key] - then.get(key, 0.0) for key in ("probe_bytes", "sent_bytes"))
        print(f"    {host:12} {probes / 1e3:9.1f} kB of probes of {sent / 1e3:10.1f} kB: {probes / sent:.2%}")
    print(flush=True, end="")


async def _cut(box: Box, watch: Watch, peers: dict[str, LocalPeer], a: str, b: str) -> float:
    """The seconds until the sender notices the cut link, which is then restored."""
    whole = box.link(a, b).rate_mbps
    rate = min(whole, box.host(a).up_mbps, box.host(b).down_mbps) / 10
    began = time.monotonic()
    box.set_link(a, b, rate_mbps=rate)
    try:
        await _until(lambda: watch.last[a]["mbps"].get(peers[b].peer_id, 0.0) < NOTICED * rate)
        return watch.last[a]["at"] - began
    except TimeoutError:
        return float("inf")
    finally:
        box.set_link(a, b, rate_mbps=whole)


def _idle_pair(
    box: Box, watch: Watch, peers: dict[str, LocalPeer], workers: tuple[str, ...]
) -> tuple[str, str]:
    """A link that is measured and that the training after it does not use."""
    return next(
        (a, b)
        for a in box.hosts
        for b in box.hosts
        if a != b
        and not {a, b} <= set(workers)
        and true_mbps(box, a, b) < FAST
        and watch.last[a]["mbps"].get(peers[b].peer_id, 0.0) > 0.7 * true_mbps(box, a, b)
    )


def _sent(watch: Watch, host: str) -> float:
    return float(watch.last[host]["sent_bytes"] - watch.last[host]["probe_bytes"])


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONGEST_SECONDS):
        while not holds():
            await asyncio.sleep(0.1)
