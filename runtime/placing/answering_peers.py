"""The peers that jobs are placed on: those that answer. Anybody may publish records of peers that do not exist, by the thousand and
with more memory than all others; no other peer could hold a stage that is cut for one of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

from fusion.runtime.job.context import Context
from fusion.runtime.job.protocol import STATUS
from fusion.swarm.cancelling import cancel_all
from fusion.swarm.directory.membership import Neighbourhood
from fusion.swarm.directory.records import PeerRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId, call

PROBED = 256  # peers; as many as a job is placed on
PROBED_AT_ONCE = 64
ANSWERS_SECONDS = 10.0  # for all of them; a loaded machine may take seconds to accept a stream


async def answering_peers(
    context: Context, listed: Sequence[PeerRecord], wanted: Sequence[str] = ()
) -> tuple[PeerRecord, ...]:
    """Of the `listed` peers those that answer, and those `wanted` (ids or names); all of them where none answers."""
    directory = context.directory
    near = frozenset(directory.neighbours()) if isinstance(directory, Neighbourhood) else frozenset()
    slots, answered = asyncio.Semaphore(PROBED_AT_ONCE), set[PeerId]()

    async def probe(peer: PeerId) -> None:
        async with slots:
            with suppress(SwarmError):
                await call(context.transport, peer, STATUS.name, "status")
                answered.add(peer)

    # Neighbours in the DHT first: among thousands of false records a random sample would hardly contain them.
    order = sorted(random.sample(listed, len(listed)), key=lambda record: record.peer not in near)
    probes = [asyncio.create_task(probe(record.peer)) for record in order[:PROBED]]
    try:
        if probes:
            await asyncio.wait(probes, timeout=ANSWERS_SECONDS)
    finally:
        await cancel_all(probes)
    named = set(wanted)
    found = (record for record in listed if record.peer in answered or {record.peer, record.name} & named)
    return tuple(found) or tuple(listed)
