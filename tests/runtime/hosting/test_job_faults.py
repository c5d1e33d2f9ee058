"""What nobody expected of the work for one job ends that work, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hosting import Peer, over, swarm, until

from fusion.runtime.hosting import job_view
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.directory.records import JobId


def fails_for(job: JobId, of: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """`before`, but for the job that `of` finds in its arguments."""

    def made(*arguments: Any, **named: Any) -> Any:
        if of(*arguments) == job:
            raise RecursionError("maximum recursion depth exceeded")
        return before(*arguments, **named)

    return made


def judging(peer: Peer, job: JobId, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(job_view, "judgement", fails_for(job, lambda context, job, *_: job, job_view.judgement))


def its_law(peer: Peer, job: JobId, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Manifest, "law", fails_for(job, lambda manifest, job: job, Manifest.law))


def claiming(peer: Peer, job: JobId, patch: pytest.MonkeyPatch) -> None:
    leases = peer.context.leases
    patch.setattr(leases, "claim", fails_for(job, lambda job, *_: job, leases.claim))


def leading(peer: Peer, job: JobId, patch: pytest.MonkeyPatch) -> None:
    gossip = peer.hosting._gossip
    patch.setattr(gossip, "lead", fails_for(job, lambda claim, *_: claim.job, gossip.lead))


def releasing(peer: Peer, job: JobId, patch: pytest.MonkeyPatch) -> None:
    leases = peer.context.leases
    patch.setattr(leases, "release", fails_for(job, lambda job, *_: job, leases.release))
    peer.service.on_host = lambda each, term: (
        each == job and asyncio.get_running_loop().call_soon(lambda: peer.service.end(job, 0))
    )


def fetching(peer: Peer, job: JobId, patch: pytest.MonkeyPatch) -> None:
    read = peer.blobs.read
    patch.setattr(peer.blobs, "read", fails_for(job, lambda digest, *_: digest, read))


@pytest.mark.parametrize("spoil", [judging, its_law, claiming, leading, releasing, fetching])
def test_what_nobody_expected_of_one_job_ends_no_other(
    tmp_path: Path,
    spoil: Callable[[Peer, JobId, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            first = await made.launch(made.manifest(ours, salt="1"))
            await ours.look()
            await until(lambda: (first, 0) in ours.service.running)
            spoilt = await made.launch(made.manifest(ours, salt="2"))
            spoil(ours, spoilt, monkeypatch)
            for _ in range(3):
                await ours.look()
                await asyncio.sleep(0.01)
            await over(ours, (spoilt, 0))
            second = await made.launch(made.manifest(ours, salt="3"))
            await ours.look()
            await until(lambda: set(ours.service.running) == {(first, 0), (second, 0)})
            assert ours.work is not None and not ours.work.done()
            messages = [record.message for record in caplog.records if spoilt[:12] in record.message]
            assert messages == [
                f"job {spoilt[:12]} fails here and is left to others: RecursionError: maximum recursion depth exceeded"
            ]

    asyncio.run(main())


def test_a_stage_that_cannot_be_passed_on_as_nobody_expected_keeps_none_of_the_others_from_leaving(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            ours, successor = await made.join(), await made.join()
            jobs = [await made.launch(made.manifest(ours, salt=salt)) for salt in "12"]
            await ours.look()
            await until(lambda: len(ours.service.running) == 2)
            await ours.context.leases.beat()
            for _ in range(2):
                await successor.look()
            await until(lambda: len(successor.service.prepared) == 2)
            await successor.context.leases.beat()
            ours.service.pass_on = fails_for(jobs[0], lambda job, stage: job, ours.service.pass_on)  # type: ignore[method-assign]
            await ours.hosting.leave()
            await until(lambda: set(successor.service.running) >= {(jobs[1], 0)})
            assert ours.work is not None and not ours.work.done()

    asyncio.run(main())
