"""A process with a P2PTransport that prints what it sees of the streams that are opened to it. One process cannot load both
hivemind and py-libp2p, since both register the same protocol buffers.

    python thin_peer.py RUNTIME_DIR [SWARM_KEY]

A JSON line each: {"address"}, once it serves `/fusion/echo/1`; then {"from"} and {"end"} of each stream.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from fusion.cli.terminal.fast_imports import lean_imports
from fusion.swarm.errors import StreamBroken, StreamClosed
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.swarm_key import Authorizer
from fusion.swarm.transport import Stream

with lean_imports():
    from fusion.swarm.streams.p2p import P2PTransport


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def echo(stream: Stream) -> None:
    tell(**{"from": stream.remote})
    stream.allow(64 << 20)
    try:
        while (frame := await stream.receive()).kind != "bye":
            await stream.send(frame.kind, frame.header, [frame.payload])
    except (StreamBroken, StreamClosed) as error:
        tell(end=type(error).__name__)
        raise


async def main(runtime_dir: Path, key: Path | None) -> None:
    identity = Identity.generate()
    authorizer = None if key is None else Authorizer(Identity.load(key), identity.peer_id)
    config = P2PConfig(
        identity=identity, listen=("/ip4/127.0.0.1/tcp/0",), runtime_dir=runtime_dir, authorizer=authorizer
    )
    async with P2PTransport.start(config) as transport:
        await transport.serve("/fusion/echo/1", echo)
        tell(address=transport.addresses[0])
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, sys.stdin.read)  # to the end of whoever started us


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
