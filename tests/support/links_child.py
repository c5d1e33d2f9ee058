"""A process with a transport, a directory and links, for the tests of links between processes.

    python links_child.py RUNTIME_DIR LISTEN

Prints its address, then once a second, as JSON, what it has measured in Mbps: `to` by peer, `up` and `down` of its own
line. Its standard input says, a line each, whom to `join ADDRESS`, whom to `meet PEER_ID` and whom to `send PEER_ID`
payloads from then on; it ends with that.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Set
from pathlib import Path

import uvloop

from fusion.cli.terminal.fast_imports import lean_imports
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.transport import PeerId, Stream, Transport

with lean_imports():
    from fusion.swarm.dht.directory import HivemindDirectory
    from fusion.swarm.links.monitor import LinkMonitor
    from fusion.swarm.streams.p2p import P2PTransport

SINK = "/fusion/sink/1"
PAYLOAD_BYTES = 256 * 1024


async def main(runtime_dir: Path, listen: str) -> None:
    identity = Identity.generate()
    config = P2PConfig(identity=identity, listen=(listen,), runtime_dir=runtime_dir)
    async with (
        P2PTransport.start(config) as transport,
        await HivemindDirectory.start(transport.p2p, identity) as directory,
        LinkMonitor(transport, directory, transport.counter.receive_log) as links,
    ):
        print(transport.addresses[0], flush=True)
        await transport.serve(SINK, take)
        met: set[PeerId] = set()
        tasks = [asyncio.create_task(tell(links, met), name="tell")]
        while order := (await asyncio.to_thread(sys.stdin.readline)).split():
            match order:
                case ["join", address]:
                    other = await transport.connect(address)
                    await directory.join(other)
                    met.add(other)
                case ["meet", peer]:
                    met.add(PeerId(peer))
                case ["send", peer]:
                    tasks.append(asyncio.create_task(send(transport, PeerId(peer)), name="send"))
        for task in tasks:
            task.cancel()


async def take(stream: Stream) -> None:
    stream.allow(PAYLOAD_BYTES)
    while True:
        await stream.receive()


async def send(transport: Transport, peer: PeerId) -> None:
    stream = await transport.open(peer, SINK)
    while True:
        await stream.send("payload", {}, [bytes(PAYLOAD_BYTES)])
        await asyncio.sleep(0.3)


async def tell(links: LinkMonitor, met: Set[PeerId]) -> None:
    while True:
        for peer in met:  # as one that reads the directory does: who is listed no more is forgotten
            links.meet(peer)
        known = {pair.peer: pair.mbps for pair in links.record().pairs}
        print(json.dumps({"to": known, "up": links.up_mbps, "down": links.down_mbps}), flush=True)
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2]))
