"""Votes on who holds a stage, from those whose vote counts: theirs asked for, ours given where we have seen for ourselves
(`fusion.swarm.claims.voting`)."""

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

PATIENCE_SECONDS = 0.3  # for the directory, where what it said a heartbeat ago may do
# For which what was read of a stage does for all who ask for our vote on it, or give it to us, with any term that they like.
READ_SECONDS = 0.2
MORE_VOTES_SECONDS = 0.3  # for votes beyond those that prove it to us: others may know of more voters
OWN_VOTE_SECONDS = 0.1  # for our own look at an owner, before we report it without our vote


class VoteRequests:
    """Of all stages. `check_seconds`: for an owner that is there to say so; a voter, who looks first, has twice that."""

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
        self._ask_seconds = 2 * check_seconds
        self._flights = SingleFlight()
        self._reads: SharedWork[Place, tuple[ClaimRecord, ...]] = SharedWork(time.monotonic, READ_SECONDS)

    async def read(self, place: Place) -> tuple[ClaimRecord, ...]:
        """The claims of a stage as of a moment ago at most; what we knew of them where the directory does not answer soon."""
        return await self._reads.get(place, lambda: self._leases.claims_or_recent(*place, PATIENCE_SECONDS))

    async def collect(self, place: Place, holding: Holding, given: Sequence[bytes] = ()) -> tuple[bytes, ...]:
        """What the voters say against the holder of a stage, in our favour, and of `given` one that a voter gave; no more than
        prove it to all, and what came soon where they do not."""
        voters = self._voting.voters(*place, holding.peer)
        return await self._ask_all(place, holding, voters, self._true(place, holding, given)[:1])

    def _true(self, place: Place, holding: Holding, given: Sequence[bytes]) -> list[bytes]:
        """Those that voters gave in our favour. Strangers report too, and behind one forgery in our claim nobody would read the true
        votes."""
        us, voters = self._leases.peer_id, self._voting.voters(*place, holding.peer)
        return [v for v in given if any(self._voting.is_vote(*place, holding, us, w, v) for w in voters)]

    def is_voted_against(self, place: Place, holding: Holding, given: Sequence[bytes]) -> bool:
        """Whether one of the voters says that the holder is gone, whatever it answers: by one of `given`, or we ourselves do."""
        return self._idle.has(place, holding) or bool(self._true(place, holding, given))

    async def collect_after_a_look(
        self, place: Place, holding: Holding, votes: Sequence[bytes]
    ) -> tuple[bytes, ...]:
        """As `collect`, where `votes` came and do not prove it to all: a voter may have followed another a moment ago, and we may
        never have read who holds a stage. Who holds the stages that had no vote is read again, and whoever is a voter then and
        gave none is asked. For a holder that we have seen to be gone: it reads up to eight stages, which no report alone may
        cost us."""
        us = self._leases.peer_id
        without_vote = self._voting.stages_without_vote(*place, holding, us, votes)
        await asyncio.gather(*(self.read((place[0], stage)) for stage in without_vote))
        voters = self._voting.voters(*place, holding.peer)
        left = [w for w in voters if not any(self._voting.is_vote(*place, holding, us, w, v) for v in votes)]
        return await self._ask_all(place, holding, left, votes)

    async def look_at_voters(self, place: Place, claimant: PeerId | None = None) -> bool:
        """Read who holds the `stages_to_reread` (`fusion.swarm.claims.voting`): up to eight, which a report costs us only for a peer
        that claims the stage with votes. Whether there are any."""
        in_doubt = self._voting.stages_to_reread(*place, claimant)
        await asyncio.gather(*(self.read((place[0], stage)) for stage in in_doubt))
        return bool(in_doubt)

    async def _ask_all(
        self, place: Place, holding: Holding, voters: Sequence[PeerId], given: Sequence[bytes]
    ) -> tuple[bytes, ...]:
        """The votes `given` and those of the voters, until they prove it to all."""
        us, votes = self._leases.peer_id, list(given)
        asking = {asyncio.ensure_future(self._ask(voter, place, holding)) for voter in voters}
        now = asyncio.get_running_loop().time
        deadline, proven = now() + self._ask_seconds, False
        try:
            while asking and not self._voting.is_proof_to_all(*place, holding, us, votes):
                if not proven and self._voting.is_proof(*place, holding, us, votes):
                    proven, deadline = True, min(deadline, now() + MORE_VOTES_SECONDS)
                left = max(0.0, deadline - now())
                done, asking = await asyncio.wait(asking, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                votes += [vote for task in done if (vote := task.result())]
                if not done:
                    break
            return tuple(votes[:MAX_PROOFS])
        finally:
            await cancel_all(asking)

    async def vote(self, place: Place, holding: Holding, successor: PeerId) -> bytes:
        """Our vote that the holder of the stage is gone and `successor` is to follow, if ours counts and we see that; else
        nothing."""
        leases = self._leases
        if leases.peer_id not in self._voting.voters(*place, holding.peer):
            return b""
        held = leases.tenure(*place)
        if held is None or held.holding != holding:
            # It may be that we have not heard of it yet, or not of those by whose votes it followed.
            await self.read(place)
            await self.look_at_voters(place, holding.peer)
            held = leases.tenure(*place)
        owner = winner(leases.recent(*place))
        if held is None:
            return b""
        # Of several who came to a vacant stage under one term others may go by another one than we do.
        if held.holding.term == holding.term and self._idle.has(place, held.holding):
            if not await self._is_ready(place, successor):
                return b""
        elif held.holding == holding:
            if held.until != NEVER:  # it has not said so itself
                sign = await self._flights.once(
                    (place, holding), lambda: self._probe.look(holding.peer, *place)
                )
                if sign.kind == "holds" or (sign.kind == "silent" and owner is not None):
                    return b""
        elif held.claim.peer != successor or held.claim.term < holding.term:
            return b""
        return self._voting.vote(*place, holding, successor)

    async def _is_ready(self, place: Place, successor: PeerId) -> bool:
        """Whether that peer says that it has the stage in memory: a slow owner does not lose it to nobody."""
        return _is_ready(self._leases.recent(*place), successor) or _is_ready(
            await self.read(place), successor
        )

    async def vote_soon(self, place: Place, holding: Holding, successor: PeerId) -> bytes:
        """Our vote for a report, if we have seen soon enough that the holder is gone."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OWN_VOTE_SECONDS):
                return await self.vote(place, holding, successor)
        return b""

    async def _ask(self, voter: PeerId, place: Place, holding: Holding) -> bytes:
        us = self._leases.peer_id
        if voter == us:
            return await self.vote(place, holding, us)
        header = {"job": place[0], "stage": place[1], "peer": holding.peer, "term": holding.term}
        try:
            async with asyncio.timeout(self._ask_seconds):
                reply = await call(self._transport, voter, HOLD.name, "gone", header)
            vote = claim_bytes(reply.header.get("word"))
        except (SwarmError, ValueError, TimeoutError) as error:
            log.debug("%s has no vote on stage %d of job %.8s: %s", voter, place[1], place[0], error)
            return b""
        return vote if self._voting.is_vote(*place, holding, us, voter, vote) else b""


def _is_ready(claims: Sequence[ClaimRecord], peer: PeerId) -> bool:
    return any(claim.peer == peer and stands_by(claim) and claim.ready for claim in claims)
