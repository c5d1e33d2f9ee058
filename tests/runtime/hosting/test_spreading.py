"""One stage of a job a peer, as far as there are peers: what lies on one peer is lost together."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.hosting import Peer, Swarm, over, swarm, until

from fusion.runtime.job.protocol import HOLD
from fusion.runtime.training.snapshots.stage_files import copies_at
from fusion.swarm.claims.election import HEAD_START_SECONDS, is_idle, successors
from fusion.swarm.directory.records import Digest, JobId, PeerRecord
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId, call

ABSENT = Identity.generate().peer_id


async def announce(*peers: Peer) -> None:
    for peer in peers:
        record = PeerRecord(
            peer=peer.id, name="peer", addresses=(), role="peer", device="cpu", flops_per_second=1.0,
            memory_bytes=1000, free_memory_bytes=peer.context.memory.free_bytes, software="0", opset=1,
            started_at=0.0,
        )  # fmt: skip
        await peer.context.directory.publish(record, ttl_seconds=100.0)


async def round_of(made: Swarm, *peers: Peer) -> None:
    """A heartbeat of everybody."""
    for peer in peers:
        await peer.context.leases.beat()
    for peer in peers:
        await peer.look()
        for _ in range(5):
            await asyncio.sleep(0)
    for peer in peers:
        await peer.context.leases.beat()


async def crowded(made: Swarm, stages: int, **changes: object) -> tuple[JobId, Peer]:
    """A job whose only peer has all its stages, the first of which was proposed to it."""
    only = await made.join()
    proposed = (only.id, *(ABSENT for _ in range(stages - 1)))
    manifest = made.manifest(*[None] * stages, **{"proposed": proposed, **changes})
    job = await made.launch(manifest, stages=stages)
    await only.look()
    made.clock.advance(HEAD_START_SECONDS)
    await made.announce(job, stages=stages)
    await only.look()
    await until(lambda: len(only.service.running) == stages)
    await only.context.leases.beat()
    return job, only


async def idle(made: Swarm, job: JobId, like: Peer) -> Peer:
    """A peer that comes later."""
    peer = await made.join()
    peer.blobs.store.put(like.blobs.store.path(Digest(job)))
    await peer.look()
    await peer.look()
    await peer.context.leases.beat()
    return peer


# --- handing on


def test_a_second_stage_of_a_job_is_handed_to_an_idle_peer_that_comes(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, only = await crowded(made, 2)
            comer = await idle(made, job, only)
            await until(lambda: len(comer.service.prepared) == 2)
            await round_of(made, comer, only)
            await over(only, (job, 1))
            assert only.service.passed_on == [(job, 1)] and comer.service.handovers[job, 1] == {"step": 7}
            assert only.hosting.hosted == ((job, 0),) and comer.hosting.hosted == ((job, 1),)
            for _ in range(3):
                made.clock.advance(20.0)
                await round_of(made, comer, only)
            assert only.hosting.hosted == ((job, 0),) and comer.hosting.hosted == ((job, 1),)

    asyncio.run(main())


def test_stages_are_handed_on_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, only = await crowded(made, 3)
            comers = [await idle(made, job, only) for _ in range(2)]
            await round_of(made, *comers, only)
            await over(only, (job, 2))
            for _ in range(3):
                await round_of(made, *comers, only)
            assert only.hosting.hosted == ((job, 0), (job, 1))  # not so soon
            made.clock.advance(10.0)
            await round_of(made, *comers, only)
            await over(only, (job, 1))
            assert sorted(len(peer.hosting.hosted) for peer in comers) == [1, 1]

    asyncio.run(main())


def test_what_was_proposed_to_a_peer_stays_there_and_so_does_what_nobody_is_ready_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours, ours), stages=2)
            await ours.look()
            await until(lambda: len(ours.service.running) == 2)
            await ours.context.leases.beat()
            comer = await idle(made, job, ours)
            await round_of(made, comer, ours)
            assert len(ours.hosting.hosted) == 2 and ours.service.passed_on == []

            other, only = await crowded(made, 2, name="other", memory_bytes=(10, 10))
            dead = await idle(made, other, only)
            await only.context.leases.beat()
            made.network.kill(dead.id)
            await round_of(made, only)
            assert only.service.passed_on == [] and len(only.service.running) == 2

    asyncio.run(main())


def test_a_stage_that_nobody_took_in_the_end_stays(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, only = await crowded(made, 2)
            comer = await idle(made, job, only)
            comer.hosting._stages.cooling.start((job, 1))  # and takes nothing
            await round_of(made, comer, only)
            await until(lambda: only.service.stayed == [(job, 1)])
            assert only.service.passed_on == [(job, 1)] and only.service.begun.count((job, 1)) == 1
            assert (job, 1) in only.service.running and only.context.leases.holds(job, 1) is not None
            made.clock.advance(10.0)
            await round_of(made, comer, only)
            await over(only, (job, 1))
            assert comer.hosting.hosted == ((job, 1),)

    asyncio.run(main())


def test_who_stands_by_and_takes_nothing_stops_a_stage_ever_more_rarely(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, only = await crowded(made, 2)
            comer = await idle(made, job, only)
            comer.hosting._stages.cooling.refuse((job, 1))
            for _ in range(40):
                await round_of(made, comer, only)
                made.clock.advance(2.0)
            assert only.service.begun.count((job, 1)) == 1
            assert len(only.service.passed_on) == len(only.service.stayed) <= 4

    asyncio.run(main())


# --- taking


async def beside_a_busy_standby(made: Swarm) -> tuple[JobId, Peer, Peer, Peer]:
    """The lead of a job, the owner of its second stage that stands by for the first one, and an idle standby."""
    lead, busy = await made.join(), await made.join()
    job = await made.launch(made.manifest(lead, busy), stages=2)
    await announce(lead, busy)
    for peer in (lead, busy, lead, busy):
        await peer.look()
        await peer.context.leases.beat()
    await until(lambda: (job, 0) in busy.hosting._pool.places)
    comer = await idle(made, job, lead)
    await until(lambda: len(comer.service.prepared) == 2)
    await round_of(made, lead, busy, comer)
    return job, lead, busy, comer


def test_an_idle_standby_goes_before_a_busy_one_whoever_was_asked(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, busy, comer = await beside_a_busy_standby(made)
            claims = successors(await comer.context.leases.claims(job, 0))
            assert [(claim.peer, is_idle(claim)) for claim in claims] == [(comer.id, True), (busy.id, False)]
            made.network.kill(lead.id)
            header = {"job": job, "stage": 0, "peer": lead.id, "term": 1}
            reply = await call(made.client(), busy.id, HOLD.name, "suspect", header)
            claim = busy.context.leases.accept_claim(reply.header["claim"])
            assert reply.kind == "owner" and (claim.peer, claim.term) == (comer.id, 2)
            assert (job, 0) in comer.service.running and busy.service.begun == [(job, 1)]

    asyncio.run(main())


def test_a_standby_that_has_taken_a_stage_says_of_the_others_that_it_is_busy(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, busy, comer = await beside_a_busy_standby(made)
            made.network.kill(lead.id)
            assert await busy.context.takeover.suspect(job, 0, lead.id, 1)  # type: ignore[union-attr]
            await comer.context.leases._publisher.publish_due()  # no heartbeat has passed
            claims = {claim.peer: claim for claim in await busy.context.leases.claims(job, 1)}
            assert claims[comer.id].role == "standby" and not is_idle(claims[comer.id])

    asyncio.run(main())


def test_a_busy_standby_takes_the_stage_when_the_idle_one_died_as_well(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, busy, comer = await beside_a_busy_standby(made)
            for peer in (lead, comer):
                made.network.kill(peer.id)
            claim = await busy.context.takeover.suspect(job, 0, lead.id, 1)  # type: ignore[union-attr]
            assert claim is not None and claim.peer == busy.id
            await until(lambda: (job, 0) in busy.service.running)

    asyncio.run(main())


def test_a_busy_standby_leaves_a_free_stage_to_an_idle_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, busy, comer = await beside_a_busy_standby(made)
            await announce(comer)
            made.network.kill(lead.id)
            made.clock.advance(5.0)
            for peer in (busy, comer):
                await peer.context.leases.beat()
            made.clock.advance(2.0)
            for _ in range(3):
                for peer in (busy, comer):
                    await peer.context.leases.beat()
                await made.announce(job, stages=2)
                await busy.look()
                made.clock.advance(2.0)
            assert busy.service.begun == [(job, 1)]
            await comer.look()
            await until(lambda: (job, 0) in comer.service.running)

    asyncio.run(main())


def test_idle_peers_share_the_free_stages_of_a_job(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            peers = [await made.join() for _ in range(3)]
            manifest = made.manifest(None, None, None, proposed=(ABSENT,) * 3, memory_bytes=(10,) * 3)
            job = await made.launch(manifest, stages=3)
            for peer in peers:
                await peer.look()
            made.clock.advance(HEAD_START_SECONDS)
            for _ in range(4):
                await made.announce(job, stages=3)
                await announce(*peers)
                await asyncio.gather(*(peer.look() for peer in peers))
            assert [len(peer.hosting.hosted) for peer in peers] == [1, 1, 1]

    asyncio.run(main())


# --- copies


def test_every_shard_has_its_copies_on_two_peers_where_there_are_two() -> None:
    a, b, c = PeerId("a"), PeerId("b"), PeerId("c")
    assert copies_at(0, 1, {0: a}) == [0]
    assert copies_at(1, 3, {0: a, 1: b, 2: c}) == [0] and copies_at(0, 3, {0: a, 1: b, 2: c}) == [2]
    assert copies_at(2, 3, {0: a, 1: a, 2: b}) == [1, 0]
    assert copies_at(2, 3, {2: b}) == [1]  # of whose owners we know nothing
    for owners in ((a, a, b), (a, b, b), (a, b, a), (a, a, b, b), (a, a, a, b), (b, a, a, c, a)):
        stages, known = len(owners), dict(enumerate(owners))
        for shard in range(stages):
            holders = {s for s in range(stages) if shard in copies_at(s, stages, known)} | {shard}
            assert len({known[s] for s in holders}) >= 2, (owners, shard)
