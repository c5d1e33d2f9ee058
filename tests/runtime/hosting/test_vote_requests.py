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
from fusion.swarm.directory.records import ClaimRecord, JobId
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


def test_who_held_a_stage_and_began_anew_releases_it_and_none_that_it_has_or_may_come_to() -> None:
    async def main() -> None:
        clock, network = ManualClock(), MemoryNetwork()
        identity, other = Identity.generate(), Identity.generate()

        read: list[tuple[str, int]] = []

        class Watched(MemoryDirectory):
            async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
                read.append((job, stage))
                return await super().claims(job, stage)

        def leases(of: Identity, confirm_seconds: float = 0.0) -> Leases:
            config = LeaseConfig(confirm_seconds=confirm_seconds)
            made = Leases(of.peer_id, Watched(network, of, clock), config)
            made.know(JobLaw(job=JOB, author=identity.peer_id, stages=3))
            return made

        def requests(of: Leases) -> Any:
            return VoteRequests(None, of, Nobody(), 1.0, IdleOwners(lambda: 0.0))  # type: ignore[arg-type]

        holder, successor = leases(identity), leases(other)
        for stage in (0, 1):
            assert await holder.claim(JOB, stage, 1.0) is not None
        held = Holding(identity.peer_id, 1)
        await successor.claims(JOB, 0)
        clock.advance(CONTEST_SECONDS + 1.0)
        await holder.beat()
        assert await requests(holder).vote((JOB, 0), held, other.peer_id) == b""
        assert await successor.claim(JOB, 0, 1.0, over=1) is None
        anew = leases(identity)
        assert await requests(anew).vote((JOB, 0), Holding(identity.peer_id, 2), other.peer_id) == b""
        assert await requests(anew).vote((JOB, 2), held, other.peer_id) == b""  # nobody has held that one
        read.clear()
        for place in ((JOB, 3), ("f" * 64, 0)):  # there is no such place, as far as we know: nothing is read
            assert await requests(anew).vote(place, held, other.peer_id) == b"" and not read
        vote = await requests(anew).vote((JOB, 0), held, other.peer_id)
        assert await anew.claim(JOB, 0, 1.0) is None  # or two would follow the same holding
        assert await successor.claim(JOB, 0, 1.0, over=1, proof=(vote,)) is not None
        assert (await anew.owner(JOB, 0)).peer == other.peer_id  # type: ignore[union-attr]
        seeking = leases(identity, confirm_seconds=0.2)
        claiming = asyncio.create_task(seeking.claim(JOB, 1, 1.0))
        await asyncio.sleep(0.05)
        for term in (1, 2):
            holding = Holding(identity.peer_id, term)
            assert await requests(seeking).vote((JOB, 1), holding, other.peer_id) == b""
        assert (claim := await claiming) is not None and claim.term == 2

    asyncio.run(main())
