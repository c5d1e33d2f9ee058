from __future__ import annotations

import asyncio

import pytest
from directory_records import JOB, claim_record

from fusion.swarm.directory import RECORD_TTL_SECONDS
from fusion.swarm.election import winner
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity
from fusion.swarm.leases import LeaseConfig, Leases
from fusion.swarm.memory import ManualClock, MemoryDirectory, MemoryNetwork
from fusion.swarm.records import ClaimRecord, JobId

PROMPT = LeaseConfig(confirm_seconds=0)


class DistantDirectory(MemoryDirectory):
    """What it answers is a little old when it arrives, as over a real network."""

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        claims = await super().claims(job, stage)
        await asyncio.sleep(0)
        return claims


class Room:
    """Some peers, their directories and leases, and the clock they share."""

    def __init__(self, peers: int) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork()
        self.identities = [Identity.generate() for _ in range(peers)]
        self.directories = [DistantDirectory(self.network, i, self.clock) for i in self.identities]
        self.lost: list[list[ClaimRecord]] = [[] for _ in range(peers)]
        self.leases = [self.restart(peer) for peer in range(peers)]

    def restart(self, peer: int) -> Leases:
        identity, directory = self.identities[peer], self.directories[peer]
        return Leases(identity.peer_id, directory, PROMPT, on_lost=self.lost[peer].append)

    async def beat(self) -> None:
        self.clock.advance(1.0)
        for leases in self.leases:
            await leases.beat()


def test_a_claim_is_won_renewed_updated_and_released() -> None:
    async def scenario() -> None:
        room = Room(2)
        ours, theirs = room.leases
        claim = await ours.claim(JOB, 0, 1.0)
        assert claim is not None and claim.term == 1 and not claim.ready
        assert await ours.claim(JOB, 0, 1.0) == claim  # asking again changes nothing
        assert await theirs.claim(JOB, 0, 1.0) is None  # an owner is never challenged
        ours.update(JOB, 0, step=7, load=0.5, ready=True)
        for _ in range(10):  # far beyond one TTL
            await room.beat()
        seen = await theirs.owner(JOB, 0)
        assert seen is not None and (seen.step, seen.load, seen.ready) == (7, 0.5, True)
        assert ours.mine() == (seen,) and theirs.mine() == ()
        await ours.release(JOB, 0)
        assert await theirs.owner(JOB, 0) is None and ours.mine() == ()
        taken = await theirs.claim(JOB, 0, 0.3)
        assert taken is not None and taken.term == 2

    asyncio.run(scenario())


def test_a_dead_owner_s_stage_falls_vacant_and_the_next_term_is_higher() -> None:
    async def scenario() -> None:
        room = Room(2)
        dead, heir = room.leases
        first = await dead.claim(JOB, 0, 1.0)
        assert first is not None and await heir.owner(JOB, 0) == first
        room.clock.advance(RECORD_TTL_SECONDS)  # nobody renews
        assert await heir.owner(JOB, 0) is None
        # The claim and its term are gone from the directory, but not from the mind of who saw it.
        taken = await heir.claim(JOB, 0, 0.1)
        assert taken is not None and taken.term == 2

    asyncio.run(scenario())


def test_a_term_seen_in_a_frame_counts() -> None:
    async def scenario() -> None:
        (leases,) = Room(1).leases
        leases.observe(JOB, 3, 41)
        leases.observe(JOB, 3, 7)
        claim = await leases.claim(JOB, 3, 1.0)
        assert claim is not None and claim.term == 42

    asyncio.run(scenario())


def test_of_many_claiming_at_once_exactly_one_wins() -> None:
    async def scenario() -> None:
        room = Room(5)
        won = await asyncio.gather(*(leases.claim(JOB, 0, 0.5) for leases in room.leases))
        winners = [claim for claim in won if claim is not None]
        assert len(winners) == 1
        for leases in room.leases:
            owner = await leases.owner(JOB, 0)
            assert owner is not None and owner.peer == winners[0].peer
        # Those it beat may not have looked yet when they published: the winner's term is its own.
        assert winners[0].term == 2

    asyncio.run(scenario())


def test_the_proposed_peer_wins_a_race() -> None:
    async def scenario() -> None:
        room = Room(3)
        won = await asyncio.gather(
            *(leases.claim(JOB, 0, score) for leases, score in zip(room.leases, (0.4, 1.0, 0.9), strict=True))
        )
        assert [claim is not None for claim in won] == [False, True, False]

    asyncio.run(scenario())


def test_after_a_partition_one_owner_is_left_and_the_other_is_told() -> None:
    async def scenario() -> None:
        room = Room(2)
        one, two = room.leases
        ids = [identity.peer_id for identity in room.identities]
        first = await one.claim(JOB, 0, 1.0)
        assert first is not None
        await two.owner(JOB, 0)
        room.network.partition(ids[:1], ids[1:])
        for _ in range(int(RECORD_TTL_SECONDS) + 1):
            await room.beat()
        second = await two.claim(JOB, 0, 0.2)  # the minority's owner lives on, unseen
        assert second is not None and second.term == 2 and one.mine() == (first,)
        room.network.heal()
        await room.beat()
        await room.beat()
        assert one.mine() == () and two.mine() == (second,)
        assert room.lost == [[first], []]
        claims = await two.claims(JOB, 0)
        assert {c.peer: c.role for c in claims} == {ids[0]: "released", ids[1]: "owner"}

    asyncio.run(scenario())


def test_a_restarted_peer_takes_its_own_stage_again_at_a_higher_term() -> None:
    async def scenario() -> None:
        room = Room(1)
        before = await room.leases[0].claim(JOB, 0, 1.0)
        after = await room.restart(0).claim(JOB, 0, 1.0)
        assert before is not None and after is not None and after.term == before.term + 1

    asyncio.run(scenario())


def test_a_replayed_claim_changes_nothing() -> None:
    async def scenario() -> None:
        room = Room(2)
        ours, theirs = room.leases
        await ours.claim(JOB, 0, 1.0)
        (key,) = room.network.replicas[room.identities[0].peer_id]
        slot = room.network.replicas[room.identities[1].peer_id][key]
        old = dict(slot)
        await room.beat()
        await ours.release(JOB, 0)
        for subkey, (_, data) in old.items():
            room.network.store(room.identities[1].peer_id, key, subkey, data, room.clock.now)
        assert await theirs.owner(JOB, 0) is None

    asyncio.run(scenario())


def test_leases_renew_by_themselves_and_release_at_the_end() -> None:
    async def scenario() -> None:
        room = Room(2)
        identity, directory = room.identities[0], room.directories[0]
        config = LeaseConfig(heartbeat_seconds=0.005, confirm_seconds=0)
        async with Leases(identity.peer_id, directory, config) as leases:
            await leases.claim(JOB, 0, 1.0)
            leases.update(JOB, 0, ready=True)
            async with asyncio.timeout(5):
                while not winner(await room.directories[1].claims(JOB, 0)).ready:  # type: ignore[union-attr]
                    await asyncio.sleep(0.001)
        (claim,) = await room.directories[1].claims(JOB, 0)
        assert claim.role == "released" and not claim.ready
        await leases.aclose()  # once more does nothing

    asyncio.run(scenario())


def test_an_abandoned_claim_is_withdrawn() -> None:
    async def scenario() -> None:
        room = Room(2)
        slow = Leases(room.identities[0].peer_id, room.directories[0], LeaseConfig(confirm_seconds=60))
        task = asyncio.create_task(slow.claim(JOB, 0, 1.0))
        while await room.leases[1].owner(JOB, 0) is None:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await room.leases[1].owner(JOB, 0) is None and slow.mine() == ()

    asyncio.run(scenario())


def test_nobody_can_claim_in_another_s_name() -> None:
    async def scenario() -> None:
        room = Room(2)
        with pytest.raises(RecordError):
            await room.directories[0].publish(claim_record(room.identities[1]))

    asyncio.run(scenario())


def test_a_bad_heartbeat_is_refused() -> None:
    with pytest.raises(ValueError, match="heartbeat_seconds"):
        LeaseConfig(heartbeat_seconds=0)
