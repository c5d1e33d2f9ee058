"""Frames between two peers, both ways at once, over as many lanes as a training link has.

    python tests/bench/frame_flow.py serve ADDRESS                          prints its full multiaddr
    python tests/bench/frame_flow.py exchange ADDRESS MULTIADDR             prints a line when it is ready; then, for
                                                                            each line "SIZE COUNT" of its input, seconds

Both end with their standard input. A payload goes there and comes back as soon as it is there; WINDOW are under way.
The seconds are those between the first third of the payloads and the last.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from fusion.runtime.job.protocol import STAGE
from fusion.swarm.identity import Identity
from fusion.swarm.streams.p2p import P2PTransport
from fusion.swarm.streams.p2p_config import P2PConfig
from fusion.swarm.transport import Stream

PROTOCOL = "/fusion/flow/1"
WINDOW = 3  # about what 1F1B has under way between two stages


async def echo(stream: Stream) -> None:
    stream.allow(1 << 30)
    while True:
        frame = await stream.receive()
        await stream.send(frame.kind, frame.header, (frame.payload,))


async def exchange(stream: Stream, size: int, count: int) -> float:
    free, ends, payload = asyncio.Semaphore(WINDOW), [], bytes(size)

    async def send() -> None:
        for _ in range(count):
            await free.acquire()
            await stream.send("x", {}, (payload,))

    sending = asyncio.create_task(send())
    for _ in range(count):
        await stream.receive()
        ends.append(time.monotonic())
        free.release()
    await sending
    return (ends[-1] - ends[count // 3]) * count / (count - 1 - count // 3)


async def main(role: str, address: str, *other: str) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    with tempfile.TemporaryDirectory(prefix="flow-") as place:
        config = P2PConfig(
            identity=Identity.generate(), listen=(f"/ip4/{address}/tcp/0",), runtime_dir=Path(place)
        )
        async with P2PTransport.start(config) as transport:
            await transport.serve(PROTOCOL, echo)
            if role == "serve":
                print(next(a for a in transport.addresses if f"/{address}/" in a), flush=True)
                await lines.read()
                return
            stream = await transport.open(await transport.connect(other[0]), PROTOCOL, stripes=STAGE.stripes)
            print("ready", flush=True)
            while line := await lines.readline():
                size, count = map(int, line.split())
                print(await exchange(stream, size, count), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
