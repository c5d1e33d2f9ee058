"""Network namespaces without names, a TUN device in each, and the processes that live there. Linux, root.

A namespace without a name lives as long as a process or a descriptor holds it: nothing of it can be left behind. What
runs in one is found by it in /proc.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
DEVICE = "tun0"
MTU_BYTES = 1500
# As a home has them, except that no socket buffer is too small for a link (the default ends at about 4 MiB) and that
# no connection learns from earlier ones what it then takes for granted. Of several values the first one that the kernel takes:
# it may keep cubic from a namespace, which then has the machine's own, and BBR, that of some servers, lets next to nothing
# through for 200 ms in every ten seconds.
SETTINGS = {
    "net/ipv4/tcp_congestion_control": ("cubic", "reno"),
    "net/ipv4/tcp_rmem": ("4096 131072 67108864",),
    "net/ipv4/tcp_wmem": ("4096 65536 67108864",),
    "net/ipv4/tcp_no_metrics_save": ("1",),
    "net/ipv6/conf/all/disable_ipv6": ("1",),
}
MARK = "FUSION_BOX"  # in the environment of what a box runs: its owner
LOOK_SECONDS = 0.02

libc = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str:
    """Why this machine cannot make a box, in one line; empty if it can."""
    if sys.platform != "linux":
        return "a network in a box needs Linux"
    if os.geteuid() != 0:
        return "a network in a box needs root"
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            return f"a network in a box needs the command {program}"
    if not Path("/dev/net/tun").exists():
        return "a network in a box needs /dev/net/tun"
    if subprocess.run(["nsenter", "--net=/proc/self/ns/net", "true"], capture_output=True).returncode:
        return "a network in a box needs the right to enter a network namespace"
    return ""


def enter(namespace: int) -> None:
    """Move the calling thread, and all that it starts, to the namespace of this descriptor."""
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def namespace() -> int:
    """A descriptor of the calling thread's namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def make_host(address: str, prefix: int) -> tuple[int, int]:
    """A new namespace and the non-blocking descriptor of the TUN device in it, which is up; the calling thread stays in
    it. Each read or write is one packet behind a virtio_net_hdr, super-packets included."""
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare: no network namespace can be made here")
    for name, values in SETTINGS.items():
        _set(Path("/proc/sys", name), values)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    commands = (
        f"link set lo up\naddress add {address}/{prefix} dev {DEVICE}\n"
        f"link set {DEVICE} mtu {MTU_BYTES} txqueuelen 1000 up\n"
    )
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    return namespace(), tun


def _set(path: Path, values: Iterable[str]) -> None:
    for value in values:
        with suppress(OSError):  # a kernel without IPv6, or one that does not let a namespace have that
            path.write_text(value)
            return


def living(namespaces: Collection[int], spared: Collection[int]) -> list[int]:
    """Processes in the namespaces with these inode numbers; zombies have none."""
    wanted = {f"net:[{inode}]" for inode in namespaces}
    found = []
    for pid in _pids():
        with suppress(OSError):
            if pid not in spared and os.readlink(f"/proc/{pid}/ns/net") in wanted:
                found.append(pid)
    return found


def end(namespaces: Collection[int], spared: Collection[int], grace_seconds: float) -> None:
    """Terminate the processes that live there, wait, and kill those that do not end, until there is none."""
    asked: set[int] = set()
    deadline = time.monotonic() + grace_seconds
    while left := living(namespaces, spared):
        late = time.monotonic() > deadline
        for pid in left if late else set(left) - asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(left)
        time.sleep(LOOK_SECONDS)


def mark(owner: int) -> str:
    """The value of MARK for a box of this process: its id and, since ids are reused, its start time."""
    return f"{owner}-{_started(owner)}"


def sweep() -> None:
    """Kill processes in boxes whose owner is dead. There are some only if the box's router was killed too."""
    for pid in _pids():
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = entry.decode(errors="replace").partition("=")
                if name == MARK and value != _mark_now(value.partition("-")[0]):
                    os.kill(pid, signal.SIGKILL)


def _mark_now(owner: str) -> str:
    try:
        return mark(int(owner))
    except (OSError, ValueError):
        return ""


def _started(pid: int) -> str:
    """Clock ticks from the system's start to the process's. OSError if the process does not exist."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _pids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
