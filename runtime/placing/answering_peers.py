"""On whom jobs are placed: peers that answer. Anybody may list peers that there are not, by the thousand and with more memory than
all others have; what is cut for one of them nobody else could hold."""

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

ASKED = 256  # peers, whether they are there; as many as a job is placed on
ASKED_AT_ONCE = 64
ANSWERS_SECONDS = 10.0  # for all of them; a loaded machine may take seconds to take a stream


async def answering_peers(
    context: Context, listed: Sequence[PeerRecord], wanted: Sequence[str] = ()
) -> tuple[PeerRecord, ...]:
    """Of the `listed` peers those that answer, and those `wanted` (ids or names); all of them where none answers."""
    directory = context.directory
    near = frozenset(directory.neighbours()) if isinstance(directory, Neighbourhood) else frozenset()
    turns, there = asyncio.Semaphore(ASKED_AT_ONCE), set[PeerId]()

    async def ask(peer: PeerId) -> None:
        async with turns:
            with suppress(SwarmError):
                await call(context.transport, peer, STATUS.name, "status")
                there.add(peer)

    # Those first whom we have met on our way in: among thousands that are only listed they would hardly be found.
    order = sorted(random.sample(listed, len(listed)), key=lambda record: record.peer not in near)
    asking = [asyncio.create_task(ask(record.peer)) for record in order[:ASKED]]
    try:
        if asking:
            await asyncio.wait(asking, timeout=ANSWERS_SECONDS)
    finally:
        await cancel_all(asking)
    named = set(wanted)
    found = (record for record in listed if record.peer in there or {record.peer, record.name} & named)
    return tuple(found) or tuple(listed)
