"""A claim of ours and what runs for it: neither is there without the other for long."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.hosting import swarm, until

from fusion.swarm.directory.records import JobId, JobRecord
from fusion.swarm.identity import Identity


def test_a_claim_of_ours_that_nothing_runs_for_is_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(
                made.manifest(ours, None, proposed=(ours.id, Identity.generate().peer_id))
            )
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)
            assert await ours.context.leases.claim(job, 1, 0.5)  # however it came about
            await ours.look()
            assert await made.owner(job, 1) is None
            assert [claim.stage for claim in ours.context.leases.owned()] == [0]
            assert ours.service.begun == [(job, 0)] and (job, 0) in ours.service.running

    asyncio.run(main())


def test_a_stage_that_is_being_taken_over_is_not_given_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours, directory = await made.join(), Identity.generate()
            job = await made.launch(made.manifest(None, proposed=(directory.peer_id,)))
            await ours.look()
            seen, going_on = asyncio.Event(), asyncio.Event()
            read = ours.context.directory.job_records

            async def slow(job: JobId | None = None, **age: float) -> tuple[JobRecord, ...]:
                if job is not None:
                    seen.set()
                    await going_on.wait()
                return await read(job, **age)

            ours.context.directory.job_records = slow  # type: ignore[method-assign]
            taking = asyncio.create_task(ours.hosting.take_over(job, 0, 3, None))
            await seen.wait()
            await until(lambda: ours.context.leases.holds(job, 0) is not None)
            await ours.hosting.beat()
            ours.context.leases.update(job, 0, step=9)  # what it says may change meanwhile
            going_on.set()
            claim = await taking
            assert claim is not None and claim.term == 4
            await until(lambda: (job, 0) in ours.service.running)
            await ours.hosting.beat()
            assert ours.service.begun == [(job, 0)] and ours.hosting.holds(job, 0) == 4

    asyncio.run(main())
