"""One peer as a process: it starts, says where it is, stops in order, and says in one line why it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from support.jobs import with_client
from support.processes import alive

from fusion.cli.local.chaos_swarm import daemons
from fusion.runtime.job.context import Context
from fusion.runtime.job.protocol import STATUS
from fusion.swarm.errors import TransportError
from fusion.swarm.transport import PeerId, call

if TYPE_CHECKING:
    from conftest import Peers

    from fusion.cli.local.fleet import LocalPeer

pytestmark = [pytest.mark.e2e, pytest.mark.cold]
BACK_SECONDS = 20.0
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGrJ5S1hz7HYPzF5bxVqk3R3zQ9o2jQ4n8F2dTq3vEaHs"


def refused(traces: str, home: Path, *arguments: str) -> str:
    """Run `fusion-peer start` that cannot start: exit code 1 or 2 and one line, which is returned."""
    done = subprocess.run(
        [sys.executable, "-m", "fusion.cli.main", "start", "--home", str(home), "--bootstrap", os.devnull, "--json",
         *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert done.returncode in (1, 2), done
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0]


def daemon_of(peer: LocalPeer) -> psutil.Process:
    [daemon] = daemons(peer)
    return daemon


async def answer_of(context: Context, peer: LocalPeer) -> dict[str, Any]:
    """What it says of itself, asked until it answers."""
    async with asyncio.timeout(BACK_SECONDS):
        while True:
            with suppress(TransportError):
                await context.transport.connect(peer.address)
                status = await call(context.transport, PeerId(peer.peer_id), STATUS.name, "status")
                return dict(status.header)
            await asyncio.sleep(0.05)


def test_it_starts_is_seen_by_others_is_back_after_its_daemon_was_killed_and_stops_in_time(
    peers: Peers,
) -> None:
    """At the same address."""
    first, second = peers.swarm(2)
    [status] = peers.run("status", "--home", str(second.home))
    assert {each["peer"] for each in status["peers"]} == {first.peer_id, second.peer_id}
    for peer in (first, second):
        assert peer.ready["name"] and peer.ready["flops_per_second"] > 0

    async def kill(context: Context) -> None:
        for peer in (second, first, second):
            before = await answer_of(context, peer)
            killed = daemon_of(peer)
            killed.kill()
            while alive(killed):
                await asyncio.sleep(0.01)
            assert (await answer_of(context, peer))["name"] == before["name"]
            assert daemon_of(peer).pid != killed.pid and peer.process.returncode is None
            async with asyncio.timeout(BACK_SECONDS):
                while {r.peer for r in await context.directory.peers()} != {first.peer_id, second.peer_id}:
                    await asyncio.sleep(0.1)

    with_client(peers.root / "client", first.address, kill)
    for peer, times in ((first, 1), (second, 2)):
        lines = (peers.root / f"{peer.name}.log").read_text().splitlines()
        assert [line for line in lines if "p2pd" in line and "it was killed; starting it again" in line][
            times - 1 :
        ], lines
        assert not [line for line in lines if "Traceback" in line or line.startswith(" ")], lines
        assert len(lines) <= 3 * times, lines
    for peer, number in ((second, signal.SIGINT), (first, signal.SIGTERM)):
        assert peers.stop(peer, number) < 5.0 and peer.process.returncode == 0


def test_an_unreachable_bootstrap_does_not_stop_it_and_killed_outright_it_takes_its_daemon_along(
    peers: Peers,
) -> None:
    """The `traces` fixture looks for what is left."""
    peer = peers.start("alone", bootstrap=(NOBODY,))
    assert peer.process.returncode is None
    assert daemons(peer), "no daemon?"
    peers.stop(peer, signal.SIGKILL)


def test_a_taken_port_is_named(traces: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(traces, tmp_path, "--listen", f"/ip4/127.0.0.1/tcp/{port}")


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_broken_identity_is_named(traces: str, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "identity").write_bytes(content)
    (tmp_path / "identity").chmod(0o600)
    assert str(tmp_path / "identity") in refused(traces, tmp_path)


def test_an_identity_that_others_can_read_is_refused(traces: str, tmp_path: Path) -> None:
    (tmp_path / "identity").write_bytes(b"x" * 68)
    (tmp_path / "identity").chmod(0o644)
    assert "chmod 600" in refused(traces, tmp_path)


def test_a_device_that_is_not_there_is_named(traces: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert "cuda" in refused(traces, tmp_path, "--device", "cuda")
