"""Owners that hold a stage, answer, and do nothing for it: the job goes on at a standby, with the bits it would have had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.surroundings import Surroundings
from support.training import (
    LONG,
    TINY,
    Job,
    Peer,
    Swarm,
    assert_bit_identical,
    language_job,
    reached,
    record_of,
    stopped,
    swarm,
    undisturbed,
    until,
)

from fusion.runtime.capture.models import GPT
from fusion.runtime.job.errors import JobError
from fusion.runtime.launch.launch import launch
from fusion.runtime.training.host import TrainingHost
from fusion.runtime.training.snapshots.stage_files import ShardRefused
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.history import Version
from fusion.runtime.training.step.stalls import PACED
from fusion.swarm.directory.records import Digest, JobId

IMPATIENT = Surroundings(stall_seconds=1.0)


async def _for_ever(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


def computes_nothing(host: TrainingHost) -> None:
    host._work._rad.step = _for_ever  # type: ignore[method-assign]


def drips(host: TrainingHost) -> None:
    """It sends one tensor at a time, each before others lose their patience."""
    rad, loop = host._work._rad, asyncio.get_running_loop()
    send, at = rad._send, loop.time()

    def late(*args: Any) -> None:
        nonlocal at
        at = max(at, loop.time()) + 0.6
        loop.call_at(at, send, *args)

    rad._send = late  # type: ignore[assignment]


def says_that_it_waits(host: TrainingHost) -> None:
    """For the stage before it, which waits for it."""
    computes_nothing(host)
    host._work.__class__ = type("Waiting", (type(host._work),), {"waits_for": host._work.here.stage - 1})


def ignores_all(host: TrainingHost) -> None:
    """It keeps its streams up, and neither joins, nor follows, nor leaves when it is told to."""
    computes_nothing(host)
    host._mailbox.receive = lambda source, message: None  # type: ignore[method-assign]


def leads_nothing(host: TrainingHost) -> None:
    assert host.lead is not None
    host.lead.receive = lambda stage, message: None  # type: ignore[method-assign]


def welcomes_nobody(host: TrainingHost) -> None:
    """Its streams end, and it takes no other ones."""
    ignores_all(host)
    host.partners.accept = _for_ever  # type: ignore[method-assign]
    for partner in host.partners._partners.values():
        if partner.incoming is not None:
            partner.incoming.abort()


async def started(made: Swarm, owners: list[Peer]) -> tuple[Job, torch.nn.Module]:
    torch.manual_seed(1)
    module = GPT(TINY)
    work = language_job(made.peers[0], module, LONG, len(owners))
    await launch(made.peers[0].context, work.prepared)
    for stage, owner in enumerate(owners):
        await owner.host(work.prepared, stage)
    for peer in made.peers:
        task = asyncio.create_task(_read_claims(peer, work.prepared.job, len(owners)))
        made.stack.callback(task.cancel)
    return work, module


async def _read_claims(peer: Peer, job: JobId, stages: int) -> None:
    """As a peer's hosting does at every heartbeat."""
    while True:
        await peer.context.leases.claims_of(job, range(stages))
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("stages", "victim", "idle"),
    [
        (3, 1, computes_nothing),
        (2, 1, ignores_all),
        (3, 0, leads_nothing),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (3, 2, says_that_it_waits),
                (3, 1, ignores_all),
                (3, 1, welcomes_nobody),
                (3, 0, computes_nothing),
                (2, 0, computes_nothing),
            )
        ),
    ],
)
def test_a_stage_whose_owner_does_nothing_goes_to_a_standby(
    tmp_path: Path, stages: int, victim: int, idle: Callable[[TrainingHost], None]
) -> None:
    async def main() -> None:
        async with swarm(tmp_path / "rough", stages + 1, IMPATIENT) as made:
            *owners, spare = made.peers
            work, module = await started(made, owners)
            job = work.prepared.job
            known = await reached(owners[0], work, 4, snapshot_step=3)
            await spare.stand_by(work.prepared, victim, record_of(owners[0], work, known))
            idle(owners[victim].service._hosts[job, victim])
            await until(lambda: victim in spare.tasks)
            assert owners[victim].context.peer_id != spare.context.peer_id
            lead = spare if victim == 0 else owners[0]
            left = await reached(spare, work, 0)
            await reached(lead, work, max(left.step, known.step) + 3)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, stages, max(losses) + 1))

    asyncio.run(main())


@pytest.mark.slow
def test_an_owner_that_sends_a_little_now_and_then_loses_its_stage(tmp_path: Path) -> None:
    """No tensor comes late, and no step: the whole job does."""

    async def main() -> None:
        async with swarm(tmp_path / "rough", 3, IMPATIENT) as made:
            *owners, spare = made.peers
            work, module = await started(made, owners)
            known = await reached(owners[0], work, PACED + 4, snapshot_step=3)
            await spare.stand_by(work.prepared, 1, record_of(owners[0], work, known))
            drips(owners[1].service._hosts[work.prepared.job, 1])
            await until(lambda: 1 in spare.tasks)
            await reached(owners[0], work, known.step + 3)
            losses = await stopped(made, owners[0], work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1))

    asyncio.run(main())


def test_an_owner_that_never_joins_loses_its_stage_before_the_first_step(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path / "rough", 4, IMPATIENT) as made:
            *owners, spare = made.peers
            work, module = await started(made, owners)
            place = work.prepared.job, 2
            await until(lambda: place in owners[2].service._hosts)
            ignores_all(owners[2].service._hosts[place])
            send = owners[2].service._hosts[place].partners.send

            def silent(target: int, message: m.Message) -> None:
                if not isinstance(message, m.Join):
                    send(target, message)

            owners[2].service._hosts[place].partners.send = silent  # type: ignore[method-assign]
            record = record_of(owners[0], work, await reached(owners[0], work, 0))
            await spare.stand_by(work.prepared, 2, record)
            await until(lambda: 2 in spare.tasks)
            await reached(owners[0], work, 3)
            losses = await stopped(made, owners[0], work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1))

    asyncio.run(main())


def test_where_nobody_is_ready_to_follow_a_slow_owner_keeps_its_stage(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path / "rough", 2, Surroundings(stall_seconds=0.2)) as made:
            work, module = await started(made, made.peers)
            lead, slow = made.peers
            known = await reached(lead, work, 4, snapshot_step=3)
            rad = slow.service._hosts[work.prepared.job, 1]._work._rad
            step, waited = rad.step, 0

            async def late(*args: Any, **kwargs: Any) -> Any:
                nonlocal waited
                waited += 1
                if waited == 1:
                    await asyncio.sleep(3.0)  # fifteen times as long as a step may stand still
                return await step(*args, **kwargs)

            rad.step = late  # type: ignore[method-assign]
            left = await reached(lead, work, known.step + 4)
            assert waited > 1 and (left.discarded, left.losses) == (0, 0)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1))

    asyncio.run(main())


def saves_other_bytes(host: TrainingHost) -> None:
    """Its shard is a blob that holds no state."""

    async def save(version: Version, state: Any) -> Digest:
        return await host._work.snapshots._files.put(b"no state at all")

    host._work.snapshots._files.save = save  # type: ignore[method-assign]


def saves_nothing(host: TrainingHost) -> None:
    host._work.snapshots._files.save = _for_ever  # type: ignore[method-assign]


def names_a_shard_that_nobody_has(host: TrainingHost) -> None:
    async def save(version: Version, state: Any) -> Digest:
        return Digest(f"{version.step:064x}")

    host._work.snapshots._files.save = save  # type: ignore[method-assign]


def refuses_every_copy(host: TrainingHost) -> None:
    async def replicate(*_: Any, **__: Any) -> None:
        raise ShardRefused(host._work.here.stage - 1, JobError("no state"))

    host._work.snapshots._files.replicate = replicate  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("stages", "victim", "lie", "ending"),
    [
        (2, 1, saves_other_bytes, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (2, 1, saves_other_bytes, True),
                (3, 1, saves_other_bytes, True),
                (2, 1, saves_nothing, True),
                (3, 1, saves_nothing, False),
                (3, 2, names_a_shard_that_nobody_has, True),
                (3, 0, saves_other_bytes, False),
                (2, 0, saves_other_bytes, True),
                (3, 0, names_a_shard_that_nobody_has, True),
                (3, 0, saves_nothing, True),
                (3, 1, refuses_every_copy, False),
                (3, 1, refuses_every_copy, True),
            )
        ),
    ],
)
def test_an_owner_that_keeps_snapshots_from_being_durable_is_replaced(
    tmp_path: Path, stages: int, victim: int, lie: Callable[[TrainingHost], None], ending: bool
) -> None:
    """While steps go on, or where the job waits for its last snapshot."""

    async def main() -> None:
        async with swarm(tmp_path / "rough", stages + 1, IMPATIENT) as made:
            *owners, spare = made.peers
            work, module = await started(made, owners)
            job = work.prepared.job
            # After six snapshots the lead knows how quickly they become durable.
            known = await reached(owners[0], work, 19, snapshot_step=18)
            await spare.stand_by(work.prepared, victim, record_of(owners[0], work, known))
            lie(owners[victim].service._hosts[job, victim])
            lead = spare if victim == 0 else owners[0]
            if ending:
                await reached(owners[0], work, known.step + 10)
            else:
                await until(lambda: victim in spare.tasks)
                await reached(lead, work, known.step + 10, snapshot_step=known.snapshot_step + 3)
            if ending and victim == 0:
                owners[0].service.stop(job)
                await until(lambda: victim in spare.tasks)
                await reached(spare, work, known.step + 3)
            losses = await stopped(made, lead, work)
            assert victim in spare.tasks
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, stages, max(losses) + 1))

    asyncio.run(main())
