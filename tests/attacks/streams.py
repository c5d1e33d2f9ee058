"""What a stranger can do with streams alone, before anybody looks at who it is."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from attacks.hold import Attack
from attacks.stranger import Stranger, accomplices

from fusion.runtime.job.protocol import GENERATE, HOLD, JOB, RING, STAGE, STATUS
from fusion.swarm.errors import TransportError
from fusion.swarm.protocol import BLOB, PROBE
from fusion.swarm.transport import Stream

IDENTITIES = 8
STREAMS = 250  # of each identity, all to one peer
PROTOCOLS = [each.name for each in (STAGE, RING, GENERATE, JOB, HOLD, STATUS, BLOB, PROBE)]
AT_ONCE = 50
EMPTIES = 260_000  # bytes of a header, an empty map each


async def silent_streams(one: Stranger) -> dict[str, Any]:
    """Two thousand streams of eight identities to one peer, on which nothing is ever said; those that are hung up on
    are opened again."""
    victim, opened = one.peers[0], 0
    async with accomplices(one, IDENTITIES - 1) as all_of_us:
        held: list[Stream] = []

        async def open_one(each: Stranger, number: int) -> None:
            with suppress(TransportError, TimeoutError):
                async with asyncio.timeout(5.0):
                    held.append(await each.transport.open(victim, PROTOCOLS[number % len(PROTOCOLS)]))

        while one.time_left:
            for each in all_of_us:
                await one.pace()
                await asyncio.gather(*(open_one(each, number) for number in range(AT_ONCE)))
                opened = len(held)
            for stream in held[: -IDENTITIES * STREAMS]:
                stream.abort()
        for stream in held:
            stream.abort()
    return {"opened": opened}


async def empties(one: Stranger) -> dict[str, Any]:
    """Headers of a quarter of a million empty maps: 64 bytes of memory for each on the wire."""
    sent = 0
    while one.time_left:
        for protocol in PROTOCOLS:
            await one.pace()
            with suppress(TransportError, TimeoutError):
                async with asyncio.timeout(5.0):
                    stream = await one.transport.open(one.peers[0], protocol)
                    for _ in range(4):
                        await stream.send("hello", {"a": [{}] * EMPTIES})
                        sent += 1
    return {"sent": sent}


ATTACKS = {
    "silent_streams": Attack(silent_streams, seconds=30.0),
    "empties": Attack(empties, seconds=15.0),
}
