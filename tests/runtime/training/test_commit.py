"""The books of a run whose owners come and go: which samples it was made of, and what it went through."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import (
    LONG,
    TINY,
    Job,
    Peer,
    assert_bit_identical,
    config,
    language_job,
    reached,
    record_of,
    stopped,
    swarm,
    undisturbed,
    until,
)

from fusion.runtime.capture.models import GPT
from fusion.runtime.job.progress import Progress
from fusion.runtime.launch.launch import launch
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.data.ledger import UNTRAINED, Ledger
from fusion.runtime.training.lead import lead as leads
from fusion.runtime.training.lead import snapshot_coordinator
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.snapshots.snapshot_period import SnapshotPeriod
from fusion.runtime.training.step.events import Linked, Unlinked
from fusion.runtime.training.step.lead import expected
from fusion.runtime.training.step.messages import Restore


def planned(work: Job, steps: int) -> Ledger:
    """What the ledger has to say after so many steps, by the plan alone."""
    train = work.prepared.manifest.train
    assert train is not None
    samples = Batches(train, ["input_ids"], work.train, None).samples
    assert samples is not None
    ledger = UNTRAINED
    for step in range(steps):
        ledger = ledger.commit(
            step, expected(train, step, samples), train.microbatches * train.microbatch_size
        )
    return ledger


async def begun(owners: list[Peer], train: object = LONG) -> tuple[Job, torch.nn.Module]:
    torch.manual_seed(1)
    module = GPT(TINY)
    work = language_job(owners[0], module, train, len(owners))  # type: ignore[arg-type]
    await launch(owners[0].context, work.prepared)
    for stage, owner in enumerate(owners):
        await owner.host(work.prepared, stage)
    return work, module


def progress_at(peer: Peer, work: Job) -> Progress:
    progress = peer.service.progress(work.prepared.job)
    assert progress is not None
    return progress


async def index_at(peer: Peer, work: Job) -> snapshot.Index:
    """Of the newest snapshot."""
    digest = progress_at(peer, work).snapshot
    assert digest is not None
    data = await peer.context.blobs.read(digest, snapshot.MAX_INDEX_BYTES)
    return snapshot.decode_index(data, work.prepared.job, work.prepared.manifest.stages)


def assert_books(progress: Progress, work: Job) -> None:
    ledger = planned(work, progress.step)
    assert (progress.samples, progress.ledger) == (ledger.samples, ledger.head)


@pytest.mark.heavy
def test_the_lead_is_handed_over_with_its_books_and_nothing_shows(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path / "rough", 4) as made:
            *owners, spare = made.peers
            lead = owners[0]
            work, module = await begun(owners)
            job = work.prepared.job
            left = await reached(lead, work, 5, snapshot_step=3)
            await spare.stand_by(work.prepared, 0, record_of(lead, work, left))
            handover = await lead.service.pass_on(job, 0)
            early = dict(lead.service.losses(job))
            await spare.take_over(job, 0, lead.holds(job, 0), handover, lead.release(job, 0, spare))
            await until(lambda: spare.holds(job, 0) > 0)
            await reached(spare, work, int(handover["step"]) + 3)
            lead.tasks.pop(0).cancel()
            losses = await stopped(made, spare, work)
            assert min(losses) == handover["step"] == max(early) + 1
            ended = progress_at(spare, work)
            assert (ended.discarded, ended.replayed, ended.losses, ended.recoveries) == (0, 0, 0, 0)
            assert_books(ended, work)
            assert (await index_at(spare, work)).ledger == planned(work, ended.step)
        calm = await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1)
        assert_bit_identical({**early, **losses}, calm)

    asyncio.run(main())


@pytest.mark.heavy
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_loss_the_ledger_is_that_of_the_plan_and_the_loss_is_counted(
    tmp_path: Path, victim: int
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as made:
            *owners, spare = made.peers
            work, _ = await begun(owners)
            job = work.prepared.job
            left = await reached(owners[1], work, 5, snapshot_step=3)
            await spare.stand_by(work.prepared, victim, record_of(owners[0], work, left))
            await made.kill(owners[victim])
            lead = spare if victim == 0 else owners[0]
            await until(lambda: spare.holds(job, victim) > 0)
            await until(lambda: lead.service.progress(job) is not None)
            await reached(lead, work, left.step + 3)
            await stopped(made, lead, work)
            ended = progress_at(lead, work)
            assert ended.losses == 1 and ended.recoveries >= 1
            assert ended.discarded >= 1  # the step that was under way
            assert_books(ended, work)

    asyncio.run(main())


@pytest.mark.heavy
def test_snapshots_come_by_themselves_at_a_period_that_losses_and_costs_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_coordinator, "SnapshotPeriod", partial(SnapshotPeriod, cost_seconds=1e-4))

    async def main() -> None:
        async with swarm(tmp_path, 2) as made:
            work, _ = await begun(made.peers, replace(LONG, snapshot_every=0))
            first = await reached(made.peers[0], work, 1, snapshot_step=1)
            await reached(made.peers[0], work, 1, snapshot_step=first.snapshot_step + 1)
            index = await index_at(made.peers[0], work)
            assert index.ledger == planned(work, index.step)
            await stopped(made, made.peers[0], work)
            assert_books(progress_at(made.peers[0], work), work)

    asyncio.run(main())


def test_a_snapshot_that_nobody_holds_any_more_sends_everybody_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 2) as made:
            lead, other = made.peers
            work, _ = await begun([lead, other])
            first = await reached(lead, work, 3, snapshot_step=3)
            await reached(lead, work, 3, snapshot_step=first.snapshot_step + 1)
            host = other.service._hosts[work.prepared.job, 1]
            load, lost, loaded, shown = host._loaded.files.load, [], [], []

            async def broken(checkpoint: leads.Checkpoint, owners: object) -> object:
                if not lost:
                    lost.append(checkpoint)
                if checkpoint == lost[0]:
                    raise snapshot.JobError("nobody announces it")
                loaded.append(checkpoint)
                shown.append(progress_at(lead, work).snapshot_step)
                return await load(checkpoint, owners)  # type: ignore[arg-type]

            monkeypatch.setattr(host._loaded.files, "load", broken)
            # The other stage joins at another step: everybody goes back.
            at = progress_at(lead, work).step
            host._work.state = replace(host._work.state, step=0)
            links = tuple(host.partners.linked_terms.items())
            for event in (Unlinked(), Linked(links)):
                host._mailbox.put(event)
            await until(lambda: bool(loaded))
            assert 0 < shown[0] == loaded[0].step < lost[0].step
            await until(lambda: progress_at(lead, work).replayed > 0 and progress_at(lead, work).step > at)
            await stopped(made, lead, work)
            assert_books(progress_at(lead, work), work)

    asyncio.run(main())


@pytest.mark.heavy
def test_two_neighbours_that_vanish_at_once_cost_a_snapshot_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody stood by for them. Of each the other may have had the only copy of the newest shard, not of that before it."""

    async def main() -> None:
        async with swarm(tmp_path / "rough", 6) as made:
            *owners, one, two = made.peers
            lead = owners[0]
            work, module = await begun(owners)
            first = await reached(lead, work, 3, snapshot_step=3)
            left = await reached(lead, work, 3, snapshot_step=first.snapshot_step + 1)
            job = work.prepared.job
            early = dict(lead.service.losses(job))
            await asyncio.gather(made.kill(owners[1]), made.kill(owners[2]))
            for stage, successor in ((1, one), (2, two)):
                await made.forgets(work, stage)
                successor.work[job] = work.prepared.manifest
                successor.context.leases.know(work.prepared.manifest.law(job))
                assert await successor.take_over(job, stage, 1, None) is not None
            gone_back: list[int] = []
            everyone = leads.Lead._everyone

            def told(self: leads.Lead, message: object) -> None:
                if isinstance(message, Restore):
                    gone_back.append(message.checkpoint.step)
                everyone(self, message)  # type: ignore[arg-type]

            monkeypatch.setattr(leads.Lead, "_everyone", told)
            await until(lambda: progress_at(lead, work).replayed > 0)
            assert gone_back and min(gone_back) >= first.snapshot_step, (gone_back, left)
            losses = await stopped(made, lead, work)
            assert_books(progress_at(lead, work), work)
        calm = await undisturbed(tmp_path / "calm", module, 4, max(losses) + 1)
        assert_bit_identical({**early, **losses}, calm)

    asyncio.run(main())


@pytest.mark.parametrize("told", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_how_a_job_went_outlives_the_lead_that_ends_it(tmp_path: Path, told: bool) -> None:
    """It is killed right before it tells anybody of the end, or right after."""

    async def main() -> None:
        async with swarm(tmp_path / "rough", 4) as made:
            *owners, spare = made.peers
            lead = owners[0]
            work, _ = await begun(owners, config())
            job = work.prepared.job
            await until(lambda: (job, 0) in lead.service.ran)
            ending = lead.service.ran[job, 0].lead
            assert ending is not None
            ended = asyncio.Event()
            finish = ending.finish

            def kill(*words: Any) -> None:
                if told:
                    finish(*words)
                ended.set()

            ending.finish = kill  # type: ignore[method-assign]
            await ended.wait()
            if told:
                await asyncio.gather(*(peer.tasks[stage] for stage, peer in enumerate(owners) if stage))
            last = progress_at(lead, work)
            await spare.stand_by(work.prepared, 0, record_of(lead, work, last))
            await made.kill(lead)
            if not told:
                await until(lambda: spare.holds(job, 0) > 0)
                await asyncio.gather(*(task for peer in made.peers for task in peer.tasks.values()))
            for peer in owners[1:] if told else [spare, *owners[1:]]:
                final = progress_at(peer, work)
                assert (final.state, final.step, final.loss, final.recent) == (
                    "done",
                    6,
                    last.loss,
                    last.recent,
                )
                assert final.loss is not None and [step for step, _ in final.recent] == list(range(6))
                assert (final.validation_step, final.snapshot_step) == (6, 6) and final.validation_loss
                assert_books(final, work)

    asyncio.run(main())
