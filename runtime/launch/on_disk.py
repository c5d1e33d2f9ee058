"""Which peers have which blobs on their disks, by a request to each; a peer that does not reply counts as having none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from fusion.runtime.job.context import Context
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import SwarmError
from fusion.swarm.protocol import BLOB
from fusion.swarm.transport import PeerId, call

REPLY_SECONDS = 10.0  # for a peer to reply


async def on_disk(context: Context, places: Sequence[tuple[PeerId, Digest]]) -> list[bool]:
    """Whether each peer has that blob whole."""
    return list(await asyncio.gather(*(_has(context, peer, digest) for peer, digest in places)))


async def _has(context: Context, peer: PeerId, digest: Digest) -> bool:
    if peer == context.peer_id:
        return context.blobs.has(digest)
    with suppress(SwarmError, TimeoutError):
        async with asyncio.timeout(REPLY_SECONDS):
            await call(context.transport, peer, BLOB.name, "index", {"digest": digest})
            return True
    return False
