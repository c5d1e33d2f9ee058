"""Faults on processes that stand for peers: killed, frozen, replaced; nothing stays frozen or behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import alive, state

from fusion.cli.local.chaos_plan import Fault
from fusion.cli.local.chaos_swarm import Swarm, processes
from fusion.cli.local.chaos_timeline import Timeline
from fusion.cli.local.fleet import FleetError, open_fleet

pytestmark = pytest.mark.process

# A peer with a process under it, as the libp2p daemon's guard is one.
STAND_IN = """
import json, pathlib, subprocess, sys, time
words = sys.argv[1:]
home = pathlib.Path(words[words.index("--home") + 1])
listen = words[words.index("--listen") + 1]
home.mkdir(parents=True, exist_ok=True)
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
port = 4000 if listen.endswith("/0") else int(listen.rsplit("/", 1)[1])
print(json.dumps({"event": "ready", "peer_id": home.name, "words": words,
                  "addresses": [f"/ip4/127.0.0.1/tcp/{port}/p2p/{home.name}"]}), flush=True)
print("half a l", end="")
print()
print(json.dumps({"event": "status", "stages": [["j", 0]]}), flush=True)
print(json.dumps({"event": "step", "job": "j", "at": time.time(), "attempts": 1, "step": 0, "state": "running",
                  "snapshot": None, "snapshot_step": 0, "owners": ["peer-1", "peer-2"]}), flush=True)
time.sleep(600)
"""


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return sys.executable, str(script)


def swarm_of(
    command: tuple[str, ...], count: int, work: Callable[[Swarm, Timeline], Any]
) -> list[psutil.Process]:
    """Run `work` over so many stand-ins; what is left of their processes afterwards."""
    seen: list[psutil.Process] = []

    async def main() -> None:
        async with open_fleet("fusion-test-") as fleet:
            swarm = Swarm(fleet, command=command, replace_seconds=0.0)
            timeline = swarm.follow("j")
            try:
                await swarm.start(count)
                await swarm.until(lambda: len(swarm.holds) == count and bool(timeline.owners), 20, "words")
                seen.extend(p for peer in swarm.peers for p in processes(peer))
                await work(swarm, timeline)
                seen.extend(p for peer in swarm.peers for p in processes(peer))
            finally:
                await swarm.aclose()

    asyncio.run(main())
    deadline = time.monotonic() + 10
    while (left := [p for p in seen if alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_roles_are_those_that_the_lead_tells(command: tuple[str, ...]) -> None:
    async def work(swarm: Swarm, timeline: Timeline) -> None:
        def name(role: str) -> str:
            peer = swarm.target(timeline, role)
            assert peer is not None
            return peer.name

        assert [name(role) for role in ("stage 0", "stage 1", "standby 0", "standby 1")] == [
            "peer-1", "peer-2", "peer-3", "peer-3",
        ]  # fmt: skip
        assert name("stage 2") == "peer-3"  # a stage that nobody holds now: somebody else is hit
        assert swarm.stage_of(timeline, swarm.peers[1]) == 1
        assert [peer.name for peer in swarm.idle(timeline)] == ["peer-3"]

    assert swarm_of(command, 3, work) == []


def test_a_killed_peer_is_replaced_by_a_new_one_that_joins_through_the_others(
    command: tuple[str, ...],
) -> None:
    async def work(swarm: Swarm, timeline: Timeline) -> None:
        done = await swarm.inject(Fault(at_seconds=1.0, kind="kill", role="stage 1"), timeline)
        assert done is not None and (done.peers, done.stage) == (("peer-2",), 1)
        await swarm.settle()
        assert [peer.name for peer in swarm.peers] == ["peer-1", "peer-3"]
        words = swarm.peers[1].ready["words"]
        assert words[words.index("--bootstrap") + 1] == swarm.peers[0].address

    assert swarm_of(command, 2, work) == []


@pytest.mark.parametrize("kind", ["stop", "partition"])
def test_the_frozen_wake_when_their_time_is_over_or_the_run_ends(
    command: tuple[str, ...], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusion.cli.local import chaos_swarm

    monkeypatch.setattr(chaos_swarm, "daemons", lambda peer: processes(peer)[1:])

    async def work(swarm: Swarm, timeline: Timeline) -> None:
        def standing() -> list[tuple[str, bool]]:
            return [
                (peer.name, any(state(p) == psutil.STATUS_STOPPED for p in processes(peer)))
                for peer in swarm.peers
            ]

        group = 2 if kind == "partition" else 0
        fault = Fault(at_seconds=1.0, kind=kind, role="stage 1", seconds=0.1, group=group)
        done = await swarm.inject(fault, timeline)
        assert done is not None
        assert standing() == [("peer-1", kind == "partition"), ("peer-2", True)]
        assert done.peers == (("peer-2", "peer-1") if group else ("peer-2",))
        await swarm.settle()
        assert not any(still for _, still in standing())
        await swarm.inject(Fault(at_seconds=2.0, kind=kind, role="stage 0", seconds=600.0), timeline)
        assert any(still for _, still in standing())

    assert swarm_of(command, 2, work) == []


def test_what_does_not_happen_is_said(command: tuple[str, ...]) -> None:
    async def work(swarm: Swarm, timeline: Timeline) -> None:
        with pytest.raises(FleetError, match="the moon: not within 0 s"):
            await swarm.until(lambda: False, 0.01, "the moon")
        await swarm.kill(swarm.peers[0], replace=False)
        with pytest.raises(FleetError, match="the moon: no peer is left"):
            await swarm.until(lambda: False, 20.0, "the moon")
        assert await swarm.inject(Fault(at_seconds=1.0, kind="kill", role="stage 0"), timeline) is None

    assert swarm_of(command, 1, work) == []


def test_nothing_stays_frozen_when_the_holder_is_killed(command: tuple[str, ...], tmp_path: Path) -> None:
    holder = tmp_path / "holder.py"
    holder.write_text(
        "import asyncio\n"
        "from fusion.cli.local.chaos_swarm import Swarm, processes\n"
        "from fusion.cli.local.fleet import open_fleet\n"
        "async def main():\n"
        "    async with open_fleet('fusion-test-') as fleet:\n"
        f"        swarm = Swarm(fleet, command={command!r})\n"
        "        await swarm.start(1)\n"
        "        found = processes(swarm.peers[0])\n"
        "        await swarm.freeze(found, 600)\n"
        "        print(*[p.pid for p in found], flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, str(holder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2 and psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
