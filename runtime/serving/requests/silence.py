"""A peer that is frozen, or whose machine sleeps, keeps its connections: who waits for its answer has to ask whether it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fusion.runtime.job.protocol import STATUS
from fusion.swarm.errors import PeerUnreachable, StreamBroken, StreamClosed, SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import PeerId, Stream, Transport, call

# Without a frame: an answer may wait for its turn, or for a stage that somebody else takes over
SILENT_SECONDS = 10.0
THERE_SECONDS = 5.0  # to say anything at all


@asynccontextmanager
async def listening(transport: Transport, peer: PeerId, stream: Stream) -> AsyncIterator[Callable[[], None]]:
    """While `peer` answers on `stream`, in frames that take no time to send. Gives what is to be called at each. Raises StreamBroken
    where the peer neither sends one for SILENT_SECONDS nor says on another stream that it is there."""
    frames = 0

    def received() -> None:
        nonlocal frames
        frames += 1

    async def watch() -> None:
        while True:
            before = frames
            await asyncio.sleep(SILENT_SECONDS)
            if frames == before and not await _is_there(transport, peer) and frames == before:
                break
        stream.abort()

    watching = asyncio.create_task(watch())
    try:
        yield received
    except (StreamClosed, StreamBroken):
        if watching.done():
            raise StreamBroken(
                f"{friendly_name(peer)} is silent, and does not say whether it is there"
            ) from None
        raise
    finally:
        watching.cancel()


async def _is_there(transport: Transport, peer: PeerId) -> bool:
    try:
        async with asyncio.timeout(THERE_SECONDS):
            await call(transport, peer, STATUS.name, "status")
    except (PeerUnreachable, StreamBroken, StreamClosed, TimeoutError):
        return False
    except SwarmError:
        return True  # whatever it says
    return True
