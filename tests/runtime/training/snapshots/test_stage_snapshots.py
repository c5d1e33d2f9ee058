from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.stages import until

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Graph
from fusion.runtime.job.errors import JobError, StageFailed
from fusion.runtime.job.worker import Worker
from fusion.runtime.training.compute.inbox import StagePlan
from fusion.runtime.training.snapshots import stage_snapshots
from fusion.runtime.training.snapshots.loaded_stage import Loaded
from fusion.runtime.training.snapshots.stage_files import ShardRefused
from fusion.runtime.training.snapshots.stage_snapshots import StageSnapshots
from fusion.runtime.training.step import messages as m
from fusion.runtime.training.step.checkpoint import START, Checkpoint
from fusion.runtime.training.step.history import Version
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import BlobError, QuotaExceeded
from fusion.swarm.transport import PeerId

PLAN = StagePlan(stage=Stage(2, Graph((), (), (), ()), (), (), ()), stages=3, ties=(), sizes={})
D = [Digest(c * 64) for c in "0123456789"]
HELD_UP_SECONDS = 30.0  # for what is not: only a failure takes so long


class Plane:
    def __init__(self) -> None:
        self.value = 1.0

    def state(self) -> dict[str, torch.Tensor]:
        return {"variable/w": torch.tensor(self.value)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.value = float(state["variable/w"])


class Codecs:
    def __init__(self) -> None:
        self.left_out = {"edge": torch.tensor(0.5)}

    def state(self) -> dict[str, torch.Tensor]:
        return self.left_out

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.left_out = state


class Files:
    """The blob of step n is D[n]; steps and indexes in `lost` cannot be saved or held."""

    def __init__(self) -> None:
        self.lost: set[int | Digest] = set()
        self.saved: dict[int, dict[str, float]] = {}
        self.tried = asyncio.Event()
        self.slow: asyncio.Event | None = None  # what every save and every copy waits for
        self.copying = 0  # just now
        self.trouble: Exception | None = None  # with loading
        self.kept: list[tuple[int, int | None]] = []  # the steps of the snapshots that stay, each time
        # The newest snapshot, and what stays that is newer and may be one.
        self.not_given_up: list[tuple[int, set[int]]] = []
        self.no_room: Exception = BlobError("no room")
        self.held: set[Digest] = set()  # indexes that have our shard
        self.refused: Exception | None = None  # another stage's shard
        self.unfetched: asyncio.Event | None = None  # what its fetch waits for

    async def save(self, version: Version, state: Mapping[str, torch.Tensor]) -> Digest:
        step = version.step
        self._try(step)
        if self.slow is not None:
            await self.slow.wait()
        self.saved[step] = {name: float(tensor) for name, tensor in state.items()}
        return D[step]

    async def put(self, data: bytes) -> Digest:
        if not self.tried.is_set():
            self._try(D[0])
        return D[0]

    async def replicate(
        self, index: Digest, owners: Mapping[int, PeerId], away: int = 1, *, look: bool = False
    ) -> None:
        self._try(index)
        if self.slow is not None:
            self.copying += 1
            try:
                await self.slow.wait()
            finally:
                self.copying -= 1

    async def load(self, checkpoint: Checkpoint, owners: Mapping[int, PeerId]) -> dict[str, torch.Tensor]:
        if self.trouble is not None:
            raise self.trouble
        return {"variable/w": torch.tensor(7.0), "codec/edge": torch.tensor(0.25)}

    async def forget_before(self, checkpoint: Checkpoint, before: Checkpoint | None = None) -> None:
        self.kept.append((checkpoint.step, None if before is None else before.step))

    async def forget_given_up(self, newest: Checkpoint, kept: set[int]) -> None:
        self.not_given_up.append((newest.step, kept))

    def has_part(self, index: Digest | None, step: int) -> bool:
        return index in self.held

    async def check_shard(self, index: Digest, stage: int, owners: Mapping[int, PeerId]) -> None:
        if self.unfetched is not None:
            await self.unfetched.wait()
        if self.refused is not None:
            raise self.refused

    def _try(self, what: int | Digest) -> None:
        self.tried.set()
        if what in self.lost:
            raise self.no_room


class Stand:
    """A stage's snapshots with nothing real around them but the worker."""

    def __init__(self, compute: Worker, group: asyncio.TaskGroup) -> None:
        self.plane, self.codecs, self.files = Plane(), Codecs(), Files()
        self.told: list[m.Message] = []
        self.now = 0.0
        nothing: Any = None
        plane: Any = self.plane
        files: Any = self.files
        codecs: Any = self.codecs
        loaded = Loaded(plan=PLAN, plane=plane, batches=nothing, files=files, start=START)
        self.snapshots = StageSnapshots(
            loaded,
            codecs,
            compute,
            dict,
            self.told.append,
            lambda work: group.create_task(work),
            lambda: self.now,
        )

    @property
    def heard(self) -> list[tuple[int, Digest]]:
        return [
            (t.step, t.digest if isinstance(t, m.Shard) else t.index)
            for t in self.told
            if isinstance(t, m.Shard) or (isinstance(t, m.Held) and not t.trouble)
        ]

    @property
    def troubles(self) -> list[tuple[int, str]]:
        return [(t.step, t.trouble) for t in self.told if isinstance(t, m.Held) and t.trouble]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_snapshots, "RETRY_SECONDS", 0.0)


def test_what_is_saved_is_the_state_when_it_was_taken() -> None:
    async def main() -> None:
        async with Worker() as compute:
            async with asyncio.TaskGroup() as group:
                stand = Stand(compute, group)
                await stand.snapshots.take(Version(1, "a"))
                stand.plane.value = 2.0
            assert stand.files.saved == {1: {"variable/w": 1.0, "codec/edge": 0.5}}
            assert stand.heard == [(1, D[1])]

    asyncio.run(main())


def test_a_save_that_does_not_succeed_is_tried_again_until_the_next_one_is_taken() -> None:
    async def main() -> None:
        async with Worker() as compute:
            async with asyncio.TaskGroup() as group:
                stand = Stand(compute, group)
                stand.files.lost = {1, 2}
                await stand.snapshots.take(Version(1, "a"))
                await stand.files.tried.wait()
                stand.files.lost = {1}
                await stand.snapshots.take(Version(2, "a"))
            assert stand.heard == [(2, D[2])]

    asyncio.run(main())


def test_a_save_of_one_history_is_given_up_for_that_of_the_same_step_in_another() -> None:
    async def main() -> None:
        async with Worker() as compute:
            async with asyncio.TaskGroup() as group:
                stand = Stand(compute, group)
                stand.files.lost = {1}
                await stand.snapshots.take(Version(1, "a"))
                await stand.files.tried.wait()
                stand.snapshots.announce_restore(START)
                stand.files.lost = set()
                stand.plane.value = 2.0
                await stand.snapshots.take(Version(1, "b"))
            assert stand.files.saved == {1: {"variable/w": 2.0, "codec/edge": 0.5}}
            assert [t.history for t in stand.told if isinstance(t, m.Shard)] == ["b"]

    asyncio.run(main())


def test_a_step_that_is_dropped_behind_a_save_takes_no_later_snapshot_along() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            stand.files.slow = asyncio.Event()
            await stand.snapshots.take(Version(1, "a"))
            await stand.files.tried.wait()
            dropped = group.create_task(stand.snapshots.take(Version(2, "a")))
            while stand.snapshots._requested == Version(1, "a"):  # until it waits for the save of step 1
                await asyncio.sleep(0)
            dropped.cancel()
            await asyncio.wait([dropped])
            stand.files.slow.set()
            await stand.snapshots.take(Version(3, "a"))
            await stand.snapshots._saved()
            assert stand.heard == [(1, D[1]), (3, D[3])]

    asyncio.run(main())


def test_a_full_disk_holds_up_no_step_that_asks_for_the_same_snapshot_again() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            stand.files.lost = {1}
            await stand.snapshots.take(Version(1, "a"))
            await stand.files.tried.wait()
            async with asyncio.timeout(HELD_UP_SECONDS):
                await stand.snapshots.take(Version(1, "a"))
            stand.files.lost = set()

    asyncio.run(main())


def test_an_index_is_stored_once_the_disk_takes_it() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            stand.files.lost = {D[0]}  # the first time
            assert await stand.snapshots.store_index(b"index") == D[0]

    asyncio.run(main())


def test_a_copy_is_tried_again_until_a_newer_one_is_asked_for() -> None:
    async def main() -> None:
        async with Worker() as compute:
            async with asyncio.TaskGroup() as group:
                stand = Stand(compute, group)
                stand.files.lost = {D[8]}
                group.create_task(stand.snapshots.replicate(1, D[8]))
                await stand.files.tried.wait()
                await stand.snapshots.replicate(2, D[9])
            assert stand.heard == [(2, D[9])]

    asyncio.run(main())


def test_a_lead_that_asks_for_copies_without_end_has_one_made_at_a_time() -> None:
    async def main() -> None:
        async with Worker() as compute:
            async with asyncio.TaskGroup() as group:
                stand = Stand(compute, group)
                stand.files.slow, known = asyncio.Event(), len(asyncio.all_tasks())
                for step in range(200):
                    stand.snapshots.hold(step, D[step % 2])
                    stand.snapshots.newest = Checkpoint(step=step, digest=D[2 + step % 2])
                    stand.snapshots.hold_again()
                    await asyncio.sleep(0)
                for _ in range(3):
                    await asyncio.sleep(0)
                assert stand.files.copying <= 2 and len(asyncio.all_tasks()) - known <= 2
                stand.files.slow.set()
            assert stand.heard == [(199, D[1])]

    asyncio.run(main())


def test_a_state_is_stored_behind_the_snapshot_under_way_or_not_at_all() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            await stand.snapshots.take(Version(1, "a"))
            assert await stand.snapshots.store(Version(1, "a")) == D[1]
            assert stand.heard == [(1, D[1])]
            stand.files.lost = {3}
            with pytest.raises(JobError, match="stage 2 could not store its state: no room"):
                await stand.snapshots.store(Version(3, "a"))

    asyncio.run(main())


def test_a_stage_knows_the_snapshot_that_it_has_gone_back_to_and_the_one_before() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            known, told = Checkpoint(step=4, digest=D[4]), Checkpoint(step=9, digest=D[9])
            stand.snapshots.newest = known
            stand.snapshots.announce_restore(told)
            assert stand.snapshots.newest == known  # nobody has seen that one yet
            await stand.snapshots.restore(told)
            assert (stand.snapshots.newest, stand.snapshots.before) == (told, known)
            await stand.snapshots.restore(known)
            assert stand.snapshots.newest == known

    asyncio.run(main())


def test_a_restored_stage_has_its_parameters_and_what_its_codecs_left_out() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            await stand.snapshots.restore(START)
            assert stand.plane.value == 7.0
            assert stand.codecs.left_out == {"edge": torch.tensor(0.25)}

    asyncio.run(main())


def test_what_stays_is_the_newest_snapshot_and_the_one_before_it() -> None:
    async def main() -> None:
        async with Worker() as compute:
            async with asyncio.TaskGroup() as group:
                stand = Stand(compute, group)
                for step in (2, 6, 4):  # the last one is heard of late
                    stand.snapshots.saved(Checkpoint(step=step, digest=D[step]))
            assert stand.files.kept == [(2, 0), (6, 2), (4, None)]

    asyncio.run(main())


def test_a_stage_waits_for_the_first_snapshot_that_has_its_shard_and_is_not_durable() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            snapshots = stand.snapshots
            for step in (1, 2):  # the first one is given up
                stand.now = 10.0 * step
                await snapshots.take(Version(step, "a"))
                await until(lambda step=step: (step, D[step]) in stand.heard)
            assert (snapshots.waits_since, snapshots.waited_seconds, snapshots.attempt_seconds) == (
                10,
                10,
                10,
            )
            stand.now = 30.0
            snapshots.begin()
            stand.now = 35.0
            assert (snapshots.waited_seconds, snapshots.attempt_seconds) == (25, 5)
            snapshots.saved(Checkpoint(step=2, digest=D[7]))  # the lead says so, but it has another shard
            assert snapshots.waited_seconds == 25
            stand.files.held.add(D[8])
            snapshots.saved(Checkpoint(step=2, digest=D[8]))
            assert (snapshots.waits_since, snapshots.waited_seconds) == (None, 0)

    asyncio.run(main())


def test_a_new_request_or_attempt_ends_the_snapshot_whose_shards_may_be_checked() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            for over in (lambda: stand.snapshots.take(Version(2, "a")), lambda: _begin(stand)):
                stand.snapshots.hold(1, D[9])
                await until(lambda: stand.snapshots.indexed == D[9])
                await over()
                assert stand.snapshots.indexed is None

    asyncio.run(main())


async def _begin(stand: Stand) -> None:
    stand.snapshots.begin()


@pytest.mark.parametrize(
    ("trouble", "refused"),
    [
        (None, False),
        (ShardRefused(0, JobError("no state")), True),
        (BlobError("nobody has the index"), True),
        (QuotaExceeded("the disk is full"), False),
    ],
)
def test_a_shard_is_refused_unless_our_own_disk_is_full(trouble: Exception | None, refused: bool) -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            stand.files.refused = trouble
            assert await stand.snapshots.refuses_shard(0, D[1], HELD_UP_SECONDS) == refused

    asyncio.run(main())


def test_a_shard_that_takes_for_ever_to_fetch_does_not_end_the_watch_of_its_owner() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            stand.files.unfetched = asyncio.Event()
            assert not await stand.snapshots.refuses_shard(0, D[1], 0.01)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("trouble", "raises"),
    [
        (BlobError("nobody has it"), JobError),
        (QuotaExceeded("the disk is full"), StageFailed),
        (OSError("the disk is broken"), StageFailed),
    ],
)
def test_a_disk_of_ours_costs_the_job_no_snapshot(trouble: Exception, raises: type[Exception]) -> None:
    """Where nobody has it the job falls back to the snapshot before, and in the end to the initial weights."""

    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            stand.files.trouble = trouble
            with pytest.raises(raises, match=str(trouble)):
                await stand.snapshots.restore(Checkpoint(step=2, digest=D[2]))
            assert stand.plane.value == 1.0 and stand.snapshots.newest == START

    asyncio.run(main())


def test_what_a_lead_has_given_up_makes_room_for_what_it_asks_for_next() -> None:
    """It piled up, needed by a job of which no snapshot became durable, until the disk took no more."""

    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)

            async def save(step: int, *, hold: bool) -> set[int]:
                await stand.snapshots.take(Version(step, "a"))
                await stand.snapshots._saved()
                if hold:
                    await stand.snapshots.replicate(step, D[step])
                newest, kept = stand.files.not_given_up[-1]
                assert newest == stand.snapshots.newest.step
                return kept

            assert await save(1, hold=True) == {1}
            assert await save(2, hold=False) == {2}  # the lead would have said that the one before is durable
            assert await save(3, hold=True) == {3}
            stand.snapshots.begin()  # a link may have broken: what it said of the one before may be lost
            assert await save(4, hold=False) == {3, 4}
            stand.snapshots.begin()
            assert await save(5, hold=True) == {3, 5}  # without our word the one before is none
            stand.snapshots.begin()
            assert await save(6, hold=True) == {3, 5, 6}
            stand.snapshots.begin()
            assert await save(7, hold=True) == {5, 6, 7}
            await stand.snapshots.restore(Checkpoint(step=4, digest=D[4]))
            stand.snapshots.saved(Checkpoint(step=8, digest=D[8]))
            await stand.snapshots.restore(Checkpoint(step=4, digest=D[4]))
            assert await save(5, hold=False) == {5, 6, 8}  # to which another lead may go back after all

    asyncio.run(main())


@pytest.mark.parametrize(
    ("no_room", "rests"),
    [(QuotaExceeded("no room"), [1, 1, 1]), (BlobError("broken"), [2, 4, 8, 16, 32, 60, 60])],
)
def test_a_save_that_writes_nothing_is_tried_each_second_and_one_that_does_ever_more_rarely(
    no_room: Exception, rests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    sleep = asyncio.sleep

    async def rest(seconds: float) -> None:
        found[-1] += 1
        await sleep(0)

    async def save(version: Version, state: Mapping[str, torch.Tensor]) -> Digest:
        if len(found) == len(rests):
            return D[1]
        found.append(0)
        raise no_room

    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            monkeypatch.setattr(stand.files, "save", save)
            monkeypatch.setattr(asyncio, "sleep", rest)
            await stand.snapshots.take(Version(1, "a"))
            await stand.snapshots._saved()
            assert stand.heard == [(1, D[1])]

    asyncio.run(main())
    assert found == rests


def test_the_lead_is_told_once_what_keeps_a_snapshot_from_being_durable() -> None:
    async def main() -> None:
        async with Worker() as compute, asyncio.TaskGroup() as group:
            stand = Stand(compute, group)
            stand.files.lost = {3, D[3]}
            await stand.snapshots.take(Version(3, "a"))
            holding = group.create_task(stand.snapshots.replicate(3, D[3]))
            for _ in range(20):
                await asyncio.sleep(0)
            assert stand.troubles == [
                (3, "could not save the snapshot of step 3: no room"),
                (3, "could not hold the snapshot of step 3: no room"),
            ]
            assert all(t.index == m.NOTHING for t in stand.told if isinstance(t, m.Held))
            stand.files.lost = set()
            await holding
            await stand.snapshots._saved()
            assert sorted(stand.heard) == [(3, D[3]), (3, D[3])] and len(stand.troubles) == 2

    asyncio.run(main())
