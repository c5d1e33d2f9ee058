"""What the tests take for left behind: their own processes and files, and nothing of anybody else's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.leaks import Traces, nothing_left
from support.processes import alive

PEER = Path(__file__).parents[1] / "support" / "transport_child.py"
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
# Another program with hivemind, whose sockets are where hivemind puts them.
HIVEMIND = """
import asyncio, sys
from fusion.cli.terminal.fast_imports import lean_imports
with lean_imports():
    from hivemind.p2p import P2P

async def main():
    p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    print(p2p.daemon_listen_maddr, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await p2p.shutdown()

asyncio.run(main())
"""


@contextmanager
def running(*command: str, traces: Traces | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program and the first line that it prints; its input ends with the block."""
    pipe = subprocess.PIPE
    environment = {**os.environ, **(traces.environment if traces else {})}
    with subprocess.Popen(
        [sys.executable, *command], stdin=pipe, stdout=pipe, text=True, env=environment
    ) as program:
        assert program.stdout is not None
        yield program, program.stdout.readline().strip()


def test_another_program_with_hivemind_is_none_of_our_business() -> None:
    with running("-c", HIVEMIND) as (program, address):
        place = Path(address.removeprefix("/unix"))
        assert place.exists() and place.name.startswith("hivemind-")
        assert [child.name() for child in psutil.Process(program.pid).children()] == ["p2pd"]
        with nothing_left(0.0) as traces:
            assert traces.left() == []
        assert place.exists() and program.poll() is None


def test_a_peer_of_ours_that_is_left_behind_is_found_and_ended(tmp_path: Path) -> None:
    with running("-c", HIVEMIND) as (foreign, _):
        with pytest.raises(AssertionError, match="left behind") as failed, nothing_left(0.0) as traces:
            left = subprocess.Popen(
                [sys.executable, str(PEER), str(traces.folder)], stdout=subprocess.PIPE, text=True,
                env={**os.environ, **traces.environment},
            )  # fmt: skip
            assert left.stdout is not None and left.stdout.readline()
            names = {process.name() for process in traces.processes()}
        assert "p2pd" in names and "p2pd" in str(failed.value) and PEER.name in str(failed.value)
        left.communicate(timeout=30)
        assert not traces.processes() and not traces.folder.exists()
        assert foreign.poll() is None


def test_what_a_child_of_ours_starts_is_ours() -> None:
    """Though its parent is gone."""
    code = f"import subprocess; print(subprocess.Popen({SLEEPER!r}, start_new_session=True).pid, flush=True)"
    with pytest.raises(AssertionError, match="left behind"), nothing_left(0.0) as traces:
        with running("-c", code, traces=traces) as (parent, pid):
            parent.wait()
        assert alive(int(pid))
    assert not alive(int(pid))


def test_a_socket_that_is_left_is_found() -> None:
    with (
        pytest.raises(AssertionError, match=r"d\.sock"),
        nothing_left(0.0) as traces,
        socket.socket(socket.AF_UNIX) as left,
    ):
        left.bind(str(traces.folder / "d.sock"))
