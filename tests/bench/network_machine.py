"""The machine's effect on a network in a box, measured before any job: the share of a link's rate that frames get, and their
cost on the cores that the peers and the box share."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from statistics import median

import psutil
from box.network import Box

from fusion.dag.placement.machine import MAX_PACKET, packet_bytes
from fusion.dag.placement.machine import Machine as PlacementMachine

WORK = (sys.executable, str(Path(__file__).with_name("core_work.py")))
FLOW = (sys.executable, str(Path(__file__).with_name("frame_flow.py")))
# Bytes of a payload, payloads. A large one is about what crosses a cut of the models here.
SMALL, LARGE = (1 << 10, 3000), (3 << 17, 200)
QUIET = 1.25  # times the fastest, up to which this machine counts as ours alone
WAIT_SECONDS = 60.0  # for that before a job
PAUSE_SECONDS = 1.0
HASHED_BYTES = 100_000_000
SECONDS = 6.0  # for which the rate of a link is measured
WORK_SECONDS, WORK_TURNS = 2.0, 3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`goodput`: the share of the slowest link's or line's rate that payloads get; `cores`: how many times as much all cores
    compute together as one alone; `idle_cores`: that idle peers keep busy. The others as in `PlacementMachine`."""

    goodput: float = 1.0
    cores: float = math.inf
    message_seconds: float = 0.0
    byte_seconds: float = 0.0
    packet_seconds: float = 0.0
    idle_cores: float = 0.0

    @property
    def shared(self) -> PlacementMachine:
        return PlacementMachine(
            cores=self.cores - self.idle_cores,
            message_seconds=self.message_seconds,
            byte_seconds=self.byte_seconds,
            packet_seconds=self.packet_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class Used:
    """The processor time of a job's step, and what it sent over links."""

    cpu_seconds: float  # of all cores together
    step_seconds: float
    computing_seconds: float  # of its stages together, by themselves
    messages: int
    bytes: float
    packets: float


def carrying(machine: Machine, used: Used) -> Machine:
    """The machine with the cost of messages as measured in a job, where they pass through a peer; packets cost the same."""
    busy = min(1.0, used.cpu_seconds / (cores() * used.step_seconds))
    slowed = 1.0 + max(0.0, cores() / machine.cores - 1.0) * busy  # by each other
    left = used.cpu_seconds / slowed - used.computing_seconds - machine.idle_cores * used.step_seconds
    left -= used.packets * machine.packet_seconds
    bare = used.messages * machine.message_seconds + used.bytes * machine.byte_seconds
    times = max(1.0, left / bare) if bare > 0 else 1.0
    return replace(
        machine, message_seconds=times * machine.message_seconds, byte_seconds=times * machine.byte_seconds
    )


class Flow:
    """Exchanges frames between two hosts of a box, both ways."""

    def __init__(self, box: Box, server: subprocess.Popen[str], client: subprocess.Popen[str]) -> None:
        self._client = client
        self._pids = [box.router_pid, server.pid, client.pid]

    def exchange(self, size: int, count: int) -> tuple[float, float]:
        """The time and the processor time (of all cores together) of `count` payloads both ways."""
        assert self._client.stdin is not None and self._client.stdout is not None
        before = cpu_seconds(self._pids)
        self._client.stdin.write(f"{size} {count}\n")
        self._client.stdin.flush()
        seconds = float(self._client.stdout.readline())
        return seconds, cpu_seconds(self._pids) - before


@contextmanager
def flow(box: Box, a: str, b: str) -> Iterator[Flow]:
    pipe = subprocess.PIPE
    with box.run(b, [*FLOW, "serve", box.address(b)], stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        to = server.stdout.readline().strip()
        with box.run(
            a, [*FLOW, "exchange", box.address(a), to], stdin=pipe, stdout=pipe, text=True
        ) as client:
            assert client.stdin is not None and client.stdout is not None
            assert client.stdout.readline().strip() == "ready"
            yield Flow(box, server, client)
            client.stdin.close()
            client.wait()
        server.stdin.close()
        server.wait()


def frame_goodput(box: Box, pairs: Sequence[tuple[str, str]], seconds_of: Callable[[float], float]) -> float:
    """The share of the rate of these pairs' links and lines that payloads get, sent both ways between all pairs at once.
    `seconds_of(bytes)`: the time of so many bytes each way of each pair without losses."""
    count = max(24, round(SECONDS / seconds_of(LARGE[0])))
    with ExitStack() as opened, ThreadPoolExecutor(len(pairs)) as pool:
        flows = [opened.enter_context(flow(box, *pair)) for pair in pairs]

        def exchanged(payloads: int) -> float:
            """The seconds of the slowest pair."""
            return max(pool.map(lambda one: one.exchange(LARGE[0], payloads)[0], flows))

        exchanged(24)  # what a connection learns first
        return min(1.0, seconds_of(LARGE[0] * count) / exchanged(count))


def frame_cost(box: Box, a: str, b: str, rates: Sequence[float]) -> tuple[float, float, float]:
    """Seconds of a core for each message, each byte and each packet, of both ends and the box. `rates`: those of the link
    as it is, there and back; what a packet costs is what the link's cuts add to a payload."""
    (size, count), (large, fewer) = SMALL, LARGE
    few = max(8, round(SECONDS * min(rates) / large))
    with flow(box, a, b) as between:

        def cost(size: int, count: int) -> float:
            """The cost of one message."""
            return between.exchange(size, count)[1] / (2 * count)

        between.exchange(large, few)  # what a connection learns first
        cut = cost(large, few)
        with unlimited(box, (a, b)):
            between.exchange(size, count)
            small, each = cost(size, count), cost(large, fewer)
    packets, least = large * sum(1 / packet_bytes(rate) for rate in rates) / len(rates), large / MAX_PACKET
    packet = max(0.0, cut - each) / (packets - least) if packets > least else 0.0
    byte = max(0.0, (each - packet * least - small) / (large - size))
    return max(0.0, small - byte * size), byte, packet


@contextmanager
def unlimited(box: Box, hosts: Sequence[str]) -> Iterator[None]:
    """Remove the limits of the box between these hosts during the block, so that only computing takes time."""
    pairs = list(permutations(hosts, 2))
    links, lines = {pair: box.link(*pair) for pair in pairs}, {name: box.host(name) for name in hosts}
    try:
        for pair in pairs:
            box.set_link(*pair, rate_mbps=math.inf, delay_ms=0.0)
        for name in hosts:
            box.set_host(name, up_mbps=math.inf, down_mbps=math.inf)
        yield
    finally:
        for pair, link in links.items():
            box.set_link(*pair, rate_mbps=link.rate_mbps, delay_ms=link.delay_ms)
        for name, line in lines.items():
            box.set_host(name, up_mbps=line.up_mbps, down_mbps=line.down_mbps)


def useful_cores() -> float:
    """The speed of all cores together over that of one alone; they may share caches and memory."""

    def done(workers: int) -> float:
        running = [
            subprocess.Popen([*WORK, str(WORK_SECONDS)], stdout=subprocess.PIPE, text=True)
            for _ in range(workers)
        ]
        return sum(float(each.communicate()[0]) for each in running)

    return median(done(cores()) / done(1) for _ in range(WORK_TURNS))


def idle_cores(pids: list[int], seconds: float = 5.0) -> float:
    """How many cores these idle processes and their descendants keep busy."""
    before = cpu_seconds(pids)
    time.sleep(seconds)
    return (cpu_seconds(pids) - before) / seconds


def cores() -> int:
    return os.cpu_count() or 1


def cpu_seconds(pids: list[int]) -> float:
    """The processor time that these processes and their descendants have used so far."""
    total = 0.0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found = [process, *process.children(recursive=True)]
        except psutil.Error:
            continue
        for each in found:
            try:
                times = each.cpu_times()
            except psutil.Error:
                continue
            total += float(times.user + times.system)
    return total


class Pace:
    """The machine's speed now over its fastest so far: other users slow it down for minutes."""

    def __init__(self) -> None:
        self._least = math.inf

    def slowness(self) -> float:
        """Measure the speed with about a tenth of a second of work on each core; 1 is the fastest so far."""
        with ThreadPoolExecutor(cores()) as pool:
            took = max(pool.map(lambda _: _hash_seconds(), range(cores())))
        self._least = min(self._least, took)
        return took / self._least

    def quiet_within(self, seconds: float) -> bool:
        """Whether the machine is at full speed, or becomes so within that time."""
        until = time.monotonic() + seconds
        while self.slowness() > QUIET:
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE_SECONDS)
        return True


def _hash_seconds() -> float:
    began = time.perf_counter()
    hashlib.sha256(bytes(HASHED_BYTES)).digest()
    return time.perf_counter() - began
