"""Which stages of which jobs a peer looks at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from support.directory_records import digest
from support.held_up import Calls
from support.hosting import swarm

from fusion.runtime.belief import reading
from fusion.runtime.hosting import job_view
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.swarm.authority.belief import Belief, OwnershipView, believe
from fusion.swarm.directory.records import Digest, JobId, JobRecord
from fusion.swarm.identity import Verify
from fusion.swarm.transport import PeerId


def test_one_author_has_no_more_than_a_share_of_what_is_looked_at() -> None:
    def manifest(author: str, stages: int) -> Manifest:
        names = tuple(Digest(digest(f"{author} {n}")) for n in range(stages))
        return Manifest(
            name=author, kind="serve", graph=names[0], cuts=tuple(range(1, stages)), weights=names,
            proposed=(us,) * stages, author=PeerId(author), serve=ServeConfig(cache="kv", max_sequence=8, vocabulary=4),
        )  # fmt: skip

    us = PeerId("us")
    jobs = {JobId(digest(f"big {n}")): manifest("stranger", 4096) for n in range(4)}
    small = JobId(digest("small"))
    jobs[small] = manifest("friend", 3)
    read = job_view.stages_to_read(jobs, (), (), us, 1 << 30, Random(1), 512, lambda job, author: author)
    assert {place for place in read if place[0] == small} == {(small, stage) for stage in range(3)}
    assert len(read) == 512 // job_view.AUTHORS + 3


def test_others_run_while_the_records_of_many_jobs_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()

    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            for n in range(200):
                await made.announce(JobId(digest(f"job {n}")))
            async with calls.beside_others():
                await ours.hosting.beat()

    monkeypatch.setattr(job_view, "judgement", calls.counted(job_view.judgement))
    asyncio.run(main())
    assert 0 < calls.most <= 32


def test_only_jobs_of_which_something_is_new_are_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[JobId] = []

    async def main() -> None:
        async with swarm(tmp_path) as made:
            view = (await made.join()).hosting._view
            jobs = [JobId(digest(f"job {n}")) for n in range(5)]
            for job in jobs:
                await made.announce(job)
            await view.beliefs(await view.job_records(0.0), {}, {})
            assert {*judged} == {*jobs}
            judged.clear()
            await view.beliefs(await view.job_records(0.0), {}, {})
            assert not judged
            await made.announce(jobs[3], step=1)
            found = await view.beliefs(await view.job_records(0.0), {}, {})
            assert judged == [jobs[3]] and {*found} == {*jobs}

    def noted(records: Sequence[JobRecord], view: OwnershipView, verify: Verify) -> Belief | None:
        judged.append(records[0].job)
        return believe(records, view, verify)

    monkeypatch.setattr(reading, "believe", noted)
    asyncio.run(main())
