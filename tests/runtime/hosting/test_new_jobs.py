"""Jobs that are new to a peer, beside work that it has."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.directory_records import digest
from support.hosting import Peer, Swarm, manifests_read, swarm, until

from fusion.runtime.device.new_job_pace import (
    BURST_SECONDS,
    DEBT_SECONDS,
    READ_SECONDS,
    SHARE,
    STAGE_SECONDS,
)
from fusion.runtime.hosting.claim_choice import share_of_one
from fusion.swarm.claims.election import HEAD_START_SECONDS
from fusion.swarm.directory.records import JobId
from fusion.swarm.identity import Identity
from fusion.swarm.memory.network import MemoryNetwork

ANY = JobId(digest("any"))


async def launched(made: Swarm, peer: Peer, author: Identity, count: int) -> list[JobId]:
    return [
        await made.launch(
            made.manifest(peer, author=author.peer_id, salt=f"{n}", memory_bytes=(1,)), launcher=author
        )
        for n in range(count)
    ]


async def look(peer: Peer, times: int = 1) -> None:
    for _ in range(times):
        await peer.hosting.beat()
        await manifests_read()
    await peer.hosting.beat()


def test_a_stranger_with_many_jobs_or_many_names_is_taken_up_at_the_same_pace(tmp_path: Path) -> None:
    async def main(names: int) -> int:
        async with swarm(tmp_path / str(names)) as made:
            peer, friend, strangers = await made.join(), Identity.generate(), []
            (running,) = await launched(made, peer, friend, 1)
            await look(peer)
            await until(lambda: (running, 0) in peer.service.running)
            for _ in range(names):
                strangers += await launched(made, peer, Identity.generate(), 16 // names)
            await look(peer, 5)  # however often it is asked to
            begun = len(peer.service.begun) - 1
            assert 0 < begun <= 2 * (BURST_SECONDS / STAGE_SECONDS + 1)
            (other,) = await launched(made, peer, Identity.generate(), 1)
            made.clock.advance((DEBT_SECONDS + BURST_SECONDS) / SHARE)
            await look(peer, 2)
            if names == 1:
                assert (other, 0) in peer.service.begun
            return begun

    begun = asyncio.run(main(1))
    assert abs(begun - asyncio.run(main(16))) <= 4


def test_a_peer_without_work_of_others_takes_all_jobs_up_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            peer = await made.join()
            jobs = await launched(made, peer, Identity.generate(), 12)
            await look(peer, 4)
            assert {job for job, _ in peer.service.begun} == {*jobs}

    asyncio.run(main())


def test_a_vacant_stage_of_a_job_that_it_knows_waits_for_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            owner, successor = await made.join(), await made.join()
            (job,) = await launched(made, owner, Identity.generate(), 1)
            await owner.look()
            await launched(made, successor, Identity.generate(), 1)
            await successor.look()
            stranger = Identity.generate()
            successor.context.pace.charge(ANY, stranger.peer_id, 100.0)
            await launched(made, successor, stranger, 6)
            await owner.leave()
            await made.announce(job)
            await successor.look()
            made.clock.advance(HEAD_START_SECONDS)
            successor.context.pace.charge(ANY, stranger.peer_id, 100.0)
            begun = len(successor.service.begun)
            await successor.look()
            assert successor.service.begun[begun:] == [(job, 0)]

    asyncio.run(main())


def test_jobs_that_are_on_its_disk_wait_for_nothing_after_a_cold_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            peer, jobs = await made.join(persistent=True), list[JobId]()
            for _ in range(6):
                jobs += await launched(made, peer, Identity.generate(), 1)
            await look(peer, 3)
            assert {job for job, _ in peer.service.begun} == {*jobs}
            await peer.hosting._gossip.publish_changes()
            await peer.leave()

            made.network, made.peers = MemoryNetwork(), []
            made.clock.advance(1000.0)
            again = await made.join(identity=peer.identity, persistent=True)
            again.context.pace.beside = lambda author: True
            again.context.pace.charge(ANY, Identity.generate().peer_id, 100.0)
            await look(again, 3)
            assert {job for job, _ in again.service.begun} == {*jobs}

    asyncio.run(main())


def test_a_stranger_that_speaks_of_others_new_jobs_does_not_hold_them_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            peer, stranger = await made.join(), Identity.generate()
            await launched(made, peer, Identity.generate(), 1)
            await look(peer)
            peer.context.pace.charge(ANY, stranger.peer_id, 100.0)
            await launched(made, peer, stranger, 6)
            (job,) = await launched(made, peer, Identity.generate(), 1)
            await made.announce(job, stranger, state="running", term=7, lead=stranger.peer_id)
            made.clock.advance((DEBT_SECONDS + READ_SECONDS / 2) / SHARE)
            await peer.hosting.beat()
            await manifests_read()
            assert peer.blobs.requested[-1] == job

    asyncio.run(main())


def test_jobs_in_the_name_of_an_author_who_did_not_sign_them_take_none_of_its_stages(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            peer = await made.join(max_stages=8)
            friend, stranger = Identity.generate(), Identity.generate()
            for n in range(8):
                forged = made.manifest(peer, author=friend.peer_id, salt=f"forged {n}", memory_bytes=(1,))
                await made.launch(forged, launcher=stranger)
            await look(peer, 3)
            assert len(peer.service.running) == share_of_one(8)
            (job,) = await launched(made, peer, friend, 1)
            made.clock.advance((DEBT_SECONDS + BURST_SECONDS) / SHARE)
            await look(peer, 2)
            assert (job, 0) in peer.service.running

    asyncio.run(main())
