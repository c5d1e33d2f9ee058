from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusion.runtime.hosting.standby_needs import LOADING_SECONDS
from fusion.runtime.hosting.standby_pool import DISK_SHARE, Pool
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest, ServeConfig
from fusion.runtime.job.progress import Progress
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.snapshots import snapshot
from fusion.swarm.blobs.blobs import Blobs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.leases import LeaseConfig, Leases
from fusion.swarm.clock import Clock
from fusion.swarm.directory.records import ClaimRecord, Digest, JobId, JobRecord, PeerRecord, Place
from fusion.swarm.identity import Identity
from fusion.swarm.memory.clock import ManualClock
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId

JOB = JobId("a" * 64)
STAGES = 4


def manifest(**changes: object) -> Manifest:
    made = Manifest(
        name="work", kind="serve", graph=Digest("1" * 64), cuts=tuple(range(1, STAGES)),
        weights=(Digest("2" * 64),) * STAGES, proposed=(PeerId(""),) * STAGES, memory_bytes=(600,) * STAGES,
        serve=ServeConfig(cache="kv", max_sequence=16, vocabulary=32), author=Identity.generate().peer_id,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def record(author: PeerId, **changes: object) -> JobRecord:
    made = JobRecord(
        job=JOB, name="work", kind="serve", state="running", term=1, step=0, lead=None, stages=STAGES, snapshot=None,
        snapshot_step=0, author=author,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


class Stock:
    """A service that prepares what the test says it can."""

    def __init__(self) -> None:
        self.prepared: list[tuple[int, int]] = []  # stage, step of the record
        self.forgotten: list[int] = []
        self.under_way = 0
        self.most_under_way = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.under_way -= 1
        self.prepared.append((stage, record.snapshot_step))
        return record.snapshot_step

    def forget(self, job: JobId, stage: int) -> None:
        self.forgotten.append(stage)

    async def host(self, *_: object, **__: object) -> None:
        raise AssertionError("the pool hosts nothing")

    async def pass_on(self, job: JobId, stage: int) -> dict[str, object]:
        raise AssertionError("the pool hosts nothing")

    def progress(self, job: JobId) -> Progress | None:
        return None


@dataclass
class Peer:
    context: Context
    stock: Stock
    pool: Pool
    swarm: Swarm
    hosted: set[Place] = field(default_factory=set)
    free_memory_bytes: int = 1000

    @property
    def id(self) -> PeerId:
        return self.context.peer_id

    async def beat(self, job: JobRecord | None = None, made: Manifest | None = None, **more: object) -> None:
        """A heartbeat of the hosting, as far as the pool sees it. `job` is the job's record."""
        await self.context.leases.beat()
        claims = {(JOB, s): await self.context.leases.claims(JOB, s) for s in range(STAGES)}
        jobs = {JOB: (job or record(self.id), made or manifest())} if not more.get("ended") else {}
        await self.pool.beat(jobs, claims if jobs else {}, self.hosted, self.free_memory_bytes)

    async def claims(self) -> dict[int, ClaimRecord]:
        """Our standby claims, as everybody sees them."""
        found: dict[int, ClaimRecord] = {}
        await self.context.leases.beat()
        for stage in range(STAGES):
            for claim in await self.swarm.observer.claims(JOB, stage):
                if claim.peer == self.id and claim.role == "standby":
                    found[stage] = claim
        return found


@dataclass
class Swarm:
    root: Path
    tasks: asyncio.TaskGroup
    clock: ManualClock = field(default_factory=ManualClock)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    peers: list[Peer] = field(default_factory=list)

    @property
    def observer(self) -> MemoryDirectory:
        return MemoryDirectory(self.network, Identity.generate(), self.clock)

    def join(self, idle: bool = True, quota_bytes: int = 1 << 20) -> Peer:
        identity = Identity.generate()
        transport = MemoryTransport(self.network, identity.peer_id)
        directory = MemoryDirectory(self.network, identity, self.clock)
        blobs = Blobs(BlobStore(self.root / identity.peer_id, quota_bytes), transport, directory)
        leases = Leases(identity.peer_id, directory, LeaseConfig(heartbeat_seconds=30.0, confirm_seconds=0.0))
        context = Context(
            peer_id=identity.peer_id, transport=transport, directory=directory, blobs=blobs, leases=leases, worker=None,
            clock=Clock(self.clock, self.clock),
        )  # fmt: skip
        stock = Stock()
        pool = Pool(
            context, {"serve": stock, "train": stock}, lambda job, work: self.tasks.create_task(work), 0.5
        )  # fmt: skip
        peer = Peer(context, stock, pool, self)
        self.peers.append(peer)
        return peer

    async def announce(self) -> None:
        for peer in self.peers:
            await peer.context.directory.publish(
                PeerRecord(
                    peer=peer.id, name="x", addresses=(), role="peer", device="cpu", flops_per_second=1.0,
                    memory_bytes=1000, free_memory_bytes=peer.free_memory_bytes, software="1", opset=1, started_at=0.0,
                ),
                ttl_seconds=100.0,
            )  # fmt: skip

    async def own(self, *stages: int, ready: bool = True) -> Peer:
        """A peer that owns the stages and takes no part in the pool."""
        owner = self.join()
        self.peers.remove(owner)
        for stage in stages:
            assert await owner.context.leases.claim(JOB, stage, 1.0)
            owner.context.leases.update(JOB, stage, ready=ready)
        await owner.context.leases.beat()
        return owner


@asynccontextmanager
async def a_swarm(root: Path) -> AsyncIterator[Swarm]:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        made = Swarm(root, tasks)
        yield made
        for peer in made.peers:
            await peer.pool.aclose()


def run(root: Path, scenario: Callable[[Swarm], Awaitable[None]]) -> None:
    async def main() -> None:
        async with a_swarm(root) as made:
            await scenario(made)

    asyncio.run(main())


async def settled(peer: Peer) -> None:
    """Nothing is being prepared any more."""
    for _ in range(20):
        await asyncio.sleep(0)
    while peer.stock.under_way:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)


def covered(peer: Peer) -> list[int]:
    return [stage for _, stage in peer.pool.places]


def test_an_idle_peer_stands_by_for_every_stage_and_is_ready_when_it_has_what_it_needs(
    tmp_path: Path,
) -> None:
    async def scenario(made: Swarm) -> None:
        await made.own(0, 1, 2, 3)
        ours = made.join()
        ours.stock.gate.clear()
        await ours.beat()
        assert covered(ours) == [0, 1, 2, 3] and ours.pool.jobs == {JOB}
        assert {stage: claim.ready for stage, claim in (await ours.claims()).items()} == dict.fromkeys(
            range(4), False
        )
        ours.stock.gate.set()
        await settled(ours)
        claims = await ours.claims()
        assert all(claim.ready and claim.score == 0.5 and claim.step == 0 for claim in claims.values())
        assert sorted(ours.stock.prepared) == [(0, 0), (1, 0), (2, 0), (3, 0)]
        assert ours.stock.most_under_way == 2  # a home link is not to be shared by four at once
        await ours.beat()
        await settled(ours)
        assert len(ours.stock.prepared) == 4  # once is enough

    run(tmp_path, scenario)


def test_four_peers_share_the_stages(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        await made.own(0, 1, 2, 3)
        peers = [made.join() for _ in range(4)]
        await made.announce()
        for peer in peers:
            await peer.beat()
        for _ in range(3):
            for peer in peers:
                await peer.beat()
        assert all(sum(stage in covered(peer) for peer in peers) in (2, 3) for stage in range(STAGES))
        assert max(len(covered(peer)) for peer in peers) <= 3

    run(tmp_path, scenario)


def test_standbys_follow_the_snapshots(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        owner = await made.own(0)
        ours = made.join()
        await ours.beat()
        await settled(ours)
        first = record(owner.id, snapshot=Digest("5" * 64), snapshot_step=10)
        await ours.beat(first)
        await settled(ours)
        assert ours.stock.prepared == [(0, 0), (0, 10)]
        assert (await ours.claims())[0].step == 10 and ours.pool.step_here((JOB, 0)) == 10
        ours.stock.gate.clear()
        for step in (20, 30, 40):  # while one is on its way, newer ones come
            ours.pool.follow(replace(first, snapshot=Digest(f"{step:064x}"), snapshot_step=step))
            await asyncio.sleep(0)
        ours.stock.gate.set()
        await settled(ours)
        assert ours.stock.prepared == [(0, 0), (0, 10), (0, 20), (0, 40)]
        await ours.beat(first)  # the directory is late
        await settled(ours)
        assert ours.stock.prepared[-1] == (0, 40) and (await ours.claims())[0].step == 40

    run(tmp_path, scenario)


def test_what_fails_is_tried_again_later_and_only_then(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        await made.own(0)
        ours = made.join()
        ours.stock.error = JobError("the weights are not to be had")
        await ours.beat()
        await settled(ours)
        ours.stock.error = None
        await ours.beat()
        await settled(ours)
        assert ours.stock.prepared == [] and not (await ours.claims())[0].ready
        assert ours.pool.step_here((JOB, 0)) == -1
        made.clock.advance(6.0)
        await ours.beat()
        await settled(ours)
        assert ours.stock.prepared == [(0, 0)] and (await ours.claims())[0].ready

    run(tmp_path, scenario)


@pytest.mark.parametrize("promoted", [True, False])
def test_a_stage_that_hosting_took_keeps_what_is_warm(tmp_path: Path, promoted: bool) -> None:
    async def scenario(made: Swarm) -> None:
        owner = await made.own(0, 1)
        ours = made.join()
        await ours.beat()
        await settled(ours)
        await owner.context.leases.release(JOB, 1)
        assert await ours.context.leases.claim(JOB, 1, 0.5)
        if promoted:
            ours.pool.promoted((JOB, 1))
        ours.hosted.add((JOB, 1))
        ours.free_memory_bytes = 400
        await ours.beat()
        assert covered(ours) == []  # the other one does not fit beside it
        assert ours.stock.forgotten == [0]
        assert ours.context.leases.holds(JOB, 1) is not None
        assert await ours.claims() == {}

    run(tmp_path, scenario)


def test_a_stage_that_is_being_claimed_keeps_what_is_warm(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        owner = await made.own(0, 1)
        ours = made.join()
        await ours.beat()
        await settled(ours)
        ours.pool.claims = lambda place: place == (JOB, 1)
        ours.free_memory_bytes = 400  # the rest is set aside for the stage by now
        await ours.beat()
        assert covered(ours) == [1] and ours.stock.forgotten == [0]
        await owner.context.leases.release(JOB, 1)
        assert await ours.context.leases.claim(JOB, 1, 0.5)
        await ours.beat()  # it is ours, and has not begun
        assert ours.stock.forgotten == [0]
        ours.pool.promoted((JOB, 1))
        ours.pool.claims = lambda place: False
        ours.hosted.add((JOB, 1))
        await ours.beat()
        assert covered(ours) == [] and ours.stock.forgotten == [0]
        assert ours.context.leases.holds(JOB, 1) is not None

    run(tmp_path, scenario)


@pytest.mark.parametrize("leaving", [True, False])
def test_what_happens_while_the_directory_is_read_is_not_undone(tmp_path: Path, leaving: bool) -> None:
    async def scenario(made: Swarm) -> None:
        owner = await made.own(0)
        ours = made.join()
        await ours.beat()
        await settled(ours)
        made.clock.advance(30.0)
        await owner.context.leases.beat()
        await made.own(1)  # so that the peers are read
        peers = ours.context.directory.peers

        async def meanwhile() -> tuple[PeerRecord, ...]:
            if leaving:
                await ours.pool.aclose()
            else:
                await owner.context.leases.release(JOB, 0)
                assert await ours.context.leases.claim(JOB, 0, 0.5)
                ours.pool.promoted((JOB, 0))
            return await peers()

        ours.context.directory.peers = meanwhile  # type: ignore[method-assign]
        await ours.beat()
        await settled(ours)
        assert covered(ours) == ([] if leaving else [1])
        assert ours.stock.prepared == ([(0, 0)] if leaving else [(0, 0), (1, 0)])
        assert ours.stock.forgotten == ([0] if leaving else [])

    run(tmp_path, scenario)


def test_a_peer_with_work_stands_by_behind_the_idle_ones(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        await made.own(0, 1, 2)
        busy = made.join()
        busy.hosted.add((JOB, 3))
        busy.free_memory_bytes = 700
        assert await busy.context.leases.claim(JOB, 3, 0.5)
        busy.context.leases.update(JOB, 3, ready=True)
        await made.announce()
        await busy.beat()
        assert covered(busy) == [0, 1, 2]
        idle = [made.join(), made.join()]
        await made.announce()
        for _ in range(2):
            for peer in idle:
                await peer.beat()
                await settled(peer)
        assert all(covered(peer) == [0, 1, 2, 3] for peer in idle)
        await busy.beat()
        assert covered(busy) == []
        assert busy.stock.forgotten

    run(tmp_path, scenario)


def test_a_job_that_ended_is_let_go_and_one_that_the_directory_forgot_for_a_moment_is_not(
    tmp_path: Path,
) -> None:
    async def scenario(made: Swarm) -> None:
        await made.own(0)
        ours, dropped = made.join(), list[int]()
        ours.pool.on_stop = lambda: dropped.append(len(ours.stock.forgotten))
        await ours.beat()
        await settled(ours)
        await ours.beat(ended=True)
        assert covered(ours) == [0] and dropped == []
        made.clock.advance(9.0)
        await ours.beat()
        made.clock.advance(9.0)
        await ours.beat(ended=True)
        assert covered(ours) == [0] and ours.stock.prepared == [(0, 0)]
        made.clock.advance(2.0)
        await ours.beat(ended=True)
        assert covered(ours) == [] and ours.stock.forgotten == [0] and await ours.claims() == {}
        assert dropped == [1]  # whoever collects what it was finds it

    run(tmp_path, scenario)


def test_nobody_stands_by_before_the_owner_is_ready(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        owner = await made.own(0, ready=False)
        ours = made.join()
        await ours.beat()
        assert covered(ours) == []
        owner.context.leases.update(JOB, 0, ready=True)
        await owner.context.leases.beat()
        await ours.beat()
        assert covered(ours) == [0]
        await owner.context.leases.release(JOB, 0)  # nobody owns it now: we are the ones to take it
        await ours.beat()
        assert covered(ours) == [0]

    run(tmp_path, scenario)


def test_an_owner_that_is_never_ready_gets_standbys_all_the_same(tmp_path: Path) -> None:
    """Nothing is taken from an owner that does nothing where nobody is ready to follow it."""

    async def scenario(made: Swarm) -> None:
        owner = await made.own(0, ready=False)
        ours = made.join()
        for _ in range(2):
            await ours.beat()
            assert covered(ours) == []
            made.clock.advance(LOADING_SECONDS / 2)
            await owner.context.leases.beat()
        await ours.beat()
        assert covered(ours) == [0]
        other = await made.own(1, ready=False)  # the time of another begins anew
        await ours.beat()
        assert covered(ours) == [0] and other.id != owner.id

    run(tmp_path, scenario)


def test_whoever_is_needed_stands_by_however_many_others_say_that_they_do(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        await made.own(0)
        for _ in range(3):
            ally = made.join()
            ally.context.leases.standbys.stand_by(JOB, 0, score=1.0, step=9, ready=True)
            await ally.context.leases.beat()
        ours, needed = made.join(), [False]
        takeover: Any = SimpleNamespace(needs_us=lambda job, stage: needed[0] and stage == 0)
        ours.pool._context = replace(ours.context, takeover=takeover)
        for needed[0] in (False, True, False):
            await ours.beat()
            await settled(ours)
            assert covered(ours) == [0] * needed[0]
        needed[0], ours.free_memory_bytes = True, 1
        await ours.beat()
        assert covered(ours) == []

    run(tmp_path, scenario)


def test_a_training_job_needs_room_on_the_disk_for_two_snapshots(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        await made.own(0, 1, 2, 3)
        ours = made.join(quota_bytes=int(600 * 5 / DISK_SHARE))
        await ours.beat(made=manifest(kind="train"))
        assert len(covered(ours)) == 2
        await ours.pool.aclose()
        assert covered(ours) == [] and await ours.claims() == {}

    run(tmp_path, scenario)


def test_after_a_cold_start_a_peer_knows_which_shards_it_has(tmp_path: Path) -> None:
    async def scenario(made: Swarm) -> None:
        ours = made.join()
        shards = [await ours.context.blobs.put(f"shard {stage}".encode()) for stage in range(2)]
        index = snapshot.Index(
            job=JOB, step=7, shards=(*shards, Digest("3" * 64), Digest("4" * 64)), ledger=Ledger(steps=7)
        )
        digest = await ours.context.blobs.put(snapshot.encode_index(index))
        await ours.beat(record(ours.id, snapshot=digest, snapshot_step=7))
        assert [ours.pool.step_here((JOB, stage)) for stage in range(STAGES)] == [7, 7, -1, -1]
        missing = Digest("9" * 64)
        await ours.beat(record(ours.id, snapshot=missing, snapshot_step=9))
        assert ours.pool.step_here((JOB, 0)) == 7
        assert ours.pool.step_here((JobId("b" * 64), 0)) == -1

    run(tmp_path, scenario)
