"""A real box: what it was asked for is what its hosts see, and nothing of it outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from box import kernel
from box.measure import goodput_mbps, rtt_ms
from box.network import Box, BoxError
from box.spec import Host, Link, NetworkSpec
from support.stolen import MOST_STOLEN, Stolen

REASON = kernel.unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.skipif(bool(REASON), reason=REASON)]
HOSTS = (Host(name="a"), Host(name="b"), Host(name="c"))
PAIR = [("a", "b")]
GONE_SECONDS = 20.0
INSIDE = ["sh", "-c", "sleep 1000 & echo up; sleep 1000"]
ATTEMPTS = 3  # another program may have had the processor: a figure that is right once is right
DISTURBED_SECONDS = 60.0


def at_last(measured: Callable[[], float], least: float, most: float) -> None:
    """One of a few measurements is within the bounds. What was measured while other machines had this one's cores does
    not count; where they keep them, nothing can be said."""
    seen: list[float] = []
    until = time.monotonic() + DISTURBED_SECONDS
    while len(seen) < ATTEMPTS:
        others = Stolen()
        found = measured()
        if least <= found <= most:
            return
        if others.share() <= MOST_STOLEN:
            seen.append(found)
        elif time.monotonic() > until:
            pytest.skip(
                f"other machines have the cores of this one: {found:g}, not from {least:g} to {most:g}"
            )
    raise AssertionError(f"{seen}, none of them from {least} to {most}")


@pytest.mark.parametrize(("rate", "round_trip", "seconds"), [(8, 20, 1.5), (100, 2, 1.0), (1000, 4, 1.0)])
def test_round_trips_and_goodput_are_those_asked_for(rate: float, round_trip: float, seconds: float) -> None:
    there = Link(rate_mbps=rate, delay_ms=0.75 * round_trip)
    back = Link(rate_mbps=rate, delay_ms=0.25 * round_trip)
    with Box(NetworkSpec(hosts=HOSTS[:2], links={("a", "b"): there, ("b", "a"): back})) as box:
        at_last(lambda: rtt_ms(box, "a", "b"), round_trip, 1.0 + 1.05 * round_trip)
        at_last(lambda: goodput_mbps(box, PAIR, seconds), 0.8 * rate, rate)


def test_each_direction_has_its_rate_and_both_change_while_it_runs() -> None:
    with Box(NetworkSpec(hosts=HOSTS, links={("a", "b"): Link(rate_mbps=8)})) as box:
        at_last(lambda: goodput_mbps(box, PAIR, 1.0), 6.4, 8.0)
        at_last(lambda: goodput_mbps(box, [("b", "a")], 0.3), 100.0, 1e6)
        box.set_link("a", "b", rate_mbps=40)
        at_last(lambda: goodput_mbps(box, PAIR, 1.0), 32.0, 40.0)
        box.set_pair("a", "b", delay_ms=15.0)
        at_last(lambda: rtt_ms(box, "a", "b"), 30.0, 32.5)


def test_all_pairs_share_an_uplink_and_a_downlink() -> None:
    with Box(NetworkSpec(hosts=HOSTS)) as box:
        box.set_host("a", up_mbps=10)
        at_last(lambda: goodput_mbps(box, [("a", "b"), ("a", "c")], 1.5), 8.0, 10.0)
        box.set_host("a", up_mbps=1000, down_mbps=20)
        at_last(lambda: goodput_mbps(box, [("b", "a"), ("c", "a")], 1.5), 16.0, 20.0)


def test_loss_is_counted_and_a_cut_is_silent() -> None:
    with Box(NetworkSpec(hosts=HOSTS[:2], default=Link(rate_mbps=100, delay_ms=1, loss=0.01))) as box:
        assert box.carried("a", "b").packets == 0
        goodput_mbps(box, PAIR, 0.5)
        carried = box.carried("a", "b")
        assert 0.002 < carried.dropped / (carried.packets + carried.dropped) < 0.05
        assert 40 * carried.packets < carried.bytes <= 1500 * carried.packets
        box.set_pair("a", "b", loss=1.0)
        before = box.carried("a", "b")
        assert box.run("a", probe(box, "b")).wait() == 3  # nobody answered
        after = box.carried("a", "b")
        assert after.packets == before.packets and after.dropped > before.dropped
        box.set_pair("a", "b", loss=0.0)
        assert box.run("a", probe(box, "b")).wait() == 4  # refused: nobody listens there


def probe(box: Box, host: str) -> list[str]:
    code = (
        "import socket, sys\n"
        f"try: socket.create_connection(({box.address(host)!r}, 9), 0.5)\n"
        "except TimeoutError: sys.exit(3)\n"
        "except ConnectionRefusedError: sys.exit(4)\n"
    )
    return [sys.executable, "-ISc", code]


def test_a_thread_can_be_on_a_host_for_a_while() -> None:
    here = os.readlink("/proc/thread-self/ns/net")
    with Box(NetworkSpec(hosts=HOSTS[:2])) as box:
        with box.entered("a"):
            assert os.readlink("/proc/thread-self/ns/net") != here
            assert subprocess.run(probe(box, "b")).returncode == 4
        assert os.readlink("/proc/thread-self/ns/net") == here


def test_hosts_send_as_a_home_does_whatever_the_machine_is_set_to() -> None:
    with Box(NetworkSpec(hosts=HOSTS[:2])) as box:
        for host in ("a", "b"):
            with box.entered(host):
                assert Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip() in (
                    "cubic",
                    "reno",
                )


def test_nothing_is_left_when_the_block_ends() -> None:
    devices = set(os.listdir("/sys/class/net"))
    with Box(NetworkSpec(hosts=HOSTS)) as box:
        spaces = held(box.router_pid)
        stubborn = box.run("a", [*INSIDE[:2], f"trap '' TERM; {INSIDE[2]}"], stdout=subprocess.PIPE)
        with stubborn:
            assert stubborn.stdout is not None and stubborn.stdout.readline() == b"up\n"
            assert len(spaces) == len(HOSTS) and len(holders(spaces)) >= 3  # the router, the shell, its child
            box.close()
            assert stubborn.wait() != 0
    assert not holders(spaces)
    assert set(os.listdir("/sys/class/net")) <= devices
    with pytest.raises(BoxError, match="closed"):
        box.set_link("a", "b", loss=0.5)


@pytest.mark.parametrize("router_too", [False, True])
def test_nothing_is_left_when_the_owner_is_killed(router_too: bool) -> None:
    code = (
        "import time\n"
        "from box.network import Box\n"
        "from box.spec import Host, NetworkSpec\n"
        "with Box(NetworkSpec(hosts=(Host(name='a'), Host(name='b')))) as box:\n"
        "    print(box.router_pid, flush=True)\n"
        f"    box.run('a', {INSIDE!r}, start_new_session=True)\n"
        "    time.sleep(1000)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as owner:
        try:
            assert owner.stdout is not None
            router = int(owner.stdout.readline())
            spaces = held(router)
            assert owner.stdout.readline() == "up\n" and len(holders(spaces)) >= 3
            if router_too:
                os.kill(router, signal.SIGKILL)
        finally:
            owner.kill()
    if router_too:
        with Box(NetworkSpec(hosts=HOSTS)):  # the next box sweeps
            pass
    deadline = time.monotonic() + GONE_SECONDS
    while (left := holders(spaces)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def held(router: int) -> set[str]:
    """The namespaces that a router holds for its hosts."""
    return {name for name in descriptors(router) if name.startswith("net:[")}


def holders(spaces: set[str]) -> set[int]:
    """The processes that keep one of these namespaces alive: they live in it or have a descriptor of it."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                here = os.readlink(f"/proc/{entry}/ns/net")
                if spaces & {here, *descriptors(int(entry))}:
                    found.add(int(entry))
    return found


def descriptors(pid: int) -> list[str]:
    names = []
    with suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                names.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return names
