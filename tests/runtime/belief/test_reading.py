"""All jobs at once, as commands show them: one record of anybody's costs them little and changes nobody else's job."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from support.directory_records import claim_record, job_record
from support.hosting import Swarm, swarm, until
from support.instant_loop import run

from fusion.runtime.belief import reading
from fusion.runtime.belief.reading import MANIFESTS_IN_ALL, READ_IN_ALL, READ_STAGES, Seen, overview
from fusion.swarm.authority.statements import seal_statement, statement_of
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import Digest, JobId, JobRecord
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory


def test_a_stranger_who_claims_all_stages_and_says_the_job_has_failed_is_not_shown(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            peers = [await made.join(), await made.join()]
            job = await made.launch(made.manifest(*peers), stages=2)
            for peer in peers:
                await peer.look()
            await until(lambda: all(peer.service.running for peer in peers))
            for peer in peers:
                await peer.context.leases.beat()
                await peer.look()
            await lie(made, job)
            seen = await fresh_look(made, job)
            assert seen.belief.record.state == "running" and not seen.belief.over
            assert [winner(seen.claims[stage]).peer for stage in (0, 1)] == [peer.id for peer in peers]  # type: ignore[union-attr]

    asyncio.run(main())


async def lie(made: Swarm, job: JobId) -> None:
    stranger = Identity.generate()
    directory = MemoryDirectory(made.network, stranger, made.clock)
    failed = job_record(
        stranger, job=job, kind="serve", stages=2, state="failed", term=9, lead=stranger.peer_id
    )
    statement = statement_of(failed, stranger.peer_id, 0)
    await directory.publish(replace(failed, proof=(seal_statement(statement, stranger.sign),)))
    for stage in (0, 1):
        await directory.publish(claim_record(stranger, job=job, stage=stage, term=9, ready=True))


async def fresh_look(made: Swarm, job: JobId) -> Seen:
    """Of somebody who has not seen anything of the job before, but is given its manifest."""
    viewer = await made.join()
    viewer.blobs.store.put(made.peers[0].blobs.store.path(Digest(job)))
    (seen,) = await overview(viewer.context)
    return seen


def test_of_many_jobs_of_thousands_of_stages_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[str, int]] = []
    requested: list[str] = []
    published: list[JobRecord] = []

    async def claims(job: str, stage: int) -> tuple[()]:
        read.append((job, stage))
        return ()

    async def job_records() -> tuple[JobRecord, ...]:
        return tuple(published)

    async def manifest_of(_: Any, job: JobId, __: Any) -> None:
        requested.append(job)
        await asyncio.sleep(3600)  # nobody gives it

    monkeypatch.setattr(reading, "manifest_of", manifest_of)
    monkeypatch.setattr(reading, "judged", lambda *_: SimpleNamespace())
    leases, directory = SimpleNamespace(claims=claims), SimpleNamespace(job_records=job_records)
    context: Any = SimpleNamespace(leases=leases, directory=directory, random=Random(7))
    mallory = Identity.generate()
    few = job_record(mallory, job=JobId("b" * 64), stages=3)
    published = [job_record(mallory, job=JobId("a" * 64), stages=4096), few]
    assert [len(seen.claims) for seen in run(overview(context))] == [READ_STAGES, 3]
    assert len(read) == READ_STAGES + 3 and len(requested) == 2
    read.clear()
    requested.clear()
    published += [job_record(mallory, job=JobId(f"{number:064x}"), stages=4096) for number in range(100)]
    found = dict(zip(sorted(record.job for record in published), run(overview(context)), strict=True))
    assert len(read) == READ_IN_ALL and len(requested) <= MANIFESTS_IN_ALL
    assert sorted(found[few.job].claims) == [0, 1, 2]
    alice = job_record(Identity.generate(), job=JobId("f" * 64), stages=2)
    published += [
        *(job_record(mallory, job=JobId(f"{number:064x}"), stages=1) for number in range(100, 3000)),
        alice,
    ]
    read.clear()
    requested.clear()
    *_, last = run(overview(context))
    assert sorted(last.claims) == [0, 1] and alice.job in requested, (
        "a stranger with many jobs hides nobody's"
    )
    assert len(read) == READ_IN_ALL and len(requested) <= MANIFESTS_IN_ALL
