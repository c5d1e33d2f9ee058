"""Votes that the holder of a stage is gone (`fusion.swarm.claims.voting`): requests them from the stage's voters, and gives this
peer's own vote, by its own probe."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from fusion.runtime.belief.shared_work import SharedWork
from fusion.runtime.hosting.hold_frames import claim_bytes
from fusion.runtime.hosting.idle_owners import IdleOwners
from fusion.runtime.hosting.owner_probe import OwnerProbe
from fusion.runtime.hosting.single_flight import SingleFlight
from fusion.runtime.job.protocol import HOLD
from fusion.swarm.cancelling import cancel_all
from fusion.swarm.claims.election import stands_by, winner
from fusion.swarm.claims.leases import Leases
from fusion.swarm.claims.tenure import NEVER, Holding
from fusion.swarm.directory.records import MAX_PROOFS, ClaimRecord, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.transport import PeerId, Transport, call

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.3  # for the directory, where claims of a heartbeat ago may do
# For which a stage's claims, once read, are used for all requests for our vote on it and offers of it, whatever term they name.
READ_SECONDS = 0.2
MORE_VOTES_SECONDS = 0.3  # for votes beyond those that prove it to us: others may know of more voters
OWN_VOTE_SECONDS = 0.1  # for our own probe of an owner, before we report it without our vote


class VoteRequests:
    """Of all stages. `check_seconds`: for an owner to answer a probe; a voter, who probes first, has twice that."""

    def __init__(
        self,
        transport: Transport,
        leases: Leases,
        probe: OwnerProbe,
        check_seconds: float,
        idle: IdleOwners,
    ) -> None:
        self._transport = transport
        self._leases = leases
        self._voting = leases.voting
        self._probe = probe
        self._idle = idle
        self._vote_seconds = 2 * check_seconds
        self._flights = SingleFlight()
        self._reads: SharedWork[Place, tuple[ClaimRecord, ...]] = SharedWork(time.monotonic, READ_SECONDS)

    async def read(self, place: Place) -> tuple[ClaimRecord, ...]:
        """The claims of a stage, at most READ_SECONDS old; the known ones where the directory does not answer in time."""
        return await self._reads.get(place, lambda: self._leases.claims_or_recent(*place, PATIENCE_SECONDS))

    async def collect(self, place: Place, holding: Holding, given: Sequence[bytes] = ()) -> tuple[bytes, ...]:
        """The voters' votes against the holder of a stage and for us, with at most one valid vote of `given`. Ends once they
        prove it to all peers; else gives those that arrived in time."""
        voters = self._voting.voters(*place, holding.peer)
        return await self._request_all(place, holding, voters, self._valid(place, holding, given)[:1])

    def _valid(self, place: Place, holding: Holding, given: Sequence[bytes]) -> list[bytes]:
        """Those that voters gave for us. Strangers send reports, too, and other peers stop reading our claim's votes at the first
        forgery."""
        us, voters = self._leases.peer_id, self._voting.voters(*place, holding.peer)
        return [v for v in given if any(self._voting.is_vote(*place, holding, us, w, v) for w in voters)]

    def is_voted_against(self, place: Place, holding: Holding, given: Sequence[bytes]) -> bool:
        """Whether a voter votes against the holder, even if that answers: by one of `given`, or we ourselves do."""
        return self._idle.has(place, holding) or bool(self._valid(place, holding, given))

    async def collect_from_new_voters(
        self, place: Place, holding: Holding, votes: Sequence[bytes]
    ) -> tuple[bytes, ...]:
        """`votes`, which do not prove it to all peers, and those of voters that we did not know of: a stage may have a new holder,
        or we have never read its claims. Reads the claims of the stages without a vote again. Only against a holder that our
        own probe found gone: it reads up to eight stages, which a mere report must not cost us."""
        us = self._leases.peer_id
        without_vote = self._voting.stages_without_vote(*place, holding, us, votes)
        await asyncio.gather(*(self.read((place[0], stage)) for stage in without_vote))
        voters = self._voting.voters(*place, holding.peer)
        left = [w for w in voters if not any(self._voting.is_vote(*place, holding, us, w, v) for v in votes)]
        return await self._request_all(place, holding, left, votes)

    async def look_at_voters(self, place: Place, claimant: PeerId | None = None) -> bool:
        """Read the claims of the `stages_to_reread` (`fusion.swarm.claims.voting`): up to eight, which a report costs us only for a
        peer that claims the stage with votes. Whether there are any."""
        in_doubt = self._voting.stages_to_reread(*place, claimant)
        await asyncio.gather(*(self.read((place[0], stage)) for stage in in_doubt))
        return bool(in_doubt)

    async def _request_all(
        self, place: Place, holding: Holding, voters: Sequence[PeerId], given: Sequence[bytes]
    ) -> tuple[bytes, ...]:
        """The votes `given` and those of the voters, until they prove it to all peers."""
        us, votes = self._leases.peer_id, list(given)
        pending = {asyncio.ensure_future(self._request(voter, place, holding)) for voter in voters}
        now = asyncio.get_running_loop().time
        deadline, proven = now() + self._vote_seconds, False
        try:
            while pending and not self._voting.is_proof_to_all(*place, holding, us, votes):
                if not proven and self._voting.is_proof(*place, holding, us, votes):
                    proven, deadline = True, min(deadline, now() + MORE_VOTES_SECONDS)
                left = max(0.0, deadline - now())
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                votes += [vote for task in done if (vote := task.result())]
                if not done:
                    break
            return tuple(votes[:MAX_PROOFS])
        finally:
            await cancel_all(pending)

    async def vote(self, place: Place, holding: Holding, successor: PeerId) -> bytes:
        """Our signed vote that the holder of the stage is gone and `successor` is to follow; empty where we are no voter, or the
        holder is there by our own probe."""
        leases = self._leases
        if leases.peer_id not in self._voting.voters(*place, holding.peer):
            return b""
        held = leases.tenure(*place)
        if held is None or held.holding != holding:
            # We may not have read its claim yet, or not those of the voters that it followed by.
            await self.read(place)
            await self.look_at_voters(place, holding.peer)
            held = leases.tenure(*place)
        owner = winner(leases.recent(*place))
        if held is None:
            return b""
        # Of several peers that claimed a vacant stage under one term, others may take another one for its owner than we do.
        if held.holding.term == holding.term and self._idle.has(place, held.holding):
            if not await self._is_ready(place, successor):
                return b""
        elif held.holding == holding:
            if held.until != NEVER:  # it has not released the stage itself
                sign = await self._flights.once(
                    (place, holding), lambda: self._probe.look(holding.peer, *place)
                )
                if sign.kind == "holds" or (sign.kind == "silent" and owner is not None):
                    return b""
        elif held.claim.peer != successor or held.claim.term < holding.term:
            return b""
        return self._voting.vote(*place, holding, successor)

    async def _is_ready(self, place: Place, successor: PeerId) -> bool:
        """Whether that peer claims to have the stage in memory: a slow owner is not replaced by one that is not ready."""
        return _is_ready(self._leases.recent(*place), successor) or _is_ready(
            await self.read(place), successor
        )

    async def vote_soon(self, place: Place, holding: Holding, successor: PeerId) -> bytes:
        """Our vote for a report; empty where our probe of the holder takes longer than OWN_VOTE_SECONDS."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OWN_VOTE_SECONDS):
                return await self.vote(place, holding, successor)
        return b""

    async def _request(self, voter: PeerId, place: Place, holding: Holding) -> bytes:
        us = self._leases.peer_id
        if voter == us:
            return await self.vote(place, holding, us)
        header = {"job": place[0], "stage": place[1], "peer": holding.peer, "term": holding.term}
        try:
            async with asyncio.timeout(self._vote_seconds):
                reply = await call(self._transport, voter, HOLD.name, "gone", header)
            vote = claim_bytes(reply.header.get("word"))
        except (SwarmError, ValueError, TimeoutError) as error:
            log.debug("%s has no vote on stage %d of job %.8s: %s", voter, place[1], place[0], error)
            return b""
        return vote if self._voting.is_vote(*place, holding, us, voter, vote) else b""


def _is_ready(claims: Sequence[ClaimRecord], peer: PeerId) -> bool:
    return any(claim.peer == peer and stands_by(claim) and claim.ready for claim in claims)
