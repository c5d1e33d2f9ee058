"""A network in a box: hosts that are network namespaces of this machine, joined by a router with slow links.

    with Box(read_network(path)) as box:
        box.run("home-1", ["ping", box.address("home-2")])

Everything in it ends with the block, or with this process, however that ends: processes, devices, namespaces. There is
nothing of it on disk and no name of it in the system.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Self

from box import kernel
from box.spec import Host, Link, NetworkSpec

TESTS = Path(__file__).parents[1]
NETWORK = ipaddress.ip_network("10.77.0.0/16")  # exists inside the namespaces only
STOP_SECONDS = 10.0


class BoxError(RuntimeError):
    """The box could not be made, or its router has ended; one line."""


@dataclass(frozen=True)
class Carried:
    """The traffic that a path has delivered since the box was made, IP headers included, and dropped or lost."""

    bytes: int
    packets: int
    dropped: int


class Box:
    """A network in a box; use `with`. Entering raises BoxError if the system does not allow it (see `kernel.unavailable`)."""

    def __init__(self, spec: NetworkSpec) -> None:
        self._hosts = {host.name: host for host in spec.hosts}
        self._links = {pair: spec.link(*pair) for pair in permutations(self._hosts, 2)}
        self._addresses = dict(zip(self._hosts, map(str, NETWORK.hosts()), strict=False))
        self._seed = spec.seed
        self._namespaces: dict[str, int] = {}  # descriptors of the router's
        self._inodes: list[int] = []
        self._order = threading.Lock()

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    @property
    def router_pid(self) -> int:
        return self._router.pid

    def __enter__(self) -> Self:
        reason = kernel.unavailable()
        if reason:
            raise BoxError(reason)
        kernel.sweep()
        self._mark = kernel.mark(os.getpid())
        self._router = subprocess.Popen(
            [sys.executable, "-m", "box.router"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What is for the owner's terminal or group is not for the router: it clears up after them.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        try:
            answer = self._ask(
                {
                    "owner": os.getpid(),
                    "hosts": [asdict(host) for host in self._hosts.values()],
                    "addresses": list(self._addresses.values()),
                    "prefix": NETWORK.prefixlen,
                    "links": [[*pair, asdict(link)] for pair, link in self._links.items()],
                    "seed": self._seed,
                }
            )
        except BaseException:
            self.close()
            raise
        self._namespaces = dict(zip(self._hosts, answer["namespaces"], strict=True))
        self._inodes = [os.stat(self._namespace(host)).st_ino for host in self._hosts]
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes in the box, and the box. Further calls do nothing."""
        assert self._router.stdin is not None and self._router.stdout is not None
        self._router.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._router.wait(STOP_SECONDS)
        self._router.stdout.close()
        self._router.kill()
        self._router.wait()
        kernel.end(self._inodes, {os.getpid()}, grace_seconds=0.0)  # where the router was killed

    # --- what runs in it

    def address(self, host: str) -> str:
        """The host's IPv4 address in the box."""
        return self._addresses[host]

    def listen(self, host: str) -> str:
        """A multiaddr to listen at there, on any free port."""
        return f"/ip4/{self._addresses[host]}/tcp/0"

    def prefix(self, host: str) -> tuple[str, ...]:
        """The prefix with which a command runs on that host."""
        marked = f"{kernel.MARK}={self._mark}"
        return ("env", marked, "nsenter", f"--net={self._namespace(host)}", "--")

    def run(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on that host; `options` are Popen's."""
        return subprocess.Popen([*self.prefix(host), *argv], **options)

    @contextmanager
    def entered(self, host: str) -> Iterator[None]:
        """Put the calling thread, its new sockets and the processes that it starts on that host during the block."""
        back, there = kernel.namespace(), os.open(self._namespace(host), os.O_RDONLY | os.O_CLOEXEC)
        try:
            kernel.enter(there)
            try:
                yield
            finally:
                kernel.enter(back)
        finally:
            os.close(there)
            os.close(back)

    # --- the network

    def set_link(self, source: str, target: str, **changes: float) -> None:
        """Change one direction of a pair from now on: rate_mbps, delay_ms, queue_ms, loss. Packets in flight arrive as before,
        and no later one overtakes them."""
        link = replace(self._links[source, target], **changes)
        self._ask({"link": [source, target], "is": asdict(link)})
        self._links[source, target] = link

    def set_pair(self, a: str, b: str, **changes: float) -> None:
        """Change both directions of a pair. loss=1 cuts it silently: neither end is notified."""
        self.set_link(a, b, **changes)
        self.set_link(b, a, **changes)

    def set_host(self, name: str, **changes: Any) -> None:
        """Change the lines that all pairs of a host share: up_mbps, down_mbps, queue_ms."""
        host = replace(self._hosts[name], **changes)
        self._ask({"host": asdict(host)})
        self._hosts[name] = host

    def link(self, source: str, target: str) -> Link:
        return self._links[source, target]

    def host(self, name: str) -> Host:
        return self._hosts[name]

    def carried(self, source: str, target: str) -> Carried:
        return Carried(**self._ask({"carried": [source, target]}))

    # --- the router

    def _namespace(self, host: str) -> str:
        return f"/proc/{self._router.pid}/fd/{self._namespaces[host]}"

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._router.stdin is not None and self._router.stdout is not None
        with self._order:
            if self._router.stdin.closed:
                raise BoxError("the box is closed")
            try:
                self._router.stdin.write(json.dumps(order).encode() + b"\n")
                self._router.stdin.flush()
                line = self._router.stdout.readline()
            except BrokenPipeError:
                line = b""
        if not line:
            raise BoxError("the router of the box is gone")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BoxError(answer["error"])
        return answer
