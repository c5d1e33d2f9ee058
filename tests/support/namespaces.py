"""Two network namespaces joined by a bridge in a third: a swarm that can be cut in two, silently, and healed.

While it is cut packets vanish, as they do in a home whose router hangs: no end hears of it, and connections that stay
idle for the length of the cut outlive it. Needs root and Linux's `ip`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # of the two sides; they exist inside the namespaces only


def unavailable() -> str:
    """Why namespaces cannot be made here, in one line; empty where they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the ip command"
    probe = f"fp{os.getpid()}p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        return "the kernel does not let us make network namespaces"
    _ip("netns", "del", probe)
    return ""


@dataclass(frozen=True)
class Split:
    """Two sides, 0 and 1; a process started with `prefix(side)` before its command lives there."""

    name: str

    def prefix(self, side: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.side(side))

    def listen(self, side: int) -> str:
        """A multiaddr to listen at, on any free port."""
        return f"/ip4/{ADDRESSES[side]}/tcp/0"

    def side(self, side: int) -> str:
        return f"{self.name}{side}"

    def cut(self) -> None:
        """From now on nothing gets from one side to the other, and nobody is told."""
        _ip("-n", f"{self.name}m", "link", "set", "m1", "nomaster")

    def heal(self) -> None:
        _ip("-n", f"{self.name}m", "link", "set", "m1", "master", "br0")


@contextmanager
def two_sides() -> Iterator[Split]:
    """Made for the length of the block; afterwards no namespace is left, nor a process in one."""
    split = Split(f"fp{os.getpid()}")
    middle = f"{split.name}m"
    try:
        for namespace in (middle, split.side(0), split.side(1)):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", middle, "link", "add", "br0", "type", "bridge")
        _ip("-n", middle, "link", "set", "br0", "up")
        for side, address in enumerate(ADDRESSES):
            _ip(
                "-n",
                middle,
                "link",
                "add",
                f"m{side}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                split.side(side),
            )
            _ip("-n", middle, "link", "set", f"m{side}", "master", "br0", "up")
            _ip("-n", split.side(side), "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", split.side(side), "link", "set", "eth0", "up")
        yield split
    finally:
        for namespace in (split.side(0), split.side(1), middle):
            with suppress(subprocess.CalledProcessError):
                _end_processes(namespace)
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", namespace)


def _end_processes(namespace: str) -> None:
    for pid in _ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)


def _ip(*arguments: str) -> str:
    """Raises CalledProcessError, whose `stderr` says why."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
