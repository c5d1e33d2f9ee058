"""A process with a P2PTransport, for tests that kill one.

    python transport_child.py RUNTIME_DIR

Prints one JSON line {"address", "p2pd", "directory"} when it serves `/fusion/echo/1`. On SIGINT it ends gracefully:
it waits a moment, calls itself through p2pd's control socket, and prints "p2pd lived" if that worked.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import uvloop

from fusion.cli.terminal.fast_imports import lean_imports
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.transport import Stream

with lean_imports():
    from fusion.swarm.streams.p2p import P2PTransport


async def echo(stream: Stream) -> None:
    stream.allow(1 << 30)
    while True:
        frame = await stream.receive()
        await stream.send(frame.kind, frame.header, (frame.payload,))


async def main(runtime_dir: Path) -> None:
    config = P2PConfig(
        identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",), runtime_dir=runtime_dir
    )
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, asked.set)
    async with P2PTransport.start(config) as transport:
        await transport.serve("/fusion/echo/1", echo)
        daemon = transport._daemon
        about = {"address": transport.addresses[0], "p2pd": daemon.pid, "directory": str(daemon.directory)}
        print(json.dumps(about), flush=True)
        await asked.wait()
        await asyncio.sleep(0.3)
        os.kill(daemon.pid, 0)
        await transport.p2p.list_peers()
        print("p2pd lived", flush=True)


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))
