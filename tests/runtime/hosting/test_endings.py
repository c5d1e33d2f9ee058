"""A job whose lead vanishes at the very end: that it has ended is known to the owners of its other stages only."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from support import training
from support.hosting import Peer, Swarm, over, swarm, until

from fusion.cli import job_client
from fusion.runtime.belief.reading import read_belief
from fusion.runtime.capture.models import GPT
from fusion.runtime.hosting.jobs.files import JobFiles
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import JOB
from fusion.swarm.authority.statements import seal_statement, statement_of
from fusion.swarm.claims.owners_seen import OwnersSeen
from fusion.swarm.claims.tenure import Holding
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.transport import call

SNAPSHOT, LAST = Digest("5" * 64), Digest("6" * 64)


async def two_stages(made: Swarm) -> tuple[JobId, Peer, Peer, Peer]:
    """A job of two stages: its lead, the owner of its other stage, and an idle peer that stands by."""
    lead, other = await made.join(persistent=True), await made.join(persistent=True)
    job = await made.launch(made.manifest(lead, other), stages=2)
    for peer in (lead, other):
        await peer.look()
        await until(lambda peer=peer: bool(peer.service.running))  # type: ignore[misc]
    standby = await made.join(persistent=True)
    standby.blobs.store.put(lead.blobs.store.path(Digest(job)))
    for peer in (lead, other):
        await peer.context.leases.beat()
    for _ in range(2):
        await standby.look()
    await until(lambda: len(standby.service.prepared) == 2)
    for peer in (standby, lead, other):
        await peer.context.leases.beat()
        await peer.look()
    return job, lead, other, standby


def ends(peer: Peer, job: JobId, stage: int, state: Literal["done", "stopped"] = "done") -> None:
    """The lead reported to the stage that the job has ended."""
    peer.service.figures[job] = Progress(
        job=job, state=state, step=90, steps=90, loss=1.5, recent=((88, 1.6), (89, 1.5)), samples=720,
        ledger="7" * 64, snapshot=LAST, snapshot_step=90,
    )  # fmt: skip
    peer.service.end(job, stage)


async def says(made: Swarm, peer: Peer, job: JobId) -> str | None:
    """How the job stands, as the peer says it."""
    records = await MemoryDirectory(made.network, made.trainer, made.clock).job_records(job)
    return next((record.state for record in records if record.author == peer.id), None)


@pytest.mark.parametrize("state", ["done", "stopped", "failed"])
def test_a_lead_that_tells_of_an_end_as_of_a_snapshot_is_not_repeated(tmp_path: Path, state: str) -> None:
    """A peer that claims a vacant first stage could stop a job so: the other owners signed what it published."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, other, standby = await two_stages(made)
            record = replace(await made.record(job), state=state, author=lead.id, lead=lead.id)
            sealed = lead.context.directory.sealed(record)
            for peer in (other, standby):
                await call(lead.context.transport, peer.id, JOB.name, "snapshot", {"record": sealed})
            for _ in range(5):
                made.clock.advance(1.0)
                for peer in (other, standby, lead):
                    await peer.context.leases.beat()
                    await peer.look()
                assert await says(made, other, job) in (None, "running")
                assert await says(made, standby, job) in (None, "running")
            assert (job, 1) in other.service.running and (job, 0) in lead.service.running

    asyncio.run(main())


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_the_end_is_published_by_who_knows_it_when_the_lead_vanishes(
    tmp_path: Path, state: Literal["done", "stopped"]
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, other, standby = await two_stages(made)
            assert (await made.record(job)).state == "running"
            made.network.kill(lead.id)
            ends(other, job, 1, state)
            await over(other, (job, 1))
            record = await made.record(job)
            assert (record.state, record.snapshot, record.step) == (state, LAST, 90)
            for _ in range(30):
                made.clock.advance(5.0)  # its lead's claim runs out
                await other.look()
                await standby.look()
                assert (await made.record(job)).state == state
            assert standby.service.begun == [] and len(other.service.begun) == 1
            for peer in (other, standby):
                assert JobFiles(peer.blobs.store.root / "jobs").load() == ()
            # A peer that knows it publishes it when nobody else does.
            await other.leave()
            made.clock.advance(100.0)
            await standby.look()
            assert (await made.record(job)).state == state

    asyncio.run(main())


def test_an_owner_that_has_just_taken_the_lead_gives_it_up_when_its_other_stage_hears_of_the_end(
    tmp_path: Path,
) -> None:
    """The lead dies while its last record is on the way."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(lead, other), stages=2)
            for peer in (lead, other):
                await peer.look()
            await until(lambda: bool(lead.service.running and other.service.running))
            made.network.kill(lead.id)
            vote = other.context.leases.voting.vote(job, 0, Holding(lead.id, 1), other.id)
            await other.hosting.take_over(job, 0, 1, None, (vote,))
            await until(lambda: set(other.service.running) == {(job, 0), (job, 1)})
            ends(other, job, 1)
            await until(lambda: (job, 1) not in other.service.running)
            final = other.service.figures.pop(job)  # what leads here knows of no end
            await other.look()
            await over(other, (job, 0))
            record = await made.record(job)
            assert (record.state, record.step, record.lead) == ("done", 90, other.id)
            assert other.hosting.board.final(job) == final

    asyncio.run(main())


@pytest.mark.parametrize("published", [False, True])
def test_watchers_get_how_the_job_went_when_its_lead_vanishes(tmp_path: Path, published: bool) -> None:
    """Before it has published that the job is done, or right after."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, other, _standby = await two_stages(made)
            lead.service.figures[job] = running = Progress(
                job=job, state="running", step=30, steps=90, samples=240
            )
            directory = MemoryDirectory(made.network, made.trainer, made.clock)
            watcher = replace(other.context, transport=made.client(), directory=directory, seen=OwnersSeen())
            seen: list[Progress] = []

            async def watch() -> None:
                async for progress in job_client.watch(watcher, job):
                    seen.append(progress)

            watching = asyncio.create_task(watch())
            await until(lambda: seen == [running])
            if published:
                done = replace(await made.record(job), state="done", step=90)
                await lead.context.directory.publish(done, ttl_seconds=100.0)
            made.network.kill(lead.id)
            ends(other, job, 1)
            await over(other, (job, 1))
            final = other.service.figures.pop(job)
            if not published:  # one owner alone is no majority while the lead's claim lives
                made.clock.advance(20.0)
                await other.look()
            await watching
            assert seen == [running, final]

    asyncio.run(main())


def test_an_end_that_an_owner_says_names_that_owner_which_knows_how_it_went(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, _lead, other, _standby = await two_stages(made)
            ends(other, job, 1)
            await over(other, (job, 1))
            record = await made.record(job)
            assert (record.state, record.author, record.lead) == ("done", other.id, other.id)

    asyncio.run(main())


def test_whoever_comes_when_all_is_over_believes_the_end_that_nobody_proposed_has_seen(
    tmp_path: Path,
) -> None:
    """A peer has followed both owners, which died; a stranger goes on republishing what the first one stated of the job."""

    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, other, standby = await two_stages(made)
            before = await made.record(job)
            made.network.kill(lead.id)
            await other.context.takeover.suspect(job, 0, lead.id, 1)  # type: ignore[union-attr]
            await until(lambda: (job, 0) in standby.service.running)
            await standby.look()
            made.network.kill(other.id)
            await standby.context.takeover.suspect(job, 1, other.id, 1)  # type: ignore[union-attr]
            await until(lambda: (job, 1) in standby.service.running)
            ends(standby, job, 0)
            for stage in (0, 1):  # the other one goes with it
                await over(standby, (job, stage))
            made.clock.advance(100.0)
            await standby.look()
            stranger = Identity.generate()
            mallory = MemoryDirectory(made.network, stranger, made.clock)
            statement = seal_statement(statement_of(before, lead.id, 7), lead.identity.sign)
            replayed = replace(before, author=stranger.peer_id, lead=None, proof=(statement,))
            await mallory.publish(replayed, ttl_seconds=100.0)

            newcomer = await made.join()
            newcomer.blobs.store.put(standby.blobs.store.path(Digest(job)))
            found = await read_belief(newcomer.context, job)
            assert found is not None and found.vouched
            assert (found.record.state, found.record.snapshot) == ("done", LAST)

    asyncio.run(main())


def test_a_standby_that_leads_an_ended_job_ends_it_when_it_hears(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, other, standby = await two_stages(made)
            made.network.kill(lead.id)
            await other.context.takeover.suspect(job, 0, lead.id, 1)  # type: ignore[union-attr]
            await until(lambda: (job, 0) in standby.service.running)
            await standby.look()
            assert ((record := await made.record(job)).state, record.term) == ("running", 2)
            ends(other, job, 1)
            await over(other, (job, 1))
            await other.look()
            assert await says(made, other, job) == "done"
            await standby.look()
            await over(standby, (job, 0))
            for _ in range(5):
                made.clock.advance(5.0)
                await standby.look()
                await other.look()
                assert await says(made, other, job) == "done"
            # What it published as the lead has expired
            assert await says(made, standby, job) in ("done", None)
            assert (
                standby.service.begun == [(job, 0)]
                and JobFiles(standby.blobs.store.root / "jobs").load() == ()
            )

    asyncio.run(main())


def test_a_lead_whose_stage_was_taken_at_the_end_says_it_against_its_heir(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            job, lead, _other, standby = await two_stages(made)
            ends(lead, job, 0)
            await over(lead, (job, 0))
            assert (await made.record(job)).state == "done"  # before its claim was released
            running = replace(
                await made.record(job), term=2, state="running", author=standby.id, lead=standby.id
            )
            await standby.context.directory.publish(running, ttl_seconds=100.0)
            await lead.look()
            assert await says(made, lead, job) == "done"
            assert len(lead.service.begun) == 1

    asyncio.run(main())


def test_another_stage_that_runs_here_goes_with_the_job(tmp_path: Path) -> None:
    """The lead's last report reached one of our stages and not the other one."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(lead, other, other), stages=3)
            for peer in (lead, other):
                await peer.look()
            await until(lambda: len(other.service.running) == 2)
            made.network.kill(lead.id)
            ends(other, job, 2)
            await until(lambda: other.hosting.hosted == ())
            assert other.service.running == {}

    asyncio.run(main())


def test_every_owner_of_a_trained_job_knows_how_it_ended(tmp_path: Path) -> None:
    async def main() -> None:
        async with training.swarm(tmp_path, 2) as made:
            work = training.language_job(made.peers[0], GPT(training.TINY), training.config(), 2)
            await training.run(made, work, range(2))
            progress = made.peers[1].service.progress(work.prepared.job)
            assert progress is not None and (progress.state, progress.step) == ("done", 6)
            assert progress.snapshot is not None and progress.snapshot_step == 6

    asyncio.run(main())
