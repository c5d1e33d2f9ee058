from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support import instant_loop
from support.counted_checks import CountedChecks, CountedId, counted_ids
from support.directory_records import JOB, claim_record, digest, provider_record

from fusion.swarm.authority.access import Access
from fusion.swarm.authority.grants import ROLES, Grant, seal_grant
from fusion.swarm.authority.law import Admission, JobLaw, Limits
from fusion.swarm.authority.wallet import Wallet
from fusion.swarm.claims import tenure as tenures
from fusion.swarm.claims.claim_cache import ClaimCache
from fusion.swarm.claims.election import rank, winner
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.claims.tenure import DESERTED_SECONDS, VOTE_SECONDS, Holding
from fusion.swarm.claims.votes import Vote, seal_vote
from fusion.swarm.directory.api import RECORD_TTL_SECONDS
from fusion.swarm.directory.records import ClaimRecord, JobId, Place, Record
from fusion.swarm.errors import RecordError
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.transport import PeerId

OTHER_JOB = JobId(digest("another job"))
PROMPT = LeaseConfig(confirm_seconds=0)


class DistantDirectory(MemoryDirectory):
    """What it answers is a little old when it arrives, as over a real network."""

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        claims = await super().claims(job, stage)
        await asyncio.sleep(0)
        return claims


class SlowDirectory(MemoryDirectory):
    """Every call takes a while on its way there and on its way back, a different one each time."""

    dice = random.Random(0)

    async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
        await self.pause()
        await super().publish(record, ttl_seconds=ttl_seconds)
        await self.pause()

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        await self.pause()
        claims = await super().claims(job, stage)
        await self.pause()
        return claims

    async def pause(self) -> None:
        for _ in range(self.dice.choice((0, 1, 2, 5, 20))):
            await asyncio.sleep(0)


class Room:
    """Some peers, their directories and leases, and the clock they share."""

    def __init__(self, peers: int, kind: type[MemoryDirectory] = DistantDirectory) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork()
        self.identities = [Identity.generate() for _ in range(peers)]
        self.directories = [kind(self.network, i, self.clock) for i in self.identities]
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
        assert ours.owned() == (seen,) and theirs.owned() == ()
        await ours.release(JOB, 0)
        assert await theirs.owner(JOB, 0) is None and ours.owned() == ()
        taken = await theirs.claim(JOB, 0, 0.3)
        assert taken is not None and taken.term == 2

    asyncio.run(scenario())


def test_a_dead_owner_s_stage_falls_vacant_and_the_next_term_is_higher() -> None:
    async def scenario() -> None:
        room = Room(2)
        dead, successor = room.leases
        first = await dead.claim(JOB, 0, 1.0)
        assert first is not None and await successor.owner(JOB, 0) == first
        room.clock.advance(RECORD_TTL_SECONDS)  # nobody renews
        assert await successor.owner(JOB, 0) is None
        # The claim and its term are gone from the directory, but not from the mind of who saw it.
        taken = await successor.claim(JOB, 0, 0.1)
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


@pytest.mark.parametrize("over", [0, 1])
def test_200_duels_leave_one_owner_and_never_two_of_one_term(over: int) -> None:
    async def duel(seed: int) -> int:
        SlowDirectory.dice = dice = random.Random(seed)
        room = Room(dice.choice((2, 2, 3, 4)), SlowDirectory)
        if over:
            dead = MemoryDirectory(room.network, gone := Identity.generate(), room.clock)
            await dead.publish(claim_record(gone, term=over))
        held: list[ClaimRecord] = []

        async def claim(leases: Leases) -> None:
            for _ in range(dice.choice((0, 1, 3, 40))):
                await asyncio.sleep(0)
            won = await leases.claim(JOB, 0, dice.choice((0.3, 0.5, 1.0)), over=over)
            if won is not None:
                held.append(won)

        await asyncio.gather(*(claim(leases) for leases in room.leases))
        assert held and len({claim.term for claim in held}) == len(held)
        assert all(claim.term > over for claim in held)
        for _ in range(2):
            await asyncio.gather(*(leases.beat() for leases in room.leases))
        [owner] = [claim for leases in room.leases for claim in leases.owned()]
        assert owner == max(held, key=rank)
        for leases in room.leases:
            assert await leases.owner(JOB, 0) == owner
        return len(held)

    async def scenario() -> None:
        held = [await duel(seed) for seed in range(200)]
        assert held.count(1) > 100  # mostly the first answer is the last

    asyncio.run(scenario())


def test_over_a_term_the_claims_up_to_it_count_as_gone() -> None:
    async def scenario() -> None:
        room = Room(3)
        dead, successor, late = room.leases
        await dead.claim(JOB, 0, 1.0)
        assert await successor.claim(JOB, 0, 0.1) is None
        taken = await successor.claim(JOB, 0, 0.1, over=1)
        assert taken is not None and taken.term == 2 and await late.owner(JOB, 0) == taken
        # Another who knows of a later owner that is gone does not move the successor from what it hosts under its claim.
        assert await successor.claim(JOB, 0, 0.1, over=2) == taken
        assert await late.claim(JOB, 0, 1.0, over=1) is None  # somebody followed already
        assert await late.claim(JOB, 0, 1.0, over=2) is not None
        # Nor is a term taken that somebody has held and released since.
        await late.release(JOB, 0)
        await successor.beat()
        newcomer = room.restart(0)
        again = await newcomer.claim(JOB, 0, 1.0, over=1)
        assert again is not None and again.term == 4

    asyncio.run(scenario())


def test_a_vacant_stage_is_claimed_above_what_was_only_spoken_of() -> None:
    async def scenario() -> None:
        room = Room(2)
        gone, successor = room.leases
        await gone.claim(JOB, 0, 1.0)
        await successor.claims(JOB, 0)
        room.clock.advance(60.0)
        successor.observe(JOB, 0, 5)  # a later owner, whose claim the successor has never read
        taken = await successor.claim(JOB, 0, 0.1, over=1)
        assert taken is not None and taken.term == 6

    asyncio.run(scenario())


def test_a_node_that_takes_no_record_holds_up_no_takeover() -> None:
    class Stuck(MemoryDirectory):
        async def publish(self, record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
            await super().publish(record, ttl_seconds=ttl_seconds)
            await asyncio.Event().wait()

    async def scenario() -> None:
        room = Room(1, Stuck)
        config = LeaseConfig(confirm_seconds=0, patience_seconds=0.001)
        leases = Leases(room.identities[0].peer_id, room.directories[0], config)
        claim = await leases.claim(JOB, 0, 1.0, over=4)
        assert claim is not None and claim.term == 5
        closing = asyncio.create_task(leases.aclose())
        await asyncio.sleep(0.01)
        assert not leases._publisher.background and not leases.owned()
        closing.cancel()

    asyncio.run(scenario())


def test_a_stage_that_its_owner_hands_over_is_claimed_without_a_look() -> None:
    async def scenario() -> None:
        room = Room(2)
        owner, successor = room.leases
        await owner.claim(JOB, 0, 1.0)

        async def nothing(job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
            raise AssertionError("nothing is read")

        room.directories[1].claims = nothing  # type: ignore[method-assign]
        claim = await successor.claim(JOB, 0, 0.1, over=1, confirm=False)
        assert claim is not None and claim.term == 2

    asyncio.run(scenario())


def test_a_standby_says_so_until_it_owns_the_stage_or_stands_down() -> None:
    async def scenario() -> None:
        room = Room(2)
        ours, other = room.leases
        ours.standbys.stand_by(JOB, 0, score=0.4, step=3)
        await room.beat()
        [claim] = await other.claims(JOB, 0)
        assert (claim.role, claim.score, claim.step, claim.ready) == ("standby", 0.4, 3, False)
        assert ours.standbys.claims() == (claim,) and ours.owned() == ()
        ours.update(JOB, 0, step=9, ready=True)
        for _ in range(9):
            await room.beat()
        [claim] = await other.claims(JOB, 0)
        assert (claim.step, claim.ready) == (9, True)
        owned = await ours.claim(JOB, 0, 0.4)
        assert owned is not None and ours.standbys.claims() == ()
        ours.standbys.stand_by(JOB, 0, score=0.4, step=3)  # an owner does not
        await room.beat()
        assert ours.standbys.claims() == () and await other.claims(JOB, 0) == (owned,)
        other.standbys.stand_by(JOB, 0, score=0.4, step=3)
        other.standbys.stand_by(JOB, 1, score=0.4, step=3)
        await room.beat()
        other.standbys.stand_down(JOB, 0)
        await room.beat()
        assert {c.peer: c.role for c in await ours.claims(JOB, 0)}[other.peer_id] == "released"
        assert [claim.role for claim in await ours.claims(JOB, 1)] == ["standby"]
        await other.aclose()
        assert [claim.role for claim in await ours.claims(JOB, 1)] == ["released"]

    asyncio.run(scenario())


def test_a_replica_keeps_its_term_until_it_only_stands_by() -> None:
    async def scenario() -> None:
        room = Room(2)
        ours, other = room.leases
        owned = await other.claim(JOB, 0, 1.0)
        assert owned is not None and ours.standbys.serve_beside(JOB, 0) == 0, "it does not stand by"
        await ours.claims(JOB, 0)
        ours.standbys.stand_by(JOB, 0, score=0.4, step=0)
        term = ours.standbys.serve_beside(JOB, 0)
        assert term == ours.standbys.serve_beside(JOB, 0) == owned.term and ours.standbys.is_beside(JOB, 0)
        ours.update(JOB, 0, load=2.0)
        ours.observe(JOB, 0, term + 3)
        ours.standbys.stand_by(JOB, 0, score=0.3, step=1)  # the next heartbeat of the pool
        await room.beat()
        [replica] = [claim for claim in await other.claims(JOB, 0) if claim.peer == ours.peer_id]
        assert (replica.role, replica.term, replica.load, replica.ready) == ("replica", term, 2.0, True)
        assert winner(await other.claims(JOB, 0)) == other.holds(JOB, 0)
        ours.standbys.only_stand_by(JOB, 0)
        assert [claim.role for claim in ours.standbys.claims()] == ["standby"]
        assert not ours.standbys.is_beside(JOB, 0)
        assert ours.standbys.serve_beside(JOB, 0) == term, "nobody's vote raises it"
        ours.standbys.stand_by(JOB, 0, score=0.3, step=1, ready=True, busy=True)
        assert [(claim.role, claim.load) for claim in ours.standbys.claims()] == [("standby", 1.0)]
        assert ours.standbys.serve_beside(JOB, 0) == 0, "it owns stages of its own"

    asyncio.run(scenario())


def test_an_invite_that_is_renewed_keeps_a_replica_beside_its_owner(tmp_path: Path) -> None:
    """Owners and standbys showed the new grant, and a replica the one that it began with."""

    async def scenario() -> None:
        room, author = Room(2), Identity.generate()
        (us, owner), clock = room.identities, room.clock
        wallet = Wallet(us.peer_id, tmp_path, (), clock)
        access = Access(wallet, clock, room.directories[0].verify)
        ours, other = Leases(us.peer_id, room.directories[0], PROMPT, access=access), room.leases[1]
        room.leases[0] = ours
        admission = Admission(kind="granted", roots=(owner.peer_id,))
        for leases in room.leases:
            leases.know(JobLaw(job=JOB, author=author.peer_id, stages=1, admission=admission))

        def invited(hours: int) -> tuple[bytes, ...]:
            grant = Grant(
                job=JOB, issuer=author.peer_id, subject=us.peer_id, roles=ROLES, valid_from=0,
                valid_until=int(clock()) + 3600 * hours,
            )  # fmt: skip
            wallet.add((seal_grant(grant, author),))
            return (seal_grant(grant, author),)

        first = invited(1)
        assert await other.claim(JOB, 0, 1.0) is not None
        ours.standbys.stand_by(JOB, 0, score=0.4, step=0, ready=True)
        term = ours.standbys.serve_beside(JOB, 0)
        assert term and [claim.grants for claim in ours.standbys.claims()] == [first]
        second = invited(24)
        await room.beat()
        assert [claim.grants for claim in ours.standbys.claims()] == [second]
        clock.advance(3600.0)
        await room.beat()
        [replica] = [claim for claim in await other.claims(JOB, 0) if claim.peer == us.peer_id]
        assert (replica.role, replica.term) == ("replica", term)
        third = invited(48)
        ours.standbys.stand_by(JOB, 0, score=0.4, step=0, ready=True)
        assert [(claim.role, claim.grants) for claim in ours.standbys.claims()] == [("replica", third)]

    asyncio.run(scenario())


def test_grants_that_cannot_be_shown_for_a_moment_end_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        room = Room(2)
        ours, other = room.leases
        owned = await ours.claim(JOB, 0, 1.0)

        def chain(job: JobId) -> tuple[bytes, ...]:
            raise RecordError("a grant begins before it ends")

        with monkeypatch.context() as broken:
            broken.setattr(ours.access, "chain", chain)
            await room.beat()
        await room.beat()
        assert ours.owned() == (owned,) and await other.owner(JOB, 0) == owned

    asyncio.run(scenario())


def test_a_replica_that_claims_the_stage_goes_one_term_up() -> None:
    async def scenario() -> None:
        room = Room(3)
        ours, other, third = room.leases
        owned = await other.claim(JOB, 0, 1.0)
        assert owned is not None
        for leases in (ours, third):
            await leases.claims(JOB, 0)
            leases.standbys.stand_by(JOB, 0, score=0.4, step=0)
            assert leases.standbys.serve_beside(JOB, 0) == owned.term
        await room.beat()
        claim = await ours.claim(JOB, 0, 0.4, over=owned.term)
        assert claim is not None and claim.term == owned.term + 1, "another replica is no rival"
        assert not ours.standbys.is_beside(JOB, 0) and third.standbys.is_beside(JOB, 0)

    asyncio.run(scenario())


def test_whoever_fails_to_claim_stands_by_again() -> None:
    async def scenario() -> None:
        room = Room(2)
        ours, other = room.leases
        ours.standbys.stand_by(JOB, 0, score=0.4, step=3)
        owned = await other.claim(JOB, 0, 1.0)
        assert owned is not None and await ours.claim(JOB, 0, 0.4, over=0) is None
        claiming = asyncio.create_task(ours.claim(JOB, 0, 0.4, over=owned.term))
        await asyncio.sleep(0)
        rival = Identity.generate()
        high = claim_record(rival, term=owned.term + 1, score=1.0)
        await MemoryDirectory(room.network, rival, room.clock).publish(high)
        ours.standbys.stand_by(JOB, 0, score=0.4, step=99)  # meanwhile: does not replace the claim
        assert await claiming is None
        [standing] = ours.standbys.claims()
        assert standing.role == "standby" and standing.step == 3
        await room.beat()
        assert {c.peer: c.role for c in await other.claims(JOB, 0)}[ours.peer_id] == "standby"

    asyncio.run(scenario())


def test_what_changes_is_said_at_once_and_nothing_else() -> None:
    async def scenario() -> None:
        room = Room(2)
        identity, directory = room.identities[0], room.directories[0]
        published: list[ClaimRecord] = []
        publish = directory.publish

        async def counted(record: Record, *, ttl_seconds: float = RECORD_TTL_SECONDS) -> None:
            assert isinstance(record, ClaimRecord)
            published.append(record)
            await publish(record, ttl_seconds=ttl_seconds)

        directory.publish = counted  # type: ignore[method-assign]
        async with Leases(identity.peer_id, directory, LeaseConfig(heartbeat_seconds=3600)) as leases:
            for stage in range(3):
                leases.standbys.stand_by(JOB, stage, score=0.5, step=0)
            async with asyncio.timeout(5):
                while len(published) < 3:
                    await asyncio.sleep(0.001)
                leases.update(JOB, 1, step=5)
                leases.standbys.stand_by(JOB, 2, score=0.5, step=0)  # published already
                leases.update(JOB, 1, step=6, ready=True)
                while len(published) < 4:
                    await asyncio.sleep(0.001)
            assert (published[3].stage, published[3].step, published[3].ready) == (1, 6, True)
            await asyncio.sleep(0.01)
            assert len(published) == 4

    asyncio.run(scenario())


class StalledDirectory(MemoryDirectory):
    """What is `stalled` is never read."""

    stalled: Place | None = None

    async def claims(self, job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
        if (job, stage) == self.stalled:
            await asyncio.sleep(3600)
        return await super().claims(job, stage)


@pytest.mark.parametrize("seen", [JOB, OTHER_JOB], ids=["its own", "another"])
def test_a_stage_whose_claims_are_read_slowly_holds_up_no_renewal(seen: JobId) -> None:
    """Neither another stage's nor its own."""

    async def scenario() -> None:
        network, start = MemoryNetwork(), asyncio.get_running_loop().time
        owner, reader = (
            StalledDirectory(network, Identity.generate(), lambda: 1_000_000.0 + start()) for _ in range(2)
        )
        leases = Leases(owner._identity.peer_id, owner)
        await leases.claim(JOB, 0, 1.0)
        await leases.claim(OTHER_JOB, 0, 1.0)
        async with leases:
            await asyncio.sleep(5.0)
            owner.stalled = (JOB, 0)
            for _ in range(300):
                await asyncio.sleep(0.1)
                assert len(await reader.claims(seen, 0)) == 1
            owner.stalled = None

    instant_loop.run(scenario())


# --- claims that are shown


def test_a_claim_that_was_shown_counts_before_the_directory_has_it() -> None:
    async def scenario() -> None:
        room = Room(3)
        owner, reader, successor = room.leases
        ids = [identity.peer_id for identity in room.identities]
        old = await owner.claim(JOB, 0, 1.0)
        await reader.claims(JOB, 0)
        room.network.partition(
            ids[:1] + ids[2:], ids[1:2]
        )  # from here on the reader's directory learns nothing
        new = await successor.claim(JOB, 0, 0.2, over=1)
        data = successor.sealed(JOB, 0)
        assert old is not None and new is not None and data is not None
        assert await reader.owner(JOB, 0) == old
        assert reader.accept_claim(data) == new
        assert await reader.owner(JOB, 0) == new and winner(reader.recent(JOB, 0)) == new
        older = owner.sealed(JOB, 0)
        with pytest.raises(RecordError):  # true once, and outranked
            reader.accept_claim(older or b"")
        assert await reader.owner(JOB, 0) == new
        assert reader.known_term(JOB, 0) == 2
        room.clock.advance(RECORD_TTL_SECONDS)
        assert await reader.owner(JOB, 0) is None and reader.known_term(JOB, 0) == 2
        with pytest.raises(RecordError):
            reader.accept_claim(data)

    asyncio.run(scenario())


def test_of_stages_that_are_read_together_each_is_judged_by_who_holds_the_others_now() -> None:
    async def scenario() -> None:
        room = Room(5)
        owner, before, after, successor, reader = room.leases
        for leases in room.leases:
            leases.know(JobLaw(job=JOB, author=owner.peer_id, stages=2))
        await owner.claim(JOB, 0, 1.0)
        await before.claim(JOB, 1, 1.0)
        await reader.claims_of(JOB, (0, 1))
        room.clock.advance(tenures.CONTEST_SECONDS + 1.0)
        await owner.beat()
        await before.release(JOB, 1)
        await after.claim(JOB, 1, 1.0)
        vote = after.voting.vote(JOB, 0, Holding(owner.peer_id, 1), successor.peer_id)
        await successor.claim(JOB, 0, 0.2, over=1, proof=(vote,), confirm=False)
        assert await reader.owner(JOB, 0) == owner.holds(JOB, 0)  # whose vote that is it does not know
        assert (
            reader.voting.stages_to_reread(JOB, 0) == ()
        )  # of those in the directory there may be thousands
        data = successor.sealed(JOB, 0)
        assert data is not None
        with pytest.raises(RecordError, match="is not"):
            reader.accept_claim(data)
        assert reader.voting.stages_to_reread(JOB, 0) == (1,)
        claims = await reader.claims_of(JOB, (0, 1))
        assert [winner(each) for each in claims] == [successor.holds(JOB, 0), after.holds(JOB, 1)]
        assert reader.voting.stages_to_reread(JOB, 0) == ()

    asyncio.run(scenario())


def test_what_the_directory_says_later_of_the_same_peer_outweighs_what_was_shown() -> None:
    async def scenario() -> None:
        room = Room(2)
        owner, reader = room.leases
        await owner.claim(JOB, 0, 1.0)
        data = owner.sealed(JOB, 0)
        assert data is not None
        with pytest.raises(RecordError, match="nothing is known"):
            reader.accept_claim(data)
        await reader.claims(JOB, 0)
        assert reader.accept_claim(data) == owner.holds(JOB, 0)
        owner.update(JOB, 0, step=8, ready=True)
        await owner.beat()
        seen = await reader.owner(JOB, 0)
        assert seen is not None and (seen.step, seen.ready) == (8, True)
        await owner.release(JOB, 0)
        assert await reader.owner(JOB, 0) is None and owner.sealed(JOB, 0) is None
        owner.standbys.stand_by(JOB, 0, score=0.1, step=8)
        await owner.beat()
        assert [claim.role for claim in await reader.claims(JOB, 0)] == ["standby"]

    asyncio.run(scenario())


def test_a_higher_claim_that_is_shown_to_an_owner_costs_it_the_stage() -> None:
    async def scenario() -> None:
        room = Room(2)
        owner, successor = room.leases
        held = await owner.claim(JOB, 0, 1.0)
        await successor.claim(JOB, 0, 0.1, over=1)
        data = successor.sealed(JOB, 0)
        assert data is not None
        owner.accept_claim(data)
        assert owner.owned() == () and room.lost[0] == [held]
        await owner.beat()
        claims = {c.peer: c.role for c in await successor.claims(JOB, 0)}
        assert claims == {owner.peer_id: "released", successor.peer_id: "owner"}

    asyncio.run(scenario())


def test_only_an_owner_s_own_sound_claim_is_credited() -> None:
    async def scenario() -> None:
        room = Room(2)
        leases, (one, two) = room.leases[0], room.directories
        await leases.claims(JOB, 0)
        standby = two.sealed(claim_record(room.identities[1], role="standby"))
        good = two.sealed(claim_record(room.identities[1], term=5))
        for data in (
            b"",
            b"garbage",
            standby,
            good[:-1] + bytes([good[-1] ^ 1]),
            two.sealed(provider_record(room.identities[1])),
        ):
            with pytest.raises(RecordError):
                leases.accept_claim(data)
        assert leases.known_term(JOB, 0) == 0
        assert leases.accept_claim(good).term == 5
        with pytest.raises(RecordError):
            one.sealed(claim_record(room.identities[1]))

    asyncio.run(scenario())


def test_the_proposed_peer_wins_a_race() -> None:
    async def scenario() -> None:
        room = Room(3)
        won = await asyncio.gather(
            *(leases.claim(JOB, 0, score) for leases, score in zip(room.leases, (0.4, 1.0, 0.9), strict=True))
        )
        assert [claim is not None for claim in won] == [False, True, False]

    asyncio.run(scenario())


def law(stages: int, launched_at: int = 0) -> JobLaw:
    return JobLaw(job=JOB, author=Identity.generate().peer_id, stages=stages, launched_at=launched_at)


async def two_stages(room: Room) -> tuple[ClaimRecord, ClaimRecord]:
    """The first peer owns stage 0, the second stage 1, for long enough that nobody contests it; all know of both."""
    one, voter = room.leases[:2]
    for leases in room.leases:
        leases.know(law(2))
    first, second = await one.claim(JOB, 0, 1.0), await voter.claim(JOB, 1, 1.0)
    assert first is not None and second is not None
    for _ in range(5):
        await room.beat()
        await see(room)
    return first, second


async def see(room: Room) -> None:
    for leases in room.leases:
        for stage in (0, 1):
            await leases.claims(JOB, stage)


def against(voter: Leases, claim: ClaimRecord, successor: Leases) -> bytes:
    return voter.voting.vote(claim.job, claim.stage, Holding(claim.peer, claim.term), successor.peer_id)


async def divided(room: Room, *sides: Sequence[PeerId]) -> ClaimRecord:
    """The claim of the first peer to stage 0, which the third one has claimed with the second one's vote, on the other side of a
    partition that is over."""
    one, voter, two = room.leases[:3]
    first, _ = await two_stages(room)

    async def asked(place: Place, holding: Holding) -> tuple[bytes, ...]:
        return (voter.voting.vote(*place, holding, two.peer_id),)

    two.request_votes = asked
    room.network.partition(*sides)
    for _ in range(int(RECORD_TTL_SECONDS) + 1):
        await room.beat()
        await see(room)
    second = await two.claim(JOB, 0, 0.2)  # the minority's owner lives on, unseen
    assert second is not None and second.term == 2 and one.owned() == (first,)
    for _ in range(3):  # its neighbour bears it out meanwhile
        await room.beat()
        await see(room)
    room.network.heal()
    return first


def test_after_a_partition_one_owner_is_left_and_the_other_is_told() -> None:
    async def scenario() -> None:
        room = Room(3)
        one, _, two = room.leases
        ids = [identity.peer_id for identity in room.identities]
        first = await divided(room, ids[:1], ids[1:])
        for _ in range(5):
            await room.beat()
            await see(room)
        assert one.owned() == () and [(c.peer, c.term) for c in two.owned()] == [(two.peer_id, 2)]
        assert room.lost == [[first], [], []]
        claims = await two.claims(JOB, 0)
        assert {c.peer: c.role for c in claims} == {ids[0]: "released", ids[2]: "owner"}

    asyncio.run(scenario())


def test_after_a_partition_whose_witness_is_gone_the_owner_that_it_voted_against_gives_way() -> None:
    """Each would wait for the other for ever, and neither for a neighbour of its own."""

    async def scenario() -> None:
        room = Room(4)
        one, voter, two, thief = room.leases
        ids = [identity.peer_id for identity in room.identities]
        first = await divided(room, [ids[0], ids[3]], ids[1:3])
        room.leases.remove(voter)  # it is gone for good, and its stage with it
        for _ in range(int(RECORD_TTL_SECONDS + VOTE_SECONDS)):  # its votes are old by now
            for term, proof in ((3, ()), (4, (against(thief, first, thief),)), (2, two.owned()[0].proof)):
                await room.directories[3].publish(
                    claim_record(room.identities[3], term=term, score=1.0, proof=proof)
                )
            await room.beat()
            assert one.owned() == (first,) and len(two.owned()) == 1
        for _ in range(int(DESERTED_SECONDS)):
            await room.beat()
        assert one.owned() == () and room.lost[0] == [first]
        assert [(c.peer, c.term) for c in two.owned()] == [(two.peer_id, 2)]

    asyncio.run(scenario())


def test_an_owner_that_is_left_alone_gives_way_to_nobody_without_the_votes_of_its_last_neighbours() -> None:
    async def scenario() -> None:
        room = Room(4)
        one, voter, two, thief = room.leases
        first, _ = await two_stages(room)
        old = against(voter, first, two)
        room.leases.remove(voter)
        for _ in range(int(RECORD_TTL_SECONDS) + 1):
            await room.beat()
        for _ in range(2 * int(DESERTED_SECONDS)):
            for term, proof in ((2, ()), (3, (against(thief, first, thief), old)), (9, (b"x", old))):
                await room.directories[3].publish(
                    claim_record(room.identities[3], term=term, score=1.0, proof=proof)
                )
            await room.beat()
        assert one.owned() == (first,) and room.lost[0] == []

    asyncio.run(scenario())


def test_without_a_majority_s_word_no_claim_costs_a_live_owner_anything() -> None:
    async def scenario() -> None:
        room = Room(4)
        one, voter, thief, other = room.leases
        first, _ = await two_stages(room)
        for term in (2, 2 + 8, 1000, 2**31 - 1, 2**31):
            for proof in ((), (against(thief, first, thief),), (against(voter, first, other),), (b"x",)):
                stolen = claim_record(room.identities[2], term=term, score=1.0, proof=proof)
                await room.directories[2].publish(stolen)
                for leases in (one, voter, other):
                    with pytest.raises(RecordError):
                        leases.accept_claim(room.directories[2].sealed(stolen))
                await one.beat()
                assert winner(await voter.claims(JOB, 0)) == first
                assert winner(await one.claims(JOB, 0)) == first and one.owned() == (first,)
                assert voter.known_term(JOB, 0) == 1
        assert room.lost == [[], [], [], []]
        # With the vote of the only voter it is another matter; for that peer, not for another one.
        vote = against(voter, first, other)
        assert other.voting.is_proof(JOB, 0, Holding(first.peer, 1), other.peer_id, [vote])
        taken = await other.claim(JOB, 0, 0.1, over=1, proof=(vote,))
        assert taken is not None and taken.term == 2
        assert voter.accept_claim(other.sealed(JOB, 0) or b"") == taken
        await one.beat()
        assert one.owned() == () and room.lost[0] == [first]

    asyncio.run(scenario())


def test_forged_votes_cost_one_check_for_each_claim_that_shows_them() -> None:
    async def scenario() -> None:
        room = Room(4)
        voter, other = room.leases[1:3]
        first, _ = await two_stages(room)
        checks = CountedChecks()

        other._cache._verify = checks.verify
        strangers = [Identity.generate() for _ in range(10)]
        for number, stranger in enumerate(strangers):
            lies = [
                Vote(voter=voter.peer_id, holding=Holding(first.peer, 1), at=int(room.clock()) + i)
                for i in range(4)
            ]
            own = [replace(lie, voter=stranger.peer_id) for lie in lies]
            votes = [seal_vote(each, JOB, 0, stranger.peer_id, stranger.sign) for each in (*own, *lies)]
            claim = claim_record(stranger, term=2, score=number / 10, proof=tuple(votes))
            await MemoryDirectory(room.network, stranger, room.clock).publish(claim)
        for _ in range(3):
            assert winner(await other.claims(JOB, 0)) == first
            assert checks.signers == [voter.peer_id] * len(strangers)  # of each once, and never again

    asyncio.run(scenario())


def test_a_claim_is_not_held_against_each_of_thousands_of_peers_and_stages() -> None:
    """A job of 4096 stages, and a few hundred claims of each, used to hold a reader up for seconds at every look."""

    async def scenario() -> None:
        room = Room(1)
        (reader,) = room.leases
        peers = counted_ids(500)
        law = JobLaw(
            job=JOB, author=peers[0], stages=500, proposed=peers[1:], limits=Limits(stages_per_owner=1)
        )
        listed = replace(law, job=JobId("5" * 64), admission=Admission(kind="listed", peers=peers))
        for each in (law, listed):
            reader.know(each)
            for stage, peer in enumerate(peers):
                claim = ClaimRecord(
                    job=each.job, stage=stage, peer=peer, role="owner", term=1, score=0.5, step=0, load=0.0,
                    expires_at=room.clock() + 6,
                )  # fmt: skip
                reader._cache.read((each.job, stage), (claim,))
                assert reader.tenure(each.job, stage) is not None
        CountedId.compared, strangers = 0, [Identity.generate() for _ in range(20)]
        for each in (law, listed):
            claims = []
            for one in strangers:
                vote = Vote(voter=one.peer_id, holding=Holding(peers[0], 1), at=7)
                proof = (seal_vote(vote, each.job, 0, one.peer_id, one.sign),)
                made = claim_record(one, job=each.job, term=2, proof=proof)
                claims.append(replace(made, expires_at=room.clock() + 6))
            reader._cache.read((each.job, 0), tuple(claims))
            reader.recent(each.job, 0)
        assert CountedId.compared <= 8 * len(peers)

    asyncio.run(scenario())


def test_nobody_holds_more_stages_than_the_job_gives_it_and_another_one_once_it_has_left_one() -> None:
    async def scenario() -> None:
        room = Room(2)
        one, reader = room.leases
        law = JobLaw(
            job=JOB, author=one.peer_id, stages=3, limits=Limits(stages_per_owner=2),
            launched_at=int(room.clock()),
        )  # fmt: skip
        for stage in (0, 1, 2):
            assert await one.claim(JOB, stage, 1.0) is not None  # it does not know of the limit
        reader.know(law)
        holders = [winner(await reader.claims(JOB, stage)) for stage in (0, 1, 2)]
        assert [None if each is None else each.peer for each in holders] == [one.peer_id, one.peer_id, None]
        await one.release(JOB, 0)
        assert winner(await reader.claims(JOB, 0)) is None
        again = winner(await reader.claims(JOB, 2))
        assert again is not None and again.peer == one.peer_id
        assert winner(await reader.claims(JOB, 1)) is not None

    asyncio.run(scenario())


def test_a_newcomer_takes_the_word_of_whom_the_author_chose_for_more_than_a_higher_term() -> None:
    async def scenario() -> None:
        room = Room(4)
        one, voter, successor, _ = room.leases
        first, _ = await two_stages(room)
        taken = await successor.claim(JOB, 0, 0.2, over=1, proof=(against(voter, first, successor),))
        assert taken is not None and taken.term == 2
        await one.beat()
        liar = Identity.generate()
        lie = Vote(voter=voter.peer_id, holding=Holding(taken.peer, 2), at=int(room.clock()))
        vote = seal_vote(lie, JOB, 0, liar.peer_id, liar.sign)
        claim = claim_record(liar, term=40, score=1.0, proof=(vote,))
        await MemoryDirectory(room.network, liar, room.clock).publish(claim)
        for chosen, owner in (((one.peer_id, voter.peer_id), taken), ((), claim)):
            late = room.restart(3)  # of what was seen before nothing is known
            late.know(replace(law(2), proposed=chosen))
            found = winner(await late.claims(JOB, 0))
            assert found is not None and (found.peer, found.term) == (owner.peer, owner.term)

    asyncio.run(scenario())


def test_of_two_neighbours_that_die_at_once_the_second_one_s_word_on_the_first_stands() -> None:
    """Whoever follows the second one, and so has its seat, must not take the first one's stage as well: both would hold it
    under one term, and no neighbour would know whom to hear."""

    async def scenario() -> None:
        room = Room(6)
        lead, first, second, last, successor, other = room.leases
        for leases in room.leases:
            leases.know(law(4))
        owners = (lead, first, second, last)
        claims = [await owner.claim(JOB, stage, 1.0) for stage, owner in enumerate(owners)]
        for leases in room.leases:
            for stage in range(4):
                await leases.claims(JOB, stage)
        _, of_first, of_second, _ = claims
        assert of_first is not None and of_second is not None

        votes = against(lead, of_second, other), against(last, of_second, other)
        assert await other.claim(JOB, 2, 0.2, over=1, proof=votes) is not None
        votes = against(second, of_first, successor), against(lead, of_first, successor)
        taken = await successor.claim(JOB, 1, 0.2, over=1, proof=votes)
        assert taken is not None and taken.term == 2
        for leases in (lead, last, successor, other):
            assert winner(await leases.claims(JOB, 1)) == taken

        # Later it has no vote any more, and before it had one for one stage.
        vote = [against(second, taken, other)]
        assert not other.voting.is_proof(JOB, 1, Holding(taken.peer, 2), other.peer_id, vote)
        vote.append(against(lead, taken, other))
        assert other.voting.is_proof(JOB, 1, Holding(taken.peer, 2), other.peer_id, vote)
        for _ in range(VOTE_SECONDS):
            await lead.beat(), await last.beat(), await other.beat()
            room.clock.advance(1.0)
            for stage in range(4):
                await other.claims(JOB, stage)
        vote = [against(second, taken, other), against(lead, taken, other)]
        assert not other.voting.is_proof(JOB, 1, Holding(taken.peer, 2), other.peer_id, vote)

    asyncio.run(scenario())


def test_terms_cannot_be_used_up() -> None:
    async def scenario() -> None:
        room = Room(3)
        thief = room.identities[2]
        room.leases[0].know(law(1, launched_at=int(room.clock()) - 10))
        for role, term in (("owner", 2**31 - 2), ("released", 2**31 - 1), ("standby", 2**31), ("owner", 76)):
            await room.directories[2].publish(claim_record(thief, role=role, term=term))
            room.leases[0].observe(JOB, 0, term)
            assert await room.leases[0].owner(JOB, 0) is None and room.leases[0].known_term(JOB, 0) == 0
        claim = await room.leases[0].claim(JOB, 0, 1.0)
        assert claim is not None and claim.term == 1

    asyncio.run(scenario())


def test_a_term_that_somebody_spoke_of_before_the_law_was_known_blocks_no_claim() -> None:
    async def scenario() -> None:
        room = Room(2)
        one, other = room.leases
        one.observe(JOB, 0, 5000)  # a stranger's vote
        for leases in (one, other):
            leases.know(law(1, launched_at=int(room.clock()) - 10))
        claim = await one.claim(JOB, 0, 1.0)
        assert claim is not None and claim.term == 1
        assert await other.owner(JOB, 0) is not None

    asyncio.run(scenario())


def test_a_law_that_is_told_again_costs_nothing_however_many_stages_the_job_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leases = Room(1).leases[0]
    known, reckoned = law(4096), 0
    ceiling = ClaimCache._ceiling

    def counted(self: ClaimCache, job: JobId) -> int:
        nonlocal reckoned
        reckoned += 1
        return ceiling(self, job)

    monkeypatch.setattr(ClaimCache, "_ceiling", counted)
    for _ in range(3):  # heartbeats
        leases.know(replace(known))
    assert reckoned == 1
    leases.know(replace(known, launched_at=7))
    assert reckoned == 2
    leases.access.know(known)  # by whoever looks it up to answer a reader
    leases.know(known)
    assert reckoned == 3


def test_one_neighbour_of_two_cannot_disown_an_owner() -> None:
    async def scenario() -> None:
        room = Room(3)
        one, liar, third = room.leases
        for leases in room.leases:
            leases.know(law(3))
        first = await one.claim(JOB, 0, 1.0)
        assert first is not None and await liar.claim(JOB, 1, 1.0) and await third.claim(JOB, 2, 1.0)
        for stage in (1, 2):
            await one.claims(JOB, stage)
        holding = Holding(first.peer, first.term)
        for _ in range(3):
            assert not one.voting.is_outvoted(JOB, 0, liar.peer_id, liar.voting.refusal_vote(JOB, 0, holding))
        assert not one.voting.is_outvoted(JOB, 0, third.peer_id, liar.voting.refusal_vote(JOB, 0, holding)), (
            "another's vote"
        )
        assert not one.voting.is_outvoted(JOB, 0, third.peer_id, {"heir": 1, "word": b"x"})
        assert one.voting.is_outvoted(JOB, 0, third.peer_id, third.voting.refusal_vote(JOB, 0, holding))

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
        assert await room.leases[1].owner(JOB, 0) is None and slow.owned() == ()

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


def test_nothing_is_kept_of_stages_that_were_given_up() -> None:
    async def main() -> None:
        room = Room(1)
        [leases] = room.leases
        for stage in range(20):
            both = await asyncio.gather(leases.claim(JOB, stage, 0.5), leases.claim(JOB, stage, 0.5))
            assert both[0] is not None and both[0] == both[1]  # one after the other
            await leases.release(JOB, stage)
        assert (
            not leases._locks
            and not leases._proving
            and not leases._followed
            and not leases.voting._against_us
        )

    asyncio.run(main())


def test_thousands_of_claims_that_cannot_count_are_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers store them, and may ask for the stage: to order them would take a twentieth of a second each time."""

    async def scenario() -> None:
        room = Room(2)
        owner, reader = room.leases
        held = await owner.claim(JOB, 0, 1.0)
        assert held is not None and await reader.owner(JOB, 0) == held
        room.clock.advance(4.0)
        await owner.beat()
        strangers = [
            replace(held, peer=peer, term=1 + number % 12, expires_at=room.clock() + 6.0)
            for number, peer in enumerate(counted_ids(200))
        ]
        reader._cache.read((JOB, 0), (*await room.directories[1].claims(JOB, 0), *strangers))
        ordered = list[ClaimRecord]()

        def counted(claim: ClaimRecord) -> tuple[int, float, bytes]:
            ordered.append(claim)
            return rank(claim)

        monkeypatch.setattr(tenures, "rank", counted)
        found = reader.tenure(JOB, 0)
        assert found is not None and found.claim.peer == held.peer
        assert ordered == []

    asyncio.run(scenario())
