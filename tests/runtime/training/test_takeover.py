"""Stages that lose their owner: what follows is, bit for bit, what would have come without."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import replace
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
from fusion.runtime.job.watch import Watch
from fusion.runtime.launch.launch import launch
from fusion.runtime.planes.torch_plane import TorchPlane, TorchTrainingStage
from fusion.runtime.training.snapshots.snapshot import decode_index
from fusion.runtime.training.step.messages import Commit
from fusion.runtime.training.streams.fence import Overtaken
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_stage_costs_a_step_and_changes_nothing(tmp_path: Path, victim: int) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 4) as made:
            lead, spare = made.peers[0], made.peers[3]
            work = language_job(lead, module, LONG, 3)
            await launch(lead.context, work.prepared)
            for stage in range(3):
                await made.peers[stage].host(work.prepared, stage)
            await reached(lead, work, 4, snapshot_step=3)
            await made.kill(made.peers[victim])
            at_death = await reached(lead, work, 4)
            await made.forgets(work, victim)
            # The step that was under way is not committed, however long the others wait.
            left = await reached(lead, work, 4)
            assert left.state == "running" and left.step <= at_death.step + 1
            await lead.context.directory.publish(record_of(lead, work, left))
            spare.context.leases.observe(work.prepared.job, victim, 1)
            await spare.host(work.prepared, victim)
            await until(lambda: lead.service.progress(work.prepared.job).attempts >= 2)  # type: ignore[union-attr]
            await reached(lead, work, left.step + 3)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1))

    asyncio.run(main())


def test_what_only_one_peer_holds_after_a_takeover_is_copied_at_once(tmp_path: Path) -> None:
    """The owner of stage 1 dies; the one that holds the copy of its shard follows it, and is the next to die: the stage
    that has that peer's stages before it holds the shard by then, long before the next snapshot."""

    async def main() -> None:
        torch.manual_seed(1)
        async with swarm(tmp_path, 5) as made:
            lead, victim, successor, holder, launcher = made.peers
            work = language_job(launcher, GPT(TINY), replace(LONG, snapshot_every=25), 4)
            await launch(launcher.context, work.prepared)
            for stage, peer in enumerate((lead, victim, successor, holder)):
                await peer.host(work.prepared, stage)
            job = work.prepared.job
            at = await reached(holder, work, 51, snapshot_step=50)  # the second one: its copies are beside it
            assert at.snapshot is not None
            index = decode_index(lead.context.blobs.store.path(at.snapshot).read_bytes(), job, 4)
            assert not holder.context.blobs.store.has(index.shards[1])
            await made.kill(victim)
            successor.context.leases.observe(job, 1, 1)
            await made.forgets(work, 1)
            await successor.host(work.prepared, 1)
            await until(lambda: lead.service.progress(job).attempts >= 2)  # type: ignore[union-attr]
            await until(lambda: holder.context.blobs.store.has(index.shards[1]))
            now = lead.service.progress(job)
            assert now is not None and now.snapshot == at.snapshot, "a later snapshot tells nothing"
            await stopped(made, lead, work)

    asyncio.run(main())


def test_a_killed_lead_is_followed_by_one_that_learns_of_the_snapshot_from_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 3) as made:
            lead, other, spare = made.peers
            work = language_job(spare, module, LONG, 2)
            await launch(spare.context, work.prepared)
            await lead.host(work.prepared, 0)
            await other.host(work.prepared, 1)
            known = await reached(other, work, 4, snapshot_step=3)  # and nobody ever published it
            await made.kill(lead)
            spare.context.leases.observe(work.prepared.job, 0, 1)
            await made.forgets(work, 0)
            await spare.host(work.prepared, 0)
            await reached(spare, work, known.step + 3)
            losses = await stopped(made, spare, work)
            assert min(losses) >= 3  # it went on, it did not start anew
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1))

    asyncio.run(main())


def test_a_broken_link_discards_the_step_and_the_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 3) as made:
            lead = made.peers[0]
            committed, cut = defaultdict[int, set[int]](set), asyncio.Event()

            def commits(_: Watch, stage: int, attempt: tuple[int, int], step: int) -> None:
                """The link breaks while the stages compute. Where one of them is ready and has not heard that the step is
                committed, all go back to the snapshot."""
                committed[step].add(stage)
                if step >= 2 and len(committed[step]) == 3 and not cut.is_set():
                    one, two = (made.peers[stage].context.peer_id for stage in (1, 2))
                    made.network.partition([one], [two])
                    cut.set()

            monkeypatch.setattr(Watch, "commits", commits)
            work = language_job(lead, module, replace(LONG, snapshot_every=1000), 3)
            await launch(lead.context, work.prepared)
            for stage in range(3):
                await made.peers[stage].host(work.prepared, stage)
            await cut.wait()
            await until(lambda: bool(lead.service.progress(work.prepared.job).message))  # type: ignore[union-attr]
            left = await reached(lead, work, 3)
            made.network.heal()
            await reached(lead, work, left.step + 3)
            losses = await stopped(made, lead, work)
            steps = [step for step, _ in lead.service.losses(work.prepared.job)]
            assert steps == list(range(len(steps)))  # every step once: nobody had to go back
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1))

    asyncio.run(main())


def test_a_stage_that_missed_a_commit_and_is_back_before_its_lead_has_a_link_to_it_is_told_to_go_back(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 2) as made:
            lead = made.peers[0]
            work = language_job(lead, module, LONG, 2)
            await launch(lead.context, work.prepared)
            for stage in range(2):
                await made.peers[stage].host(work.prepared, stage)
            await reached(lead, work, 4, snapshot_step=3)
            host = await _host_of(lead, work)
            links = host.partners
            lost: list[int] = []

            def send(target: int, message: Any, send: Any = links.send) -> None:
                if isinstance(message, Commit) and not lost:
                    lost.append(message.step)
                    partner = links._partners[target]
                    partner.outgoing.stream.abort()
                    partner.incoming.abort()
                else:
                    send(target, message)

            async def greet(*args: Any, greet: Any = links._partners[1]._greet) -> Any:
                stream = await greet(*args)
                await asyncio.sleep(0.3)  # the welcome comes late: the other stage has joined before it does
                return stream

            def discard(discard: Any = host._work._plane.discard) -> None:
                time.sleep(0.15)
                discard()

            links.send, links._partners[1]._greet, host._work._plane.discard = send, greet, discard
            await until(lambda: bool(lost))
            await reached(lead, work, lost[0] + 4)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1))

    asyncio.run(main())


def test_an_owner_that_knows_less_of_terms_than_its_neighbours_claims_anew(tmp_path: Path) -> None:
    """The claims of the owner before it had run out when it joined."""

    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 2) as made:
            lead, before = made.peers
            work = language_job(lead, module, LONG, 2)
            await launch(lead.context, work.prepared)
            before.context.leases.observe(work.prepared.job, 1, 6)
            await lead.host(work.prepared, 0)
            await before.host(work.prepared, 1)
            left = await reached(lead, work, 4, snapshot_step=3)
            await made.kill(before)
            await made.forgets(work, 1)
            [late] = await made.join(1)
            await late.host(work.prepared, 1)
            with pytest.raises(Overtaken, match="held under term 7, not 1"):
                await late.tasks[1]
            await late.context.leases.release(work.prepared.job, 1)
            await late.host(work.prepared, 1)
            await reached(lead, work, left.step + 3)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1))

    asyncio.run(main())


async def started(made: Swarm, stages: int, owners: list[Peer]) -> tuple[Job, torch.nn.Module]:
    """A long job, each stage on the peer named."""
    torch.manual_seed(1)
    module = GPT(TINY)
    work = language_job(made.peers[0], module, LONG, stages)
    await launch(made.peers[0].context, work.prepared)
    for stage, owner in enumerate(owners):
        await owner.host(work.prepared, stage)
    return work, module


class Filling(TorchPlane):
    """Takes no more stages once it is full."""

    full = False

    def training(self, *parts: Any) -> TorchTrainingStage:
        assert not self.full, "the stage was loaded when it had to be there"
        return super().training(*parts)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_warm_standby_follows_a_killed_owner_at_once(tmp_path: Path, victim: int) -> None:
    """Its neighbours ask for it; it neither reads a weight nor compiles anything then; the run ends as if nothing had
    happened. The claim of the dead owner is still in the directory."""

    async def main() -> None:
        plane = Filling()
        async with swarm(tmp_path / "rough", 4, Surroundings(plane=plane)) as made:
            *owners, spare = made.peers
            work, module = await started(made, 3, owners)
            known = await reached(owners[0], work, 4, snapshot_step=3)
            assert await spare.stand_by(work.prepared, victim, record_of(owners[0], work, known)) >= 3

            plane.full = True
            await made.kill(owners[victim])
            lead = spare if victim == 0 else owners[0]
            await until(lambda: victim in spare.tasks)
            left = await reached(spare, work, 0)
            await reached(lead, work, max(left.step, known.step) + 3)
            plane.full = False
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1))

    asyncio.run(main())


def test_two_owners_killed_at_once_are_followed_by_one_standby(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path / "rough", 5) as made:
            *owners, spare = made.peers
            work, module = await started(made, 4, owners)
            known = await reached(owners[0], work, 4, snapshot_step=3)
            for stage in (1, 2):
                await spare.stand_by(work.prepared, stage, record_of(owners[0], work, known))
            made.network.kill(owners[1].context.peer_id)
            await made.kill(owners[2])
            await made.kill(owners[1])
            await until(lambda: {1, 2} <= set(spare.tasks))
            await reached(owners[0], work, known.step + 4)
            losses = await stopped(made, owners[0], work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 4, max(losses) + 1))

    asyncio.run(main())


def test_a_standby_follows_the_snapshots_and_keeps_no_old_ones(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as made:
            *owners, spare = made.peers
            work, _ = await started(made, 2, owners)
            sizes, at = [], 0
            for _ in range(5):
                known = await reached(owners[0], work, at + 1, snapshot_step=at + 1)
                at = await spare.stand_by(work.prepared, 1, record_of(owners[0], work, known))
                assert at == known.snapshot_step
                sizes.append(len(spare.context.blobs.store.held()))
            assert sizes[-1] == sizes[-2] == sizes[-3]
            # An older word than the last one changes nothing.
            early = replace(record_of(owners[0], work, known), snapshot=None, snapshot_step=0)
            assert await spare.stand_by(work.prepared, 1, early) == at

    asyncio.run(main())


def test_what_does_not_fit_into_memory_is_kept_on_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as made:
            *owners, spare = made.peers
            work, _ = await started(made, 2, owners)
            manifest = replace(work.prepared.manifest, memory_bytes=(3 << 30, 3 << 30))
            service, memory = spare.service, spare.context.memory

            async def prepare(stage: int) -> None:
                """From the newest snapshot: the job goes on, and older ones are soon gone."""
                record = record_of(owners[0], work, await reached(owners[0], work, 4, snapshot_step=3))
                ready = await service.prepare(work.prepared.job, manifest, stage, record)
                assert ready == record.snapshot_step

            for stage, free in (
                (0, 1),
                (1, 1),
            ):  # of the 4 GiB lent the first takes 3, the second finds no room
                await prepare(stage)
                assert memory.spare_bytes == free << 30
            service.forget(work.prepared.job, 0)
            assert memory.spare_bytes == 4 << 30
            await prepare(1)  # there is room now
            assert memory.spare_bytes == 1 << 30
            # Another job's stage takes the room, of whatever kind it is; then there is room again.
            warm = service._loader._ahead[work.prepared.job, 1]
            assert warm.loaded is not None
            memory.hold((JobId("b" * 64), 0), 3 << 30)
            assert warm.loaded is None and sum(memory.by_place.values()) == 3 << 30
            await prepare(1)
            assert warm.loaded is None
            memory.release((JobId("b" * 64), 0))
            await prepare(1)
            assert warm.loaded is not None
            service.forget(work.prepared.job, 1)
            service.forget(work.prepared.job, 1)

    asyncio.run(main())


def test_a_stage_that_is_lost_again_while_it_is_being_made_ready_leaves_nothing_in_memory(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 3) as made:
            *owners, spare = made.peers
            work, _ = await started(made, 2, owners)
            loader, memory, gate = spare.service._loader, spare.context.memory, asyncio.Event()
            build, building = loader._builder.build, asyncio.Event()

            async def slow(*args: Any) -> Any:
                building.set()
                await gate.wait()
                return await build(*args)

            loader._builder.build = slow  # type: ignore[method-assign]
            record = record_of(owners[0], work, await reached(owners[0], work, 4, snapshot_step=3))
            preparing = asyncio.create_task(spare.stand_by(work.prepared, 1, record))
            await building.wait()
            ahead = loader._ahead[work.prepared.job, 1]
            manifest = work.prepared.manifest
            hosting = asyncio.create_task(spare.service.host(work.prepared.job, manifest, 1, 9))
            await until(lambda: not loader.is_ahead(work.prepared.job, 1))
            hosting.cancel()
            await asyncio.gather(hosting, return_exceptions=True)
            gate.set()
            await preparing
            assert ahead.loaded is None and not memory.by_place

    asyncio.run(main())


def test_a_neighbour_that_comes_while_the_stage_is_being_loaded_waits_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 2) as made:
            one, two = made.peers
            work, _ = await started(made, 2, [one])
            gate, service = asyncio.Event(), two.service
            load = service._loader.load

            async def slow(*args: Any) -> Any:
                await gate.wait()
                return await load(*args)

            service._loader.load = slow  # type: ignore[method-assign]
            await two.host(work.prepared, 1)
            host = await _host_of(one, work)
            await until(lambda: host.partners._partners[1]._last is not None)
            await asyncio.sleep(0.2)
            assert "not loaded" not in host.partners.waiting_for
            gate.set()
            await reached(one, work, 2)

    asyncio.run(main())


async def _host_of(peer: Peer, work: Job) -> Any:
    place = (work.prepared.job, 0)
    await until(lambda: place in peer.service._hosts)
    return peer.service._hosts[place]


def test_a_stage_is_handed_over_without_a_step_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(tmp_path / "rough", 4) as made:
            *owners, spare = made.peers
            work, module = await started(made, 3, owners)
            job = work.prepared.job
            left = await reached(owners[0], work, 5)
            await spare.stand_by(work.prepared, 1, record_of(owners[0], work, left))
            handover = await owners[1].service.pass_on(job, 1)
            word = owners[1].release(job, 1, spare)
            await spare.take_over(job, 1, owners[1].holds(job, 1), handover, word)
            await until(lambda: spare.holds(job, 1) > 0)
            await reached(owners[0], work, int(handover["step"]) + 3)
            assert owners[0].service.progress(job).discarded == 0  # type: ignore[union-attr]
            owners[1].tasks.pop(1).cancel()
            losses = await stopped(made, owners[0], work)
            assert sorted(losses) == list(range(len(losses)))  # every step once
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1))
        assert "goes on from a snapshot" not in caplog.text

    caplog.set_level(logging.WARNING)
    asyncio.run(main())


def test_a_handover_that_makes_no_sense_costs_a_roll_back_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path / "rough", 4) as made:
            *owners, spare = made.peers
            work, module = await started(made, 3, owners)
            job = work.prepared.job
            left = await reached(owners[0], work, 5, snapshot_step=3)
            await spare.stand_by(work.prepared, 1, record_of(owners[0], work, left))
            over = owners[1].holds(job, 1)
            await made.kill(owners[1])
            await spare.take_over(job, 1, over, {"step": -1, "shard": "x", "peer": 3})
            await reached(owners[0], work, left.step + 3)
            losses = await stopped(made, owners[0], work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 3, max(losses) + 1))

    asyncio.run(main())


def test_a_stage_that_does_not_run_here_cannot_be_handed_over(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, 2) as made:
            one, two = made.peers
            work, _ = await started(made, 1, [one])
            with pytest.raises(JobError, match=r"stage 0 of job .* does not run here"):
                await two.service.pass_on(work.prepared.job, 0)
            await reached(one, work, 1)
            record = record_of(one, work, await reached(one, work, 3, snapshot_step=3))
            with pytest.raises(JobError, match="runs here"):
                await one.service.prepare(work.prepared.job, work.prepared.manifest, 0, record)
            with pytest.raises((JobError, SwarmError)):
                await two.service.prepare(work.prepared.job, work.prepared.manifest, 7, record)

    asyncio.run(main())


def test_a_stage_that_nobody_took_goes_on_and_nothing_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        torch.manual_seed(1)
        module = GPT(TINY)
        async with swarm(tmp_path / "rough", 2) as made:
            lead, other = made.peers
            work = language_job(lead, module, LONG, 2)
            await launch(lead.context, work.prepared)
            for stage in range(2):
                await made.peers[stage].host(work.prepared, stage)
            at = 2
            for peer, stage in ((other, 1), (lead, 0), (other, 1)):
                at = (await reached(lead, work, at + 2)).step
                await peer.service.pass_on(work.prepared.job, stage)
                peer.service.stay(work.prepared.job, stage)
            # Not waiting for the boundary: the lead may have asked for the hand-over already, or not.
            passing = asyncio.create_task(other.service.pass_on(work.prepared.job, 1))
            await asyncio.sleep(0)
            other.service.stay(work.prepared.job, 1)
            with pytest.raises(JobError, match="stays"):
                await passing
            left = await reached(lead, work, at + 4)
            assert (left.discarded, left.replayed, left.losses) == (0, 0, 0)
            losses = await stopped(made, lead, work)
        assert_bit_identical(losses, await undisturbed(tmp_path / "calm", module, 2, max(losses) + 1))

    asyncio.run(main())
