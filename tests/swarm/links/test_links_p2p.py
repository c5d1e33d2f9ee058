"""Links between two processes, each with its own p2pd and node of the DHT, over loopback."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest
import uvloop

from fusion.swarm.coordinates import Coordinate
from fusion.swarm.dht.directory import HivemindDirectory
from fusion.swarm.identity import Identity
from fusion.swarm.links.monitor import LinkMonitor
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.transport import PeerId

pytestmark = pytest.mark.process

CHILD = Path(__file__).parents[2] / "support" / "links_child.py"
SECONDS = 80.0


def test_two_processes_measure_their_link_and_tell_each_other() -> None:
    async def main(place: Path) -> None:
        identity = Identity.generate()
        config = P2PConfig(identity=identity, listen=("/ip4/127.0.0.1/tcp/0",), runtime_dir=place)
        async with (
            P2PTransport.start(config) as transport,
            await HivemindDirectory.start(transport.p2p, identity) as directory,
            LinkMonitor(transport, directory, transport.counter.receive_log) as links,
        ):
            child = await asyncio.create_subprocess_exec(
                sys.executable, str(CHILD), str(place), "/ip4/127.0.0.1/tcp/0",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert child.stdin is not None and child.stdout is not None
            try:
                async with asyncio.timeout(SECONDS):
                    other = PeerId((await child.stdout.readline()).decode().strip().rpartition("/")[2])
                    child.stdin.write(f"join {transport.addresses[0]}\n".encode())
                    links.meet(other)
                    while True:
                        view = await links.refresh(0.0)
                        there, back = view.link(transport.peer_id, other), view.link(other, transport.peer_id)
                        if there.measured and back.measured:
                            break
                        await asyncio.sleep(0.2)
            finally:
                child.stdin.close()
                await child.communicate()
            for link in (there, back):
                assert link.rtt_seconds is not None and 0 < link.rtt_seconds < 0.1
                assert link.bytes_per_second is not None and 1e6 < link.bytes_per_second < 1e10
            assert links.coordinate != Coordinate()

    with tempfile.TemporaryDirectory(prefix="p2p-") as place:
        uvloop.run(main(Path(place)))
