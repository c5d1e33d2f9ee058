"""Real peers for the end-to-end tests: `fusion-peer` processes on loopback, and proof that nothing of them is left."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.leaks import LEFT_SECONDS, nothing_left

from fusion.cli.local.fleet import Fleet, LocalPeer, Record, open_fleet

CALL_SECONDS = 600.0


class Peers:
    """A fleet for tests that are not asynchronous: an event loop in a thread, which also keeps reading what the
    peers print."""

    def __init__(self, call: Callable[[Coroutine[Any, Any, Any]], Any], fleet: Fleet) -> None:
        self._call = call
        self.fleet = fleet

    @property
    def root(self) -> Path:
        """The folder that holds the homes and the logs."""
        return self.fleet.root

    def start(
        self, name: str, *arguments: str, bootstrap: tuple[str, ...] = (), prefix: Sequence[str] = ()
    ) -> LocalPeer:
        """Start `fusion-peer start` and wait until it is up. FleetError with its last words if it is not. `prefix` stands
        before the command."""
        peer: LocalPeer = self._call(
            self.fleet.start_peer(name, *arguments, bootstrap=bootstrap, prefix=prefix)
        )
        return peer

    def start_together(self, names: Sequence[str], bootstrap: tuple[str, ...] = ()) -> list[LocalPeer]:
        """Start all of them at the same moment and wait until each is up."""

        async def start() -> list[LocalPeer]:
            return await asyncio.gather(*(self.fleet.start_peer(name, bootstrap=bootstrap) for name in names))

        started: list[LocalPeer] = self._call(start())
        return started

    def swarm(self, count: int, *arguments: str) -> list[LocalPeer]:
        """`count` peers that know each other; the first one is where the others joined."""
        peers = [self.start("peer-0", *arguments)]
        for i in range(1, count):
            peers.append(self.start(f"peer-{i}", *arguments, bootstrap=(peers[0].address,)))
        return peers

    def run(
        self,
        *arguments: str,
        prefix: Sequence[str] = (),
        on_record: Callable[[Record], None] = lambda record: None,
    ) -> list[Record]:
        """Run another command with --json to its end; the objects that it printed."""
        name = f"{arguments[0]}-{uuid.uuid4().hex[:6]}"
        records: list[Record] = self._call(
            self.fleet.run(name, *arguments, prefix=prefix, on_record=on_record)
        )
        return records

    def stop(self, peer: LocalPeer, number: int = signal.SIGTERM, seconds: float = 10.0) -> float:
        """Send a signal and wait for the end of the process; how many seconds it took."""
        started = time.monotonic()
        peer.process.send_signal(number)
        self.wait(peer, seconds)
        return time.monotonic() - started

    def wait(self, peer: LocalPeer, seconds: float = 10.0) -> None:
        """Wait for the end of a peer's process."""
        self._call(asyncio.wait_for(peer.process.wait(), seconds))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Everything started in the test carries a mark and has a temporary folder of its own; at the end no marked process
    and no file in that folder may be left. Gives the mark."""
    # `tmp_path` is asked for so that pytest has made its own folders before this.
    with nothing_left() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(tempfile, "tempdir", str(found.folder))
        yield found.mark


@pytest.fixture
def peers(traces: str) -> Iterator[Peers]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fleet", daemon=True)
    thread.start()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(CALL_SECONDS)

    opening = open_fleet("fleet-")
    fleet = call(opening.__aenter__())
    try:
        yield Peers(call, fleet)
    finally:
        ports = [_port(peer.address) for peer in fleet.peers]
        call(opening.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
    deadline = time.monotonic() + LEFT_SECONDS  # a guard ends the daemon of a peer that was killed
    while (left := [port for port in ports if _listens(port)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "a port is still open"


def _port(address: str) -> int:
    return int(address.split("/tcp/")[1].split("/")[0])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
