"""The transfer of one stage from its owner to a successor: the owner sends its signed release and its handover, the successor
replies with its claim. `handover` decides which stages, to whom and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgpack

from fusion.runtime.hosting.hold_frames import claim_bytes, credited
from fusion.runtime.job.context import StageHolder
from fusion.runtime.job.protocol import HOLD
from fusion.swarm.claims.election import winner
from fusion.swarm.claims.leases import Leases
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import ClaimRecord, JobId, Place
from fusion.swarm.errors import RecordError, SwarmError
from fusion.swarm.printable import one_line
from fusion.swarm.transport import PeerId, Transport, call

log = logging.getLogger(__name__)

MAX_HANDOVER_BYTES = 16 * 1024
ANSWER_SECONDS = 4.0  # for a successor to probe, claim and reply


class Transfer:
    """From this peer to another, and from another to this one. `read` gives the claims of a stage."""

    def __init__(
        self,
        transport: Transport,
        leases: Leases,
        read: Callable[[Place], Awaitable[tuple[ClaimRecord, ...]]],
    ) -> None:
        self._transport = transport
        self._leases = leases
        self._read = read

    async def give(
        self, job: JobId, stage: int, term: int, handover: Mapping[str, Any], order: Sequence[PeerId]
    ) -> ClaimRecord | None:
        """Give the stage, which we own under `term`, to the first of these peers that takes it; gives its claim, None where none
        does. A cancelled call still waits for the reply to the last offer, as that peer has our release."""
        leases = self._leases
        header: dict[str, Any] = {"job": job, "stage": stage, "term": term, "handover": dict(handover)}
        if len(msgpack.packb(header)) > MAX_HANDOVER_BYTES:
            log.warning("stage %d of job %.8s: too much to hand over", stage, job)
            return None
        for peer in order:
            vote = leases.voting.vote(job, stage, Holding(leases.peer_id, term), peer)
            offer = asyncio.create_task(self._offer(peer, (job, stage), {**header, "word": vote}))
            try:
                claim = await asyncio.shield(offer)
            except asyncio.CancelledError:
                await asyncio.wait([offer])
                raise
            if claim is not None:
                return claim
        return None

    async def _offer(self, peer: PeerId, place: Place, header: Mapping[str, Any]) -> ClaimRecord | None:
        """The claim of the stage's next owner, after the reply of `peer` or its timeout; None where we still own the stage."""
        leases = self._leases
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reply = await call(self._transport, peer, HOLD.name, "take", header)
            if reply.kind == "taking":
                claim = credited(leases, place, claim_bytes(reply.header.get("claim")))
                if claim.peer != peer:
                    raise RecordError(f"it shows the claim of {claim.peer}")
                return claim
            reason = str(reply.header.get("message", "refused"))
        except (SwarmError, ValueError, TimeoutError) as error:
            reason = str(error) or "no answer"
            owner = winner(await self._read(place))
            if owner is not None and owner.peer != leases.peer_id:
                return owner  # it took the stage, and its answer was lost
        log.info("stage %d of job %.8s not handed to %s: %s", place[1], place[0], peer, one_line(reason))
        return None

    async def take(
        self,
        holder: StageHolder | None,
        remote: PeerId,
        place: Place,
        term: int,
        handover: object,
        vote: bytes,
    ) -> str | None:
        """Have `holder` claim the stage that `remote` gives us, by its release `vote`. Gives the reason of a refusal, or None."""
        leases = self._leases
        if holder is None or not isinstance(handover, dict):
            return "nothing is taken over here"
        if len(msgpack.packb(handover)) > MAX_HANDOVER_BYTES:
            return f"a handover is at most {MAX_HANDOVER_BYTES} bytes"
        if leases.access.law(place[0]) is None:
            return "nothing is known of that job here"
        released = Holding(remote, term)
        if not _holds(released, leases.recent(*place)) and not _holds(released, await self._read(place)):
            return f"{remote} does not own the stage under term {term}"
        if not leases.voting.is_proof(*place, released, leases.peer_id, (vote,)):
            return f"{remote} has not released the stage"
        await holder.take_over(*place, term, handover, (vote,))
        return None


def _holds(holding: Holding, claims: Sequence[ClaimRecord]) -> bool:
    """Whether `holding` is the owner, with its term, by these claims."""
    owner = winner(claims)
    return owner is not None and (owner.peer, owner.term) == holding
