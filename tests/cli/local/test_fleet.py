"""A fleet leaves nothing behind: not when it closes, not when it fails, not when its holder is killed outright."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from fusion.cli.local import fleet as fleets
from fusion.cli.local import janitor
from fusion.cli.local.fleet import Fleet, FleetError, open_fleet

pytestmark = pytest.mark.process

# Stands for `fusion-peer`: it is up at once, writes into its home, and does what its arguments say.
STAND_IN = """
import json, os, pathlib, signal, sys, time
words = sys.argv[1:]
if words[0] == "start":
    home = pathlib.Path(words[words.index("--home") + 1])
    home.mkdir(parents=True)
    (home / "peer.json").write_text("{}")
    if "--deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--broken" in words:
        sys.exit("fusion-peer: the port 80 is taken")
    print(json.dumps({"peer_id": "p", "addresses": ["/ip4/127.0.0.1/tcp/1/p2p/p"], "pid": os.getpid()}), flush=True)
    for i in range(100000):
        print(json.dumps({"event": "status", "padding": "x" * 1000}), flush=True)
        time.sleep(0.0 if i < 1000 else 0.1)
elif words[0] == "fail":
    print("a line\\nfusion-peer: no job is called x", file=sys.stderr)
    sys.exit(2)
else:
    print(json.dumps({"words": words}))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(fleets, "COMMAND", (sys.executable, str(script)))
    return script


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.usefixtures("stand_in")
def test_a_fleet_starts_asks_and_clears_up() -> None:
    async def main() -> tuple[Path, list[int]]:
        async with open_fleet("fusion-test-") as fleet:
            first = await fleet.start_peer("first")
            second = await fleet.start_peer("second", bootstrap=[first.address])
            [answer] = await fleet.run("jobs", "jobs", "list")
            assert answer["words"] == ["jobs", "list", "--json"]
            assert (second.home / "peer.json").exists()
            return fleet.root, [first.process.pid, second.process.pid]

    root, pids = asyncio.run(main())
    assert not root.exists()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_who_clears_up_has_the_packages_that_we_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are in no folder of the interpreter's own, but in the user's or on PYTHONPATH."""
    (tmp_path / "psutil.py").write_text(
        f"import pathlib; pathlib.Path({str(tmp_path / 'found')!r}).touch()\n"
        "Error, STATUS_STOPPED, Process = OSError, 'stopped', object\n"
        "def wait_procs(processes, timeout): return [], []\n"
        "def process_iter(attributes): return []\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> Path:
        async with open_fleet("fusion-test-") as fleet:
            return fleet.root

    assert not asyncio.run(main()).exists() and (tmp_path / "found").exists()


def test_torch_leaves_its_folder_with_the_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> bool:
        async with open_fleet("fusion-test-") as fleet:
            return os.environ[fleets.TORCH_CACHE] == str(fleet.root / "torch")

    monkeypatch.delenv(fleets.TORCH_CACHE, raising=False)
    assert asyncio.run(main()) and fleets.TORCH_CACHE not in os.environ
    monkeypatch.setenv(fleets.TORCH_CACHE, "/named/by/the/user")
    assert not asyncio.run(main()) and os.environ[fleets.TORCH_CACHE] == "/named/by/the/user"


def test_a_thread_that_writes_into_the_folder_is_waited_for() -> None:
    """It would make the folder anew behind the one who has removed it."""
    may_end = threading.Event()

    def write(folder: Path) -> None:
        may_end.wait()
        (folder / "plan").mkdir(parents=True)

    async def main() -> Path:
        async with open_fleet("fusion-test-") as fleet:
            writing = asyncio.create_task(fleet.in_thread(write, fleet.root))
            await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
            asyncio.get_running_loop().call_later(0.1, may_end.set)
        assert may_end.is_set()
        return fleet.root

    assert not asyncio.run(main()).exists()


@pytest.mark.usefixtures("stand_in")
def test_the_last_lines_are_the_reason() -> None:
    roots: list[Path] = []

    async def main(step: Callable[[Fleet], object]) -> None:
        async with open_fleet("fusion-test-") as fleet:
            roots.append(fleet.root)
            await step(fleet)  # type: ignore[misc]

    with pytest.raises(FleetError, match=r"fusion-peer fail: fusion-peer: no job is called x"):
        asyncio.run(main(lambda fleet: fleet.run("asked", "fail")))
    with pytest.raises(FleetError, match=r"second did not start: fusion-peer: the port 80 is taken"):
        asyncio.run(main(lambda fleet: fleet.start_peer("second", "--broken")))
    assert not any(root.exists() for root in roots)


@pytest.mark.usefixtures("stand_in")
def test_a_process_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "STOP_SECONDS", 0.2)

    async def main() -> int:
        async with open_fleet("fusion-test-") as fleet:
            return (await fleet.start_peer("deaf", "--deaf")).process.pid

    assert not psutil.pid_exists(asyncio.run(main()))


def test_nothing_outlives_a_holder_that_is_killed(stand_in: Path, tmp_path: Path) -> None:
    holder = tmp_path / "holder.py"
    holder.write_text(
        "import asyncio, json, sys\n"
        "from fusion.cli.local import fleet as fleets\n"
        f"fleets.COMMAND = (sys.executable, {str(stand_in)!r})\n"
        "async def main():\n"
        "    async with fleets.open_fleet('fusion-test-') as fleet:\n"
        "        peers = [await fleet.start_peer(name) for name in ('a', 'b')]\n"
        "        print(json.dumps([str(fleet.root), *[peer.process.pid for peer in peers]]), flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, str(holder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    root, *pids = json.loads(process.stdout.readline())
    assert Path(root).exists() and all(psutil.pid_exists(pid) for pid in pids)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not any(map(psutil.pid_exists, pids)) and not Path(root).exists())


def test_a_command_that_its_holder_had_no_time_to_tell_of_is_ended_too(tmp_path: Path) -> None:
    """The holder is killed between starting it and its line to the janitor."""
    folder = tmp_path / "fleet"
    folder.mkdir()
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)", janitor.MODULE]
    with (
        subprocess.Popen([*sleeper, "train", str(folder / "job.toml")]) as ours,
        subprocess.Popen([*sleeper, "train", str(tmp_path / "job.toml")]) as other,
    ):
        try:
            # Its parent is gone, so somebody else looks how it ended at once: the janitor waits for processes that nobody has looked at.
            reaper = threading.Thread(target=ours.wait)
            reaper.start()
            subprocess.run([sys.executable, "-P", janitor.__file__, str(folder)], input=b"", check=True)
            reaper.join(10.0)
            assert ours.poll() == -signal.SIGTERM and other.poll() is None and not folder.exists()
        finally:
            ours.kill()
            other.kill()
