"""However a peer ends, it leaves no process and no socket behind, and p2pd does not end before it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from support.p2p_pair import LOOPBACK, two
from support.processes import alive, state

from fusion.swarm.dht.directory import DhtConfig, HivemindDirectory
from fusion.swarm.errors import (
    PeerUnreachable,
    StreamBroken,
    TransportError,
)
from fusion.swarm.identity import Identity
from fusion.swarm.machine import usable_cores
from fusion.swarm.streams import p2p
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.streams.p2pd import daemon_cores
from fusion.swarm.transport import Stream

pytestmark = pytest.mark.process

ECHO = "/fusion/echo/1"
GONE_SECONDS = 2.0
SOON_SECONDS = 0.4  # in the place of SILENT_SECONDS
SLOW = DhtConfig(call_seconds=60.0)


async def echo(stream: Stream) -> None:
    while True:
        frame = await stream.receive()
        await stream.send(frame.kind, frame.header, (frame.payload,))


def soon(condition: Callable[[], bool], seconds: float = GONE_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def using(directory: Path) -> list[psutil.Process]:
    """Every process whose command line names the directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (
            any(str(directory) in part for part in process.info["cmdline"] or ())
            and process.pid != os.getpid()
        ):
            found.append(process)
    return found


class Child:
    """`transport_child.py`, in a process group of its own as a shell would start it."""

    def __init__(self, runtime_dir: Path) -> None:
        script = Path(__file__).parents[2] / "support" / "transport_child.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(runtime_dir)],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        assert self.process.stdout is not None
        about = json.loads(self.process.stdout.readline())
        self.address: str = about["address"]
        self.p2pd: int = about["p2pd"]
        self.directory = Path(about["directory"])

    def gone(self) -> bool:
        return not alive(self.p2pd) and not self.directory.exists() and not using(self.directory)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def child(place: Path) -> Iterator[Child]:
    child = Child(place)
    try:
        yield child
    finally:
        child.close()
        assert soon(child.gone)


@pytest.mark.parametrize(("cores", "given"), [(1, 1), (2, 1), (4, 2), (64, 4)])
def test_p2pd_leaves_cores_to_the_stages(cores: int, given: int) -> None:
    assert daemon_cores(cores) == given


def test_p2pd_runs_on_as_many_cores_as_it_is_given(child: Child) -> None:
    assert psutil.Process(child.p2pd).environ()["GOMAXPROCS"] == str(daemon_cores(usable_cores()))


def test_sigkill_of_our_process_takes_p2pd_and_its_sockets_along(place: Path, child: Child) -> None:
    assert alive(child.p2pd) and (child.directory / "d.sock").exists()
    held = {str(child.directory / name) for name in ("d.sock", "s.sock")}
    assert held <= _unix_sockets()

    async def main() -> None:
        config = P2PConfig(identity=Identity.generate(), listen=LOOPBACK, runtime_dir=place / "ours")
        async with P2PTransport.start(config) as transport:
            peer = await transport.connect(child.address)
            stream = await transport.open(peer, ECHO)
            await stream.send("hi")
            assert (await stream.receive()).kind == "hi"
            child.process.kill()
            async with asyncio.timeout(GONE_SECONDS):
                with pytest.raises(StreamBroken):
                    await stream.receive()

    uvloop.run(main())
    child.process.wait()
    assert soon(child.gone)
    assert not held & _unix_sockets()


def test_ctrl_c_leaves_p2pd_to_us(child: Child) -> None:
    os.killpg(child.process.pid, signal.SIGINT)  # what a terminal does
    output, _ = child.process.communicate(timeout=10)
    assert output == "p2pd lived\n" and child.process.returncode == 0
    assert soon(child.gone)


def test_sigkill_of_the_whole_process_group(child: Child) -> None:
    os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
    assert soon(child.gone)


def test_we_learn_that_p2pd_or_its_guard_was_killed(place: Path) -> None:
    async def main() -> None:
        for target in ("p2pd", "guard"):
            async with two(place, ECHO, echo) as (one, other):
                stream = await one.open(other.peer_id, ECHO)
                daemon = one._daemon
                pid = daemon.pid if target == "p2pd" else psutil.Process(daemon.pid).ppid()
                os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(GONE_SECONDS):
                    assert f"p2pd (pid {daemon.pid}) ended" in str(await one.failed())
                    with pytest.raises(StreamBroken):
                        await stream.receive()
                with pytest.raises(PeerUnreachable):
                    await one.open(other.peer_id, ECHO)
                with pytest.raises(TransportError):
                    await one.connect(other.addresses[0])
            assert os.listdir(place) == []
            assert not alive(daemon.pid)

    uvloop.run(main())


def test_calls_of_the_dht_fail_at_once_when_p2pd_is_dead(place: Path) -> None:
    """hivemind would leave each to its time-out, and a peer that is opened anew would wait for all of them."""

    async def main() -> None:
        async with two(place, ECHO, echo) as (one, other):
            far = await HivemindDirectory.start(other.p2p, other._config.identity, SLOW)
            near = await HivemindDirectory.start(one.p2p, one._config.identity, SLOW)
            assert await near.join(other.peer_id)
            os.kill(other._daemon.pid, signal.SIGSTOP)
            while state(other._daemon.pid) != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(near._calls.ping(other.peer_id))
            await asyncio.sleep(0.05)
            os.kill(one._daemon.pid, signal.SIGKILL)
            async with asyncio.timeout(GONE_SECONDS):
                with pytest.raises(P2PDaemonError, match="p2pd is gone"):
                    await waiting
                with pytest.raises(P2PDaemonError, match="p2pd is gone"):
                    await near._calls.ping(other.peer_id)
                await near.aclose()
            assert not one.alive
            os.kill(other._daemon.pid, signal.SIGKILL)
            async with asyncio.timeout(GONE_SECONDS):
                await far.aclose()

    uvloop.run(main())
    assert os.listdir(place) == []


def test_a_peer_that_is_back_is_reached_at_once(place: Path) -> None:
    """libp2p would not dial an address again for 6 s after it failed."""

    async def main() -> None:
        identity = Identity.generate()
        config = P2PConfig(identity=Identity.generate(), listen=LOOPBACK, runtime_dir=place)
        async with P2PTransport.start(config) as one:
            listen = LOOPBACK
            for _ in range(2):
                back = P2PConfig(identity=identity, listen=listen, runtime_dir=place)
                async with P2PTransport.start(back) as other:
                    await other.serve(ECHO, echo)
                    address = other.addresses[0]
                    one.learn(other.peer_id, other.addresses)
                    async with asyncio.timeout(GONE_SECONDS):
                        stream = await one.open(other.peer_id, ECHO)
                        await stream.send("k")
                        await stream.receive()
                    os.kill(other._daemon.pid, signal.SIGKILL)
                    with pytest.raises(StreamBroken):
                        await stream.receive()
                for _ in range(3):
                    with pytest.raises(PeerUnreachable, match="refused"):
                        await one.open(other.peer_id, ECHO)
                listen = (address.rpartition("/p2p/")[0],)

    uvloop.run(main())


@asynccontextmanager
async def forwarder(port: int, works: asyncio.Event) -> AsyncIterator[int]:
    """A port of a router in between, which forgets connections silently: nothing is passed on unless it `works`."""
    tasks: list[asyncio.Task[None]] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            await works.wait()
            writer.write(piece)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await asyncio.open_connection("127.0.0.1", port)
        tasks.extend(asyncio.create_task(pipe(*each)) for each in ((reader, far[1]), (far[0], writer)))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_connection_that_died_without_a_word_is_given_up_for_a_new_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p2pd alone takes 40 s to notice."""
    monkeypatch.setattr(p2p, "SILENT_SECONDS", SOON_SECONDS)

    async def main() -> None:
        works = asyncio.Event()
        works.set()
        configs = [
            P2PConfig(identity=Identity.generate(), listen=LOOPBACK, runtime_dir=place) for _ in range(2)
        ]
        async with P2PTransport.start(configs[0]) as one, P2PTransport.start(configs[1]) as other:
            await other.serve(ECHO, echo)
            peer, direct = other.peer_id, other.addresses[0]
            async with forwarder(int(direct.split("/")[4]), works) as port:
                await one.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}")
                stream = await one.open(peer, ECHO)
                await stream.send("k")
                await stream.receive()
                one.learn(peer, [direct])
                works.clear()
                async with asyncio.timeout(20):
                    with pytest.raises(TransportError):
                        await (await one.open(peer, ECHO)).receive()
                    again = await one.open(peer, ECHO)
                    await again.send("k")
                    await again.receive()

    uvloop.run(main())


def test_a_peer_that_is_slow_to_answer_keeps_its_connection(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p, "SILENT_SECONDS", SOON_SECONDS)

    async def hesitate(stream: Stream) -> None:
        await stream.receive()
        await asyncio.sleep(2 * SOON_SECONDS)
        await stream.send("at last")

    async def main() -> None:
        async with two(place, ECHO, hesitate) as (one, other):
            one.learn(other.peer_id, other.addresses)
            stream = await one.open(other.peer_id, ECHO)
            await stream.send("k")
            assert (await stream.receive()).kind == "at last"

    uvloop.run(main())


def test_closing_in_the_middle_of_everything(place: Path) -> None:
    async def main() -> None:
        async with two(place, ECHO, echo) as (one, other):
            streams = [await one.open(other.peer_id, ECHO) for _ in range(5)]
            sends = [asyncio.create_task(stream.send("k", {}, (bytes(20_000_000),))) for stream in streams]
            await asyncio.sleep(0.05)
            await one.aclose()
            results = await asyncio.gather(*sends, return_exceptions=True)
            assert all(result is None or isinstance(result, TransportError) for result in results)
            await one.aclose()

    uvloop.run(main())
    assert os.listdir(place) == []


def _unix_sockets() -> set[str]:
    return {str(connection.laddr) for connection in psutil.net_connections("unix")}
