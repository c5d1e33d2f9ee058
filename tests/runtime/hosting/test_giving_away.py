"""A stage that its job's lead wants at another peer: it goes there, or it stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.hosting import Peer, Swarm, over, swarm, until

from fusion.swarm.directory.records import Digest, JobId


async def trained_by_one(made: Swarm) -> tuple[JobId, Peer, Peer]:
    """A job of one stage, its owner and an idle peer that has the manifest."""
    owner = await made.join()
    job = await made.launch(made.manifest(owner))
    await owner.look()
    await until(lambda: len(owner.service.running) == 1)
    await owner.context.leases.beat()
    other = await made.join()
    other.blobs.store.put(owner.blobs.store.path(Digest(job)))
    await other.look()
    await other.look()
    return job, owner, other


def test_a_stage_goes_to_the_peer_that_was_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            job, owner, other = await trained_by_one(made)
            owner.context.takeover.give_away(job, 0, other.id)
            await over(owner, (job, 0))
            assert owner.service.passed_on == [(job, 0)] and owner.service.stayed == []
            assert other.hosting.hosted == ((job, 0),) and other.service.handovers[job, 0] == {"step": 7}
            await owner.look()  # it was proposed to it, and yet
            assert owner.hosting.hosted == ()

    asyncio.run(main())


def test_a_stage_that_the_peer_does_not_take_stays(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            job, owner, other = await trained_by_one(made)
            other.hosting._stages.cooling.start((job, 0))
            owner.context.takeover.give_away(job, 0, other.id)
            await until(lambda: owner.service.stayed == [(job, 0)])
            assert owner.hosting.hosted == ((job, 0),) and other.hosting.hosted == ()
            assert (job, 0) in owner.service.running

    asyncio.run(main())


def test_a_stage_is_not_even_stopped_for_a_peer_that_is_gone_or_for_one_we_do_not_have(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            job, owner, other = await trained_by_one(made)
            owner.context.takeover.give_away(job, 1, other.id)
            made.network.kill(other.id)
            owner.context.takeover.give_away(job, 0, other.id)
            await asyncio.sleep(0.1)
            assert owner.service.passed_on == [] and owner.hosting.hosted == ((job, 0),)

    asyncio.run(main())
