"""Liveness of a peer that sends nothing: one that is frozen, or whose machine sleeps, keeps its connections open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fusion.runtime.job.protocol import STATUS
from fusion.swarm.errors import PeerUnreachable, StreamBroken, StreamClosed, SwarmError
from fusion.swarm.identity import friendly_name
from fusion.swarm.transport import PeerId, Stream, Transport, call

# Without a frame, before the peer is pinged: a request may be queued, or wait for a takeover
SILENT_SECONDS = 10.0
PING_SECONDS = 5.0  # to say anything at all


@asynccontextmanager
async def watching_liveness(
    transport: Transport, peer: PeerId, stream: Stream
) -> AsyncIterator[Callable[[], None]]:
    """Watch `peer` while it sends small frames on `stream`. Yields a function to call at each frame. Raises StreamBroken where the peer
    neither sends one for SILENT_SECONDS nor answers a ping on another stream."""
    frames = 0

    def received() -> None:
        nonlocal frames
        frames += 1

    async def watch() -> None:
        while True:
            before = frames
            await asyncio.sleep(SILENT_SECONDS)
            if frames == before and not await _is_alive(transport, peer) and frames == before:
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


async def _is_alive(transport: Transport, peer: PeerId) -> bool:
    try:
        async with asyncio.timeout(PING_SECONDS):
            await call(transport, peer, STATUS.name, "status")
    except (PeerUnreachable, StreamBroken, StreamClosed, TimeoutError):
        return False
    except SwarmError:
        return True  # an error is a sign of life too
    return True
