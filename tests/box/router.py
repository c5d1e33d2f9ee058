"""The router of a box: a process that holds a TUN device in each host's namespace and carries packets between them.

    python -m box.router

Its standard input carries a JSON object a line: first the network, then orders, each answered by a line. It ends when
that input ends or when the owner does, however it went; before it ends it ends what still lives in the namespaces,
and with it they are gone.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from random import Random
from threading import Thread
from typing import Any

from box import kernel, packet
from box.lines import Line, Path
from box.spec import Host, Link

READ_BYTES = packet.IP + 65535
READS = 32  # from a device before the others have their turn
BURST_SECONDS = 0.001  # a super-packet that takes longer on its slowest line is cut
MBIT_PER_BYTE = 8e-6
STOPPED_GRACE_SECONDS = 2.0
DEAD_GRACE_SECONDS = 30.0  # a fleet's janitor, which may live here, takes less to clear up
ENDING_POLL_SECONDS = 0.05

Record = dict[str, Any]


@dataclass(frozen=True)
class Port:
    """A host's end at the router."""

    namespace: int
    tun: int
    inode: int


class Router:
    """The router. Every ordered pair has a path, without limits until `set_link`. Raises OSError or CalledProcessError if the
    system does not allow the namespaces and devices."""

    def __init__(self, hosts: list[Host], addresses: list[str], prefix: int, seed: int) -> None:
        home = kernel.namespace()
        self.ports: list[Port] = []
        for address in addresses:
            namespace, tun = kernel.make_host(address, prefix)
            self.ports.append(Port(namespace, tun, os.fstat(namespace).st_ino))
        kernel.enter(home)
        os.close(home)
        self._number = {host.name: i for i, host in enumerate(hosts)}
        self._targets = {bytes(map(int, address.split("."))): i for i, address in enumerate(addresses)}
        self._ups = [Line(0.0, 0.0) for _ in hosts]
        self._downs = [Line(0.0, 0.0) for _ in hosts]
        self._paths = {
            (a, b): Path(self._ups[a], Line(0.0, 0.0), self._downs[b], 0.0, 0.0, Random(f"{seed}/{a}/{b}"))
            for a, b in itertools.permutations(range(len(hosts)), 2)
        }
        for host in hosts:
            self.set_host(host)
        # Due at, order, first byte there at (None: through the downlink), path, target, packet, its wire bytes.
        self._under_way: list[tuple[float, int, float | None, Path, int, bytes, int]] = []
        self._order = itertools.count()

    def set_host(self, host: Host) -> None:
        """Change a host's two shared lines; packets that already wait leave as before."""
        i = self._number[host.name]
        for line, rate in ((self._ups[i], host.up_mbps), (self._downs[i], host.down_mbps)):
            line.seconds_per_byte, line.queue_seconds = MBIT_PER_BYTE / rate, host.queue_ms / 1e3

    def set_link(self, source: str, target: str, link: Link) -> None:
        path = self._paths[self._number[source], self._number[target]]
        path.link.seconds_per_byte, path.link.queue_seconds = (
            MBIT_PER_BYTE / link.rate_mbps,
            link.queue_ms / 1e3,
        )
        path.delay, path.loss = link.delay_ms / 1e3, link.loss

    def carried(self, source: str, target: str) -> Record:
        path = self._paths[self._number[source], self._number[target]]
        return {"bytes": path.carried_bytes, "packets": path.carried_packets, "dropped": path.dropped_packets}

    def step(self, others: list[int], longest: float | None) -> list[int]:
        """Wait for a packet, a packet that is due, or one of the other descriptors. Returns the ready ones of these."""
        timeout = longest
        if self._under_way:
            due = max(0.0, self._under_way[0][0] - time.monotonic())
            timeout = due if longest is None else min(due, longest)
        ready = select.select([*(port.tun for port in self.ports), *others], [], [], timeout)[0]
        for source, port in enumerate(self.ports):
            if port.tun in ready:
                self._take(source, port.tun)
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            self._bring(*heapq.heappop(self._under_way)[2:], now)
        return [other for other in others if other in ready]

    def _take(self, source: int, tun: int) -> None:
        for _ in range(READS):
            try:
                taken = os.read(tun, READ_BYTES)
            except BlockingIOError:
                return
            address = packet.target(taken)
            target = self._targets.get(address) if address is not None else None
            if target is not None and target != source:
                self._send(self._paths[source, target], target, taken)

    def _send(self, path: Path, target: int, taken: bytes) -> None:
        """Send a packet: whole, or in parts if the line is slow or a segment is lost."""
        now = time.monotonic()
        count = packet.segments(taken)
        at_once = max(1.0, path.burst_bytes(BURST_SECONDS) * count / packet.wire_bytes(taken))
        begin = 0
        for i in range(count):
            lost = path.lost()
            end = i if lost else i + 1
            if end > begin and (lost or end - begin + 1 > at_once or end == count):
                whole = end - begin == count
                self._depart(path, target, taken if whole else packet.part(taken, begin, end), now)
                begin = end
            if lost:
                path.dropped_packets += 1
                begin = i + 1

    def _depart(self, path: Path, target: int, piece: bytes, now: float) -> None:
        size = packet.wire_bytes(piece)
        times = path.depart(size, now)
        if times is None:
            path.dropped_packets += packet.segments(piece)
        else:
            first, last = times
            heapq.heappush(self._under_way, (last, next(self._order), first, path, target, piece, size))

    def _bring(
        self, first: float | None, path: Path, target: int, piece: bytes, size: int, now: float
    ) -> None:
        if first is not None:
            due = path.arrive(size, first, now)
            if due is None:
                path.dropped_packets += packet.segments(piece)
                return
            if due > now:
                heapq.heappush(self._under_way, (due, next(self._order), None, path, target, piece, size))
                return
        try:
            os.write(self.ports[target].tun, piece)
        except OSError:  # the device is down, or the kernel has no memory for it
            path.dropped_packets += packet.segments(piece)
            return
        path.carried_bytes += size
        path.carried_packets += packet.segments(piece)


def obey(router: Router, order: Record) -> Record:
    """Carry out an order, and return the reply."""
    match order:
        case {"link": [source, target], "is": values}:
            router.set_link(source, target, Link(**values))
        case {"host": values}:
            router.set_host(Host(**values))
        case {"carried": [source, target]}:
            return router.carried(source, target)
        case _:
            return {"error": f"no such order: {order}"}
    return {}


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    orders = FileIO(sys.stdin.fileno())  # unbuffered: what has been sent and not read must wake `select`
    asked = json.loads(orders.readline())
    try:
        owner = os.pidfd_open(asked["owner"])
        hosts = [Host(**host) for host in asked["hosts"]]
        router = Router(hosts, asked["addresses"], asked["prefix"], asked["seed"])
    except (OSError, subprocess.CalledProcessError) as error:
        answer({"error": f"no network in a box can be made here: {error}"})
        return 1
    for source, target, link in asked["links"]:
        router.set_link(source, target, Link(**link))
    answer({"namespaces": [port.namespace for port in router.ports]})
    with suppress(PermissionError):  # else packets leave late whenever the machine is busy
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    gc.disable()  # nothing here makes cycles
    serve(router, orders, owner, asked["owner"])
    return 0


def serve(router: Router, orders: FileIO, owner: int, owner_pid: int) -> None:
    """Carry packets and orders, until the owner has ended and no process is left in the namespaces. `owner` is a descriptor that
    is readable once the owner has ended."""
    heard = b""
    while True:
        ready = router.step([orders.fileno(), owner], None)
        if owner in ready:
            grace = DEAD_GRACE_SECONDS
            break
        if orders.fileno() in ready:
            chunk = orders.read(1 << 16)
            if not chunk:
                grace = STOPPED_GRACE_SECONDS
                break
            *lines, heard = (heard + chunk).split(b"\n")
            for line in lines:
                answer(obey(router, json.loads(line)))
    inodes = [port.inode for port in router.ports]
    ending = Thread(target=kernel.end, args=(inodes, {os.getpid(), owner_pid}, grace))
    ending.start()
    while ending.is_alive():  # who is asked to end may have something to hand over
        router.step([], ENDING_POLL_SECONDS)
    ending.join()


def answer(record: Record) -> None:
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(record).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
