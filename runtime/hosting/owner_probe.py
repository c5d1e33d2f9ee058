"""A probe of whether an owner is there and holds its stage."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Literal

from fusion.runtime.hosting.hold_frames import whole
from fusion.runtime.job.protocol import HOLD
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import PeerUnreachable, StreamBroken, StreamClosed, SwarmError
from fusion.swarm.transport import PeerId, Transport, call

log = logging.getLogger(__name__)

ATTEMPTS = 2  # to reach an owner, before it counts as gone


@dataclass(frozen=True)
class Sign:
    """The result of a probe: the peer holds the stage (under `term`), it is gone, or it does not answer in time."""

    kind: Literal["holds", "gone", "silent"]
    term: int = 0


GONE = Sign("gone")
SILENT = Sign("silent")


class OwnerProbe:
    """`check_seconds`: for an owner to answer."""

    def __init__(self, transport: Transport, check_seconds: float) -> None:
        self._transport = transport
        self._check_seconds = check_seconds

    async def look(self, peer: PeerId, job: JobId, stage: int) -> Sign:
        """Whether `peer` holds the stage, by a request to it. On a busy machine a connection may break although both ends live: a
        peer is gone only if it cannot be reached over a new one either."""
        for _ in range(ATTEMPTS):
            try:
                term = await self._request_term(peer, job, stage)
            except (PeerUnreachable, StreamBroken, StreamClosed) as error:
                log.debug("%s is gone: %s", peer, error)
                continue
            except (SwarmError, ValueError, TimeoutError):
                return SILENT
            return Sign("holds", term) if term > 0 else GONE
        return GONE

    async def answers(self, peer: PeerId, job: JobId, stage: int) -> bool:
        """Whether `peer` answers at all."""
        try:
            await self._request_term(peer, job, stage)
        except (SwarmError, ValueError, TimeoutError):
            return False
        return True

    async def _request_term(self, peer: PeerId, job: JobId, stage: int) -> int:
        async with asyncio.timeout(self._check_seconds):
            reply = await call(self._transport, peer, HOLD.name, "holds", {"job": job, "stage": stage})
        return whole(reply.header.get("term"))
