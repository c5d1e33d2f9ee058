"""A peer stops in order when it is asked to, when its parent is gone, and in bounded time when something blocks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.process

PEER = """
import asyncio, sys, threading, time
from fusion.cli.terminal import loop
async def main():
    print("up", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        print("handing over", flush=True)
        {handover}
        print("handed over", flush=True)
{before}
loop.run_until_stopped(main(), parent={parent})
print("stopped", flush=True)
"""


def peer(
    handover: str = "await asyncio.sleep(0.01)", parent: str = "None", before: str = ""
) -> subprocess.Popen[str]:
    code = PEER.format(handover=handover, parent=parent, before=before)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_hands_over(number: int) -> None:
    process = peer()
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "handing over\nhanded over\nstopped\n")


def handing_over(seconds: float, number: int) -> subprocess.Popen[str]:
    """A peer that was sent the signal, and hands over for so long."""
    process = peer(handover=f"await asyncio.sleep({seconds})")
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "handing over\n"
    return process


def test_a_second_signal_does_not_wait() -> None:
    process = handing_over(600, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130


def test_a_terminal_that_is_closed_may_say_so_twice() -> None:
    process = handing_over(0.5, signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "handed over\nstopped\n")


def test_a_peer_that_ignores_its_terminal_outlives_it() -> None:
    process = peer(
        "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)",
        before="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)",  # as nohup does
    )
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert out == "handing over\nTrue\nhanded over\nstopped\n"


@pytest.mark.parametrize(
    "handover", ["time.sleep(600)", "threading.Thread(target=time.sleep, args=(600,)).start()"]
)
def test_what_blocks_does_not_keep_it_alive(handover: str) -> None:
    """A blocked loop, and a thread that would keep the interpreter from ending."""
    process = peer(handover, before="loop.STOP_BUDGET_SECONDS = 0.3")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 1


BLOCKED = """
import asyncio, time
from fusion.cli.terminal import loop
loop.STOP_BUDGET_SECONDS = {budget}
async def main():
    print("up", flush=True)
    time.sleep(600)
loop.run_until_stopped(main())
"""


def blocked(budget: float) -> subprocess.Popen[str]:
    """A peer whose loop has been blocked since before it was asked to stop."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED.format(budget=budget)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_blocked_loop_is_ended_by_the_deadline(number: int) -> None:
    process = blocked(budget=0.3)
    process.send_signal(number)
    try:
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (
            1,
            "fusion-peer: it did not close in 0.3 s, and was ended at once\n",
        )
    finally:
        process.kill()


def test_a_second_signal_ends_a_blocked_loop_at_once() -> None:
    process = blocked(budget=600)
    try:
        for _ in range(600):  # two that come at once are one
            if process.poll() is not None:
                break
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.returncode == 130
    finally:
        process.kill()


def test_a_second_signal_does_not_wait_for_threads_after_the_loop() -> None:
    process = peer("threading.Thread(target=time.sleep, args=(600,)).start()")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)][-1] == "stopped\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130


def test_a_command_that_is_interrupted_waits_for_no_thread() -> None:
    """One that captures a model, say, for minutes, and keeps the libraries' warnings from the terminal meanwhile."""
    code = (
        "import asyncio, contextlib, io, time\n"
        "from fusion.cli.terminal import loop\n"
        "def hushed():\n"
        "    with contextlib.redirect_stderr(io.StringIO()):\n"
        "        print('up', flush=True)\n"
        "        time.sleep(600)\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.to_thread(hushed)\n"
        "    finally:\n"
        "        print('closed', flush=True)\n"
        "loop.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "closed\n", "fusion-peer: interrupted\n")


def test_what_is_to_be_handed_over_has_its_time() -> None:
    process = peer(
        "await asyncio.sleep(0.5)",
        parent="None, extra_seconds=lambda: 60.0",
        before="loop.STOP_BUDGET_SECONDS = 0.1",
    )
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "handing over\nhanded over\nstopped\n")


def test_a_peer_whose_parent_is_gone_stops() -> None:
    parent = (
        "import subprocess, sys, os\n"
        f"code = {PEER.format(handover='pass', parent='PARENT', before='')!r}.replace('PARENT', str(os.getpid()))\n"
        "child = subprocess.Popen([sys.executable, '-c', code])\n"
        "child.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The child holds the other end of the pipe: it ends when the child has.
    started = time.monotonic()
    assert process.stdout.read() == "handing over\nhanded over\nstopped\n", time.monotonic() - started
