from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from support.hosting import FITNESS, Peer, over, swarm, until

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.opset import OPSET_VERSION
from fusion.dag.ir.serialise import encode
from fusion.runtime.hosting import job_view
from fusion.runtime.hosting.hosting import HostingConfig
from fusion.runtime.hosting.vacant_stages import NO_CLAIM_SECONDS
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.errors import JobError, JobFailed, Understated, Unrunnable, Unsupported
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.manifest_shelf import FETCHES_PER_AUTHOR
from fusion.runtime.job.progress import Progress
from fusion.runtime.job.protocol import JOB
from fusion.swarm.authority.grants import ROLES, Grant, seal_grant
from fusion.swarm.authority.law import Admission
from fusion.swarm.authority.revocation import mark, seal_revocation
from fusion.swarm.authority.wallet import Wallet
from fusion.swarm.claims.election import HEAD_START_SECONDS
from fusion.swarm.directory.api import GLANCE_SECONDS
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord
from fusion.swarm.errors import BlobError, StaleTerm
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import Stream, call

SNAPSHOT = Digest("5" * 64)


# --- claiming


def test_a_stage_with_an_operator_that_the_plane_lacks_is_neither_claimed_nor_stood_by_for(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            lacking = await made.join(lacks=frozenset({"aten.tanh", "fusion.linear_int8"}))
            graph = with_operators("aten.relu", "aten.tanh")
            manifest = made.manifest(None, lacking, graph=lacking.blobs.store.put(encode(graph)))
            job = await made.launch(manifest, state="running", stages=2)
            await lacking.look()
            assert not lacking.service.begun  # not before the graph is read
            for _ in range(4):
                made.clock.advance(100.0)
                await made.announce(job, state="running", stages=2)
                await lacking.look()
                await asyncio.sleep(0.05)
            await until(lambda: (job, 0) in lacking.service.running)
            assert await made.owner(job, 1) is None
            taken = await lacking.hosting.take_over(job, 1, 0, None)
            assert taken is None and lacking.service.begun == [(job, 0)]
            whole = await made.join()
            whole.blobs.store.put(manifests.encode(manifest))
            for _ in range(3):
                made.clock.advance(100.0)
                await made.announce(job, state="running", stages=2)
                await whole.look()
            await until(lambda: (job, 1) in whole.service.running)
            await lacking.look()
            assert (job, 1) not in lacking.service.prepared

    asyncio.run(main())


def with_operators(*ops: str) -> Graph:
    """A chain of these, a node each."""
    made = TensorType((3,), "float32")
    names = ["x", *(f"node{i}" for i in range(len(ops)))]
    nodes = tuple(
        Node(after, op, (Ref(before),), (made,))
        for op, before, after in zip(ops, names, names[1:], strict=False)
    )
    return Graph((Input("x", made),), (), nodes, (Ref(names[-1]),), ())


def test_what_no_peer_can_run_is_not_claimed_again_whatever_job_it_comes_in(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            ours = await made.join()
            first = await made.launch(made.manifest(ours, salt="1"))
            await ours.look()
            await until(lambda: (first, 0) in ours.service.running)
            ours.service.end(
                first, 0, Unrunnable("the model's input x is neither input_ids nor position_ids")
            )
            await over(ours, (first, 0))
            await ours.look()
            assert (await made.record(first)).state == "failed"
            again = await made.launch(made.manifest(ours, salt="2"))
            in_one_run = ServeConfig(cache="recompute", max_sequence=1, vocabulary=1, outputs=("y",))
            others = [
                await made.launch(made.manifest(ours, graph=Digest("3" * 64))),
                await made.launch(made.manifest(ours, ours)),
                await made.launch(made.manifest(ours, serve=in_one_run)),
            ]
            await ours.look()
            await until(lambda: {job for job, _ in ours.service.running} == set(others))
            assert await ours.hosting.take_over(again, 0, 0, None) is None
            assert await made.owner(again, 0) is None

    asyncio.run(main())


def test_the_proposed_peer_claims_at_once_and_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours, other = await made.join(), await made.join()
            job = await made.launch(made.manifest(ours))
            await other.look()
            assert other.service.begun == []
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)
            await other.look()
            assert other.service.begun == []
            owner = await made.owner(job, 0)
            assert owner is not None and (owner.peer, owner.score) == (ours.id, 1.0)
            assert ours.service.terms[job, 0] == owner.term == 1

    asyncio.run(main())


def test_a_nudge_is_enough(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours))
            reply = await call(made.client(), ours.id, JOB.name, "launch", {"job": job})
            assert reply.kind == "ok"
            await until(lambda: (job, 0) in ours.service.running)

    asyncio.run(main())


def test_only_a_peer_without_a_part_in_any_job_reads_what_is_a_little_old(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours, standby, idle = [await made.join() for _ in range(3)]
            ages: dict[str, float] = {}

            def watched(peer: Peer) -> None:
                job_records = peer.context.directory.job_records

                async def read(
                    job: JobId | None = None, *, max_age_seconds: float = 0.0
                ) -> tuple[JobRecord, ...]:
                    ages[peer.id] = max_age_seconds
                    return await job_records(job)

                peer.context.directory.job_records = read  # type: ignore[method-assign]

            job = await made.launch(made.manifest(ours, memory_bytes=(900,)))
            for peer in (ours, standby, idle):
                watched(peer)
            await ours.hosting.beat(nudged=False)
            assert ages[ours.id] == GLANCE_SECONDS
            await until(lambda: (job, 0) in ours.service.running)
            await ours.hosting.beat(nudged=False)
            ours.context.leases.update(job, 0, ready=True)
            await ours.context.leases.beat()
            await standby.look()
            assert standby.hosting._pool.jobs == {job}
            await standby.hosting.beat(nudged=False)
            assert ages[ours.id] == ages[standby.id] == 0.0
            await idle.hosting.beat(nudged=True)
            assert ages[idle.id] == 0.0

    asyncio.run(main())


def test_a_hole_is_filled_after_the_head_start_by_whoever_sees_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            absent = Identity.generate()
            idle = await made.join()
            job = await made.launch(made.manifest(None, proposed=(absent.peer_id,)))
            await idle.look()
            made.clock.advance(HEAD_START_SECONDS - 0.1)
            await idle.look()
            assert idle.service.begun == []
            made.clock.advance(0.2)
            await idle.look()
            await until(lambda: (job, 0) in idle.service.running)
            owner = await made.owner(job, 0)
            assert owner is not None and owner.score == FITNESS

    asyncio.run(main())


def test_the_head_start_counts_from_when_the_owner_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours, idle = await made.join(), await made.join()
            job = await made.launch(made.manifest(ours))
            await idle.look()
            await ours.look()
            made.clock.advance(HEAD_START_SECONDS + 1)
            await ours.context.leases.beat()
            await idle.look()  # owned: no hole, however long ago it was one
            await ours.leave()
            await made.announce(job)
            await idle.look()
            assert idle.service.begun == []
            made.clock.advance(HEAD_START_SECONDS)
            await idle.look()
            await until(lambda: (job, 0) in idle.service.running)
            assert idle.service.terms[job, 0] == 2

    asyncio.run(main())


def test_memory_and_a_number_of_stages_are_respected_and_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join(memory_bytes=1000, max_stages=2)
            big = await made.launch(made.manifest(ours, memory_bytes=(1001,), name="big"))
            half = made.manifest(ours, ours, ours, memory_bytes=(400, 400, 400), name="half")
            job = await made.launch(half)
            small = await made.launch(made.manifest(ours, memory_bytes=(10,), name="small"))
            await ours.look()
            await until(lambda: len(ours.service.running) == 2)
            await ours.look()
            held = set(ours.hosting.hosted)
            assert len(held) == 2 and (big, 0) not in held
            claimed = {(job, 0): 400, (job, 1): 400, (job, 2): 400, (small, 0): 10}
            assert ours.context.memory.free_bytes == 1000 - sum(claimed[place] for place in held)
            while running := list(ours.service.running):
                ours.service.end(*running[0])
                await over(ours, running[0])
                await ours.look()
                await asyncio.sleep(0)
            assert ours.context.memory.free_bytes == 1000
            assert (small, 0) in ours.service.begun and (big, 0) not in ours.service.begun
            job = await made.launch(replace(half, name="again"))
            other = await made.join(memory_bytes=1000)
            await ours.look()
            await until(lambda: len(ours.service.running) == 2)
            job = await made.launch(replace(half, name="more", proposed=(other.id,) * 3))
            await other.look()
            await until(lambda: len(other.service.running) == 2)  # a third one does not fit the memory
            assert {place[0] for place in other.hosting.hosted} == {job}
            assert other.context.memory.free_bytes == 200

    asyncio.run(main())


def test_claims_on_their_way_do_not_take_the_same_memory_twice(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join(memory_bytes=1000)
            job = await made.launch(made.manifest(None, None, memory_bytes=(600, 600)))
            await ours.look()
            found = await asyncio.gather(*(ours.hosting.take_over(job, stage, 0, None) for stage in (0, 1)))
            assert sum(claim is not None for claim in found) == 1
            assert sum(ours.context.memory.by_place.values()) == 600
            (place,) = ours.hosting.hosted
            await until(lambda: place in ours.service.running)
            ours.service.end(*place)
            await over(ours, place)
            assert ours.context.memory.free_bytes == 1000

    asyncio.run(main())


def test_one_peer_runs_several_stages_and_several_jobs(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            one, two = await made.join(), await made.join()
            first = await made.launch(made.manifest(one, two, one))
            second = await made.launch(made.manifest(two, one, name="second"))
            await asyncio.gather(one.look(), two.look())
            wanted = {(first, 0), (first, 2), (second, 1)}, {(first, 1), (second, 0)}
            await until(lambda: (set(one.service.running), set(two.service.running)) == wanted)
            [status] = {(await made.record(job)).lead for job in (first,)}
            assert status == one.id and (await made.record(second)).lead == two.id

    asyncio.run(main())


def test_of_too_many_stages_the_proposed_ones_are_looked_at_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join(places=2 * job_view.AUTHORS)
            job = await made.launch(made.manifest(*[None] * 40, ours, ours, *[None] * 40))
            await ours.look()
            await until(lambda: set(ours.service.running) == {(job, 40), (job, 41)})

    asyncio.run(main())


# --- who has the state of a stage


def stocked(peer: Peer, steps: dict[int, int]) -> None:
    """The peer has the state of these stages on its disk."""
    peer.hosting._pool.step_here = lambda place: steps.get(place[1], -1)  # type: ignore[method-assign]


def test_after_a_cold_start_whoever_has_the_state_goes_first_with_one_stage_each(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            gone = Identity.generate().peer_id
            one, two, bare = await made.join(), await made.join(), await made.join()
            stocked(one, {0: 30, 1: 30})
            stocked(two, {0: 30, 1: 30, 2: 20})
            resumed = {"snapshot": SNAPSHOT, "snapshot_step": 30, "term": 4}
            job = await made.launch(made.manifest(None, None, None, proposed=(gone,) * 3), **resumed)
            await bare.look()
            for _ in range(3):
                await one.look()
                await two.look()
            assert bare.service.begun == [] and len(one.service.begun) == len(two.service.begun) == 1
            assert {*one.service.begun, *two.service.begun} == {(job, 0), (job, 1)}
            owner = await made.owner(job, 0)
            assert owner is not None and owner.score == (1 + FITNESS) / 2 and owner.term == 5
            made.clock.advance(HEAD_START_SECONDS)
            for peer in (one, two):
                await peer.context.leases.beat()
            await made.announce(job, **resumed)
            await bare.look()
            await until(lambda: bare.service.begun == [(job, 2)])  # nobody has its newest state

    asyncio.run(main())


def test_beside_a_stage_that_was_proposed_to_us_nothing_is_taken_early(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            stocked(ours, {0: 30, 1: 30})
            manifest = made.manifest(ours, None, proposed=(ours.id, Identity.generate().peer_id))
            job = await made.launch(manifest, snapshot=SNAPSHOT, snapshot_step=30)
            for _ in range(3):
                await ours.look()
            assert ours.service.begun == [(job, 0)]

    asyncio.run(main())


def test_where_somebody_stands_by_whoever_has_the_state_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours, standby = await made.join(), Identity.generate()
            stocked(ours, {0: 30})
            job = await made.launch(made.manifest(None), snapshot=SNAPSHOT, snapshot_step=30)
            claim = ClaimRecord(
                job=job, stage=0, peer=standby.peer_id, role="standby", term=0, score=0.1, step=30, load=0.0
            )
            await MemoryDirectory(made.network, standby, made.clock).publish(claim)
            await ours.look()
            assert ours.service.begun == []

    asyncio.run(main())


# --- how a stage ends


def test_a_stage_that_fails_cools_down_longer_each_time_and_takes_no_other_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours, ours))
            await ours.look()
            await until(lambda: len(ours.service.running) == 2)
            # Whatever a service raises, also what it should not have: the graph is a stranger's.
            for error, seconds in ((MemoryError("no room"), 5), (KeyError("x\ny"), 10), (JobError("no"), 20)):
                ours.service.end(job, 1, error)
                await over(ours, (job, 1))
                assert await made.owner(job, 1) is None
                made.clock.advance(seconds - 0.1)
                await made.announce(job)
                await ours.look()
                assert (job, 1) not in ours.service.running
                # A stranger may ask: what is not ours may name files of this machine.
                reason = str(error) if not isinstance(error, KeyError) else "KeyError"
                assert [each.reason for each in ours.hosting.failures()] == [reason]
                made.clock.advance(0.2)
                await ours.look()
                await until(lambda: (job, 1) in ours.service.running)
                assert ours.hosting.failures() == ()
            assert ours.service.begun.count((job, 0)) == 1 and (job, 0) in ours.service.running
            lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
            assert len(lines) == 3 and not any("\n" in line for line in lines)
            assert lines[0] == "stage 1 of work: MemoryError: no room"

    asyncio.run(main())


def test_a_job_for_newer_software_is_left_to_newer_peers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with swarm(tmp_path, pooled=True) as made:
            ours = await made.join()
            manifest = made.manifest(ours, opset=OPSET_VERSION + 1)
            job = await made.launch(manifest, state="running")
            for _ in range(3):
                made.clock.advance(100.0)
                await made.announce(job, state="running")
                await ours.look()
            assert await made.owner(job, 0) is None and not ours.service.begun
            assert (await made.record(job)).state == "running"
            lines = [r.getMessage() for r in caplog.records if "op-set" in r.getMessage()]
            needs = f"job work needs op-set {OPSET_VERSION + 1}: this peer knows {OPSET_VERSION}"
            assert lines == [f"{needs} and leaves it to newer ones"]
            monkeypatch.setattr(job_view, "OPSET_VERSION", OPSET_VERSION + 1)
            newer = await made.join()
            newer.blobs.store.put(manifests.encode(manifest))
            await newer.look()
            made.clock.advance(100.0)
            await made.announce(job, state="running")
            await newer.look()
            await until(lambda: (job, 0) in newer.service.running)

    asyncio.run(main())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_graph_that_one_peer_does_not_understand_ends_no_job(tmp_path: Path, stage: int) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours, ours))
            await ours.look()
            await until(lambda: len(ours.service.running) == 2)
            ours.service.end(job, stage, Unsupported("the graph of work: unknown op 'aten.new'"))
            await over(ours, (job, stage))
            assert await made.owner(job, stage) is None, "others may have it"
            assert (await made.record(job)).state in ("launching", "running")

    asyncio.run(main())


def test_a_stage_that_needs_more_than_its_manifest_says_is_left_to_others_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours, ours))
            await ours.look()
            await until(lambda: len(ours.service.running) == 2)
            ours.service.end(job, 1, Understated("stage 1 needs\n9 GiB"))
            await over(ours, (job, 1))
            assert await made.owner(job, 1) is None
            for _ in range(3):
                made.clock.advance(100_000)
                await made.announce(job)
                await ours.look()
            assert ours.service.begun.count((job, 1)) == 1 and (job, 0) in ours.service.running
            (failed,) = ours.hosting.failures()
            assert (failed.job, failed.stage, failed.reason) == (job, 1, "stage 1 needs 9 GiB")
            record = await made.record(job)
            assert record.state == "running", "no other peer has to think the same"
            lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
            assert [line for line in lines if "needs" in line] == ["refused: stage 1 needs 9 GiB"]

    asyncio.run(main())


def test_a_stage_that_ran_well_before_it_failed_starts_with_the_shortest_cool_down(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours))
            for _ in range(4):
                await ours.look()
                await until(lambda: (job, 0) in ours.service.running)
                made.clock.advance(61)
                ours.service.end(job, 0, RuntimeError("bad luck"))
                await over(ours, (job, 0))
                made.clock.advance(5)
                await made.announce(job)

    asyncio.run(main())


def test_a_stage_that_was_overtaken_is_claimed_anew_at_once_but_only_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours))
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)
            ours.context.leases.observe(job, 0, 7)  # as the neighbour reported it
            ours.service.end(job, 0, StaleTerm("stage 0 was held under term 7"))
            await until(lambda: ours.service.terms[job, 0] == 8)
            ours.service.end(job, 0, StaleTerm("stage 0 was held under term 9"))
            await over(ours, (job, 0))
            await ours.look()
            assert len(ours.service.begun) == 2
            made.clock.advance(5)
            await made.announce(job)
            await ours.look()
            await until(lambda: len(ours.service.begun) == 3)

    asyncio.run(main())


def test_a_job_that_ends_while_we_look_is_not_claimed(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            leases = ours.context.leases
            claims, claim = leases.claims, leases.claim

            async def ended_meanwhile(job: JobId, stage: int) -> tuple[ClaimRecord, ...]:
                ours.hosting._stopped(job)
                return await claims(job, stage)

            async def ended_late(job: JobId, stage: int, score: float) -> ClaimRecord | None:
                won = await claim(job, stage, score)
                ours.hosting._stopped(job)
                return won

            leases.claims = ended_meanwhile  # type: ignore[method-assign]
            job = await made.launch(made.manifest(ours))
            await ours.look()
            assert leases.owned() == ()
            leases.claims, leases.claim = claims, ended_late  # type: ignore[method-assign, assignment]
            ours.hosting.board._tombstones.clear()
            await ours.look()
            assert leases.owned() == () and ours.service.begun == [] and await made.owner(job, 0) is None

    asyncio.run(main())


def test_a_job_that_failed_says_so_in_one_line_and_is_not_claimed_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours, idle = await made.join(), await made.join()
            job = await made.launch(made.manifest(ours))
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)
            ours.service.end(job, 0, JobFailed("the loss is\nnot a number\x07"))
            await over(ours, (job, 0))
            await ours.hosting.beat()
            record = await made.record(job)
            assert (record.state, record.message) == ("failed", "the loss is not a number")
            made.clock.advance(HEAD_START_SECONDS + 1)
            await made.announce(job)  # the launcher does not know of it
            await ours.hosting.beat()
            for peer in (ours, idle):
                await peer.look()
            assert idle.service.begun == [] and len(ours.service.begun) == 1
            assert (await made.record(job)).state == "failed"

    asyncio.run(main())


def test_a_job_that_is_done_is_remembered_and_not_claimed_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours))
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)
            ours.service.figures[job] = Progress(
                job=job, state="done", step=7, steps=7, snapshot=SNAPSHOT, snapshot_step=7
            )
            ours.service.end(job, 0)
            await over(ours, (job, 0))
            made.clock.advance(300)
            await made.announce(job)  # every other record has run out
            await ours.look()
            record = await made.record(job)
            assert (record.state, record.step, record.snapshot, record.lead) == ("done", 7, SNAPSHOT, ours.id)
            assert len(ours.service.begun) == 1

    asyncio.run(main())


def test_an_end_that_another_peer_tells_of_ends_our_stages(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            lead, ours = await made.join(), await made.join()
            job = await made.launch(made.manifest(lead, ours))
            await asyncio.gather(lead.look(), ours.look())
            await until(lambda: bool(lead.service.running and ours.service.running))
            lead.service.figures[job] = Progress(job=job, state="done")
            await lead.look()
            await ours.look()
            await over(ours, (job, 1))
            # Our own stages end by themselves: they may have messages left to send
            assert lead.service.running
            await ours.look()
            assert len(ours.service.begun) == 1

    asyncio.run(main())


def test_a_stage_that_another_peer_won_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours))
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)
            rival = Identity.generate()
            claim = ClaimRecord(
                job=job, stage=0, peer=rival.peer_id, role="owner", term=9, score=0.1, step=0, load=0.0
            )
            directory = MemoryDirectory(made.network, rival, made.clock)
            await directory.publish(claim)
            await ours.context.leases.beat()
            assert ours.hosting.hosted == ((job, 0),), "it has no right to the stage"
            made.clock.advance(91.0)  # we were away for long
            await directory.publish(claim)
            await ours.context.leases.beat()
            await over(ours, (job, 0))
            await ours.look()
            assert len(ours.service.begun) == 1 and ours.context.memory.free_bytes == 1000
            reply = await call(made.client(), ours.id, JOB.name, "watch", {"job": job})
            assert reply.kind == "redirect"  # it does not speak for the job any more

    asyncio.run(main())


def test_a_claim_that_is_lost_before_its_host_began_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            claim = ours.context.leases.claim

            async def claim_and_lose(job: JobId, stage: int, score: float) -> ClaimRecord | None:
                won = await claim(job, stage, score)
                assert won is not None
                asyncio.get_running_loop().call_soon(ours.context.leases.on_lost, won)
                return won

            ours.context.leases.claim = claim_and_lose  # type: ignore[method-assign]
            job = await made.launch(made.manifest(ours))
            for _ in range(20):
                await ours.look()
                await asyncio.sleep(0.001)
            assert ours.service.begun == []
            ours.context.leases.claim = claim  # type: ignore[method-assign]
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)

    asyncio.run(main())


def test_leaving_releases_every_claim(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            jobs = [await made.launch(made.manifest(ours, ours, name=name)) for name in ("one", "two")]
            await ours.look()
            await until(lambda: len(ours.service.running) == 4)
            await ours.leave()
            assert ours.service.running == {} and ours.context.leases.owned() == ()
            for job in jobs:
                for stage in range(2):
                    [claim] = await ours.context.directory.claims(job, stage)
                    assert claim.role == "released"

    asyncio.run(main())


# --- manifests that do not come, or are none


def test_a_manifest_that_nobody_has_is_asked_for_now_and_then(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            missing = JobId("0" * 64)
            requests = []
            for second in range(40):
                await made.announce(missing)
                await ours.look()
                requests.append(len(ours.blobs.requested))
                made.clock.advance(1.0)
                assert second < 5 or requests[-1] <= 4
            # After 0, 5, 15 and 35 seconds
            assert requests[0] == 1 and requests[4] == 1 and requests[-1] == 4

    asyncio.run(main())


def test_manifests_that_never_come_keep_nobody_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            silent = Identity.generate()  # says it has them, and never sends a byte

            async def say_nothing(stream: Stream) -> None:
                await asyncio.Event().wait()

            mute = MemoryTransport(made.network, silent.peer_id)
            await mute.serve("/fusion/blob/1", say_nothing)
            for number in range(20):
                await made.announce(JobId(f"{number:064x}"), silent)
            await ours.hosting.beat()
            job = await made.launch(made.manifest(ours))
            await ours.hosting.beat()
            await until(lambda: (job, 0) in ours.service.running)
            assert (
                len(ours.blobs.requested) == FETCHES_PER_AUTHOR + 1
            )  # so many at a time of one author's, and the good one

    asyncio.run(main())


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\xc1" * 2000, b"\x85" + b"\xa7version\x01" * 5])
def test_garbage_is_refused_once_and_for_all(
    tmp_path: Path, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            holder, ours = await made.join(), await made.join()
            bad = JobId(await holder.blobs.put(garbage))
            await made.announce(bad, lead=holder.context.peer_id)
            job = await made.launch(made.manifest(ours))
            for _ in range(3):
                await ours.look()
                made.clock.advance(100)
                await made.announce(bad, lead=holder.context.peer_id)
                await made.announce(job)
            assert set(ours.service.running) == {(job, 0)}
            assert ours.blobs.requested.count(Digest(bad)) == 1 and not ours.blobs.has(Digest(bad))
            lines = [r.getMessage() for r in caplog.records if bad[:12] in r.getMessage()]
            assert len(lines) == 1 and "is refused" in lines[0] and "\n" not in lines[0]

    asyncio.run(main())


def test_a_job_that_is_called_as_a_blob_of_something_else_does_not_take_it_along(tmp_path: Path) -> None:
    """Any stranger may publish a record: of the graph of another's job, say, or of the index of its newest snapshot."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            other = ours.blobs.store.put(b"a graph")
            await made.announce(JobId(other))
            await ours.look()
            assert ours.blobs.requested == [other] and ours.blobs.has(other)

    asyncio.run(main())


def test_a_manifest_larger_than_any_is_not_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            holder, ours = await made.join(), await made.join()
            data = b"\0" * (manifests.MAX_MANIFEST_BYTES + 1)
            job = JobId(holder.blobs.store.put(data))
            await made.announce(job, author=made.trainer.peer_id)
            await ours.look()
            assert not ours.blobs.has(Digest(job)) and ours.service.begun == []

    asyncio.run(main())


# --- trouble around it


def test_a_directory_that_fails_costs_a_heartbeat(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            job = await made.launch(made.manifest(ours))
            jobs = ours.context.directory.job_records

            async def broken(*, max_age_seconds: float = 0.0) -> tuple[JobRecord, ...]:
                raise BlobError("no way")

            ours.context.directory.job_records = broken  # type: ignore[method-assign]
            await ours.look()
            ours.context.directory.job_records = jobs  # type: ignore[method-assign]
            await ours.look()
            await until(lambda: (job, 0) in ours.service.running)

    asyncio.run(main())


def test_a_claim_that_cannot_be_made_keeps_nobody_from_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            ours = await made.join()
            claim = ours.context.leases.claim

            async def refuse_first(job: JobId, stage: int, score: float) -> ClaimRecord | None:
                if stage == 0:
                    raise BlobError("no way")
                return await claim(job, stage, score)

            ours.context.leases.claim = refuse_first  # type: ignore[method-assign]
            job = await made.launch(made.manifest(ours, ours))
            await ours.look()
            await until(lambda: set(ours.service.running) == {(job, 1)})

    asyncio.run(main())


def test_a_wrong_configuration_is_named() -> None:
    with pytest.raises(ValueError, match="max_stages"):
        HostingConfig(max_stages=0)


def test_an_owner_whose_lease_ran_out_keeps_its_stage_by_its_word_alone_only_for_a_while(
    tmp_path: Path,
) -> None:
    """The directory may have lost its claim, but it renews that at every heartbeat, if it is honest."""

    async def main() -> None:
        async with swarm(tmp_path) as made:
            owner, successor = await made.join(), await made.join()
            job = await made.launch(made.manifest(owner))
            await owner.look()
            await until(lambda: (job, 0) in owner.service.running)
            await owner.context.leases.beat()
            await successor.look()
            begun = made.clock()
            while not successor.service.begun and made.clock() < begun + 10 * NO_CLAIM_SECONDS:
                made.clock.advance(2.0)  # it claims the stage no more, and says that it has it
                await made.announce(job)
                await successor.look()
                assert owner.hosting.holds(job, 0)
                await asyncio.sleep(0.01)
            assert successor.service.begun == [(job, 0)]
            assert made.clock() >= begun + NO_CLAIM_SECONDS

    asyncio.run(main())


# --- a job for some


def test_a_revoked_owner_that_goes_on_does_not_keep_its_stage_vacant(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(tmp_path) as made:
            owner, successor = await made.join(), await made.join()
            admission = Admission(kind="granted", roots=(successor.id,))
            job = await made.launch(made.manifest(owner, admission=admission))
            grant = Grant(
                job=job, issuer=made.trainer.peer_id, subject=owner.id, roles=ROLES, valid_from=0,
                valid_until=int(made.clock()) + 1000,
            )  # fmt: skip
            wallet = owner.context.leases.access.wallet = Wallet(owner.id, tmp_path / "w", (), made.clock)
            wallet.add((seal_grant(grant, made.trainer),))
            await owner.look()
            await until(lambda: (job, 0) in owner.service.running)
            await owner.context.leases.beat()
            await successor.look()
            assert successor.service.begun == []
            gone = seal_revocation(job, [mark(owner.id)], made.clock(), made.trainer)
            assert successor.context.leases.access.revoke(job, gone)
            for _ in range(10):  # it does not hear of it, or does not care
                made.clock.advance(2.0)
                await owner.context.leases.beat()
                await made.announce(job)
                await successor.look()
            assert (job, 0) in successor.service.running and (job, 0) in owner.service.running

    asyncio.run(main())
