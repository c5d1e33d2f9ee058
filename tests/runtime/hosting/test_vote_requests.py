"""Votes that others ask us for."""

from __future__ import annotations

import asyncio
from typing import Any

from support.directory_records import JOB

from fusion.runtime.hosting.idle_owners import IdleOwners
from fusion.runtime.hosting.owner_probe import GONE, Sign
from fusion.runtime.hosting.vote_requests import VoteRequests
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.claims.tenure import CONTEST_SECONDS, Holding
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork


class Nobody:
    """An owner's probe that finds nobody there."""

    async def look(self, *_: Any) -> Sign:
        return GONE


def test_a_voter_knows_a_holder_that_followed_by_the_vote_of_one_that_has_just_come() -> None:
    async def main() -> None:
        clock, network = ManualClock(), MemoryNetwork()
        old, holder, before, after, voter, successor = peers = [
            Leases(
                identity.peer_id, MemoryDirectory(network, identity, clock), LeaseConfig(confirm_seconds=0)
            )
            for identity in (Identity.generate() for _ in range(6))
        ]
        for peer in peers:
            peer.know(JobLaw(job=JOB, author=old.peer_id, stages=3))
        for stage, peer in enumerate((old, before, voter)):
            assert await peer.claim(JOB, stage, 1.0) is not None
        await voter.claims_of(JOB, (0, 1, 2))
        clock.advance(CONTEST_SECONDS + 1.0)
        for peer in (old, voter):
            await peer.beat()
        await before.release(JOB, 1)
        assert await after.claim(JOB, 1, 1.0) is not None
        votes = tuple(p.voting.vote(JOB, 0, Holding(old.peer_id, 1), holder.peer_id) for p in (after, voter))
        claim = await holder.claim(JOB, 0, 1.0, over=1, proof=votes, confirm=False)
        assert claim is not None and voter.known_holder(JOB, 1) == before.peer_id
        requests: Any = VoteRequests(None, voter, Nobody(), 1.0, IdleOwners(lambda: 0.0))  # type: ignore[arg-type]
        gone = Holding(holder.peer_id, claim.term)
        vote = await requests.vote((JOB, 0), gone, successor.peer_id)
        assert voter.voting.is_vote(JOB, 0, gone, successor.peer_id, voter.peer_id, vote)

    asyncio.run(main())
