"""Which peers have which blobs on their disks: they are asked, and who does not say has none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from fusion.runtime.job.context import Context
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import SwarmError
from fusion.swarm.protocol import BLOB
from fusion.swarm.transport import PeerId, call

ASKED_SECONDS = 10.0  # for which a peer may be silent


async def on_disk(context: Context, places: Sequence[tuple[PeerId, Digest]]) -> list[bool]:
    """Whether each peer has that blob whole."""
    return list(await asyncio.gather(*(_has(context, peer, digest) for peer, digest in places)))


async def _has(context: Context, peer: PeerId, digest: Digest) -> bool:
    if peer == context.peer_id:
        return context.blobs.has(digest)
    with suppress(SwarmError, TimeoutError):
        async with asyncio.timeout(ASKED_SECONDS):
            await call(context.transport, peer, BLOB.name, "index", {"digest": digest})
            return True
    return False
