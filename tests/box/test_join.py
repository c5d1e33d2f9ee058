"""What a peer prints for others is pasted on a second machine of its network, and the two know each other."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from box import kernel
from box.network import Box
from box.spec import Host, Link, NetworkSpec

REASON = kernel.unavailable()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(REASON), reason=REASON)]
FUSION_PEER = (sys.executable, "-m", "fusion.cli.main")
NETWORK = NetworkSpec(hosts=(Host(name="first"), Host(name="second")), default=Link(delay_ms=1))
# Both machines have containers, in a network of the same addresses: whoever dialled 172.17.0.1 would find itself.
DOCKER = "link add docker0 type bridge\naddress add 172.17.0.1/16 dev docker0\nlink set docker0 up\n"
LISTEN = ("--listen", "/ip4/0.0.0.0/tcp/31337")
WAIT_SECONDS = 300.0


class Running:
    """A `fusion-peer start` on a host, and the lines it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def line(self, start: str) -> str:
        """The next line that starts so."""
        while (line := self._lines.get(timeout=WAIT_SECONDS)) is not None:
            if line.startswith(start):
                return line
        raise AssertionError(f"ended without a line that starts with {start!r}")

    def end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


@contextmanager
def started(box: Box, host: str, home: Path, *arguments: str) -> Iterator[Running]:
    command = [*FUSION_PEER, "start", "--home", str(home), "--threads", "1", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with box.run(host, command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        running = Running(process)
        try:
            yield running
        finally:
            running.end()


def test_what_a_peer_prints_works_on_another_machine(tmp_path: Path) -> None:
    with Box(NETWORK) as box:
        for host in box.hosts:
            making = box.run(host, ["ip", "-batch", "-"], stdin=subprocess.PIPE, text=True)
            making.communicate(DOCKER)
            assert making.returncode == 0
        with started(box, "first", tmp_path / "first", *LISTEN, "--bootstrap", os.devnull) as first:
            words = first.line("  fusion-peer start ").split()
            assert words[-1].startswith(f"/ip4/{box.address('first')}/tcp/31337/p2p/")
            with started(box, "second", tmp_path / "second", *LISTEN, "--json", *words[2:]) as second:
                ready = json.loads(second.line('{"event": "ready"'))
                assert [address.rpartition("/p2p/")[0] for address in ready["addresses"]] == [
                    f"/ip4/{box.address('second')}/tcp/31337"
                ]
                second.line('{"event": "announced"')
                asked = box.run(
                    "first",
                    [*FUSION_PEER, "status", "--home", str(tmp_path / "first"), "--json"],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                said = asked.communicate(timeout=WAIT_SECONDS)[0]
                assert ready["peer_id"] in said and words[-1].rpartition("/")[2] in said
