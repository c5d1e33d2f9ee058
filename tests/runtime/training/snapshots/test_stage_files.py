from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training import config

from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import Graph, TensorType, Variable
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Precision
from fusion.runtime.job.stage_graphs import SAFETENSORS_HEADER_BYTES
from fusion.runtime.planes.learning_rate import SKIPPED
from fusion.runtime.planes.plane import TrainingStage
from fusion.runtime.planes.torch_plane import TorchTrainingStage
from fusion.runtime.training.compute.loss_scale import FIRST, LossScaled, scale_of
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.snapshots.snapshot import Index, encode_index
from fusion.runtime.training.snapshots.stage_files import COPY_TIMES, ShardRefused, StageFiles
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.history import Version
from fusion.swarm.authority.law import JobLaw
from fusion.swarm.blobs.blobs import Blobs
from fusion.swarm.blobs.eviction import Needs
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.claims.owners_seen import OwnersSeen
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import BlobError, QuotaExceeded
from fusion.swarm.identity import Identity
from fusion.swarm.memory.directory import MemoryDirectory
from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.memory.transport import MemoryTransport
from fusion.swarm.transport import PeerId

JOB = JobId("a" * 64)


@asynccontextmanager
async def one_home(folder: Path, quota_bytes: int = 1 << 20) -> AsyncIterator[tuple[Any, BlobStore, PeerId]]:
    """What the files of a stage work with, its store, and the peer whose they are."""
    identity, network = Identity.generate(), MemoryNetwork()
    store = BlobStore(folder / "blobs", quota_bytes, Needs())
    async with MemoryTransport(network, identity.peer_id) as transport:
        blobs = Blobs(store, transport, MemoryDirectory(network, identity))
        yield SimpleNamespace(blobs=blobs, home=folder, seen=OwnersSeen()), store, identity.peer_id


def test_an_index_that_names_a_blob_of_another_job_deletes_it_for_nobody_who_needs_it(tmp_path: Path) -> None:
    """A lead may be a stranger, and digests are no secret."""

    async def main() -> None:
        identity, network, holder = Identity.generate(), MemoryNetwork(), Needs()
        store = BlobStore(tmp_path / "blobs", 1 << 20, Needs())
        async with MemoryTransport(network, identity.peer_id) as transport:
            blobs = Blobs(store, transport, MemoryDirectory(network, identity))
            theirs = store.put(b"the newest snapshot of somebody's")
            blobs.hold(holder, [theirs])
            context: Any = SimpleNamespace(blobs=blobs, home=tmp_path, seen=OwnersSeen())
            manifest: Any = SimpleNamespace(train=None, stages=2, memory_bytes=(100, 100))
            files = StageFiles(context, JOB, manifest, Stage(1, Graph((), (), (), ()), (), (), ()))
            named = [theirs, store.put(b"2"), store.put(b"3")]
            indices = []
            for step, digest in enumerate(named, 1):
                ledger = Ledger(steps=step, samples=step, head="e" * 64)
                made = Index(job=JOB, step=step, shards=(digest, Digest("b" * 64)), ledger=ledger)
                indices.append(store.put(encode_index(made)))
                await files.replicate(indices[-1], {0: PeerId("one"), 1: identity.peer_id})
            newest = Checkpoint(step=3, digest=indices[-1])
            await files.forget_before(newest)
            assert [store.has(digest) for digest in (*named, *indices)] == [True] * 3 + [False, True, True]
            blobs.hold(holder, [])
            await files.forget_before(newest)
            assert not store.has(theirs) and store.has(named[1])

    asyncio.run(main())


@asynccontextmanager
async def of_last_of_two(
    tmp_path: Path, memory_bytes: int, shards: Any = snapshot, quota_bytes: int = 1 << 20
) -> AsyncIterator[tuple[StageFiles, BlobStore, PeerId]]:
    """The files of the last of two stages that need so much memory each, their store, and the peer that runs it."""
    async with one_home(tmp_path, quota_bytes) as (context, store, peer_id):
        manifest: Any = SimpleNamespace(train=None, stages=2, memory_bytes=(memory_bytes, memory_bytes))
        stage = Stage(1, Graph((), (), (), ()), (), (), ())
        files = StageFiles(context, JOB, manifest, stage, shards)
        yield files, store, peer_id


def test_a_copy_of_a_neighbours_shard_is_no_larger_than_its_stage(tmp_path: Path) -> None:
    """A hostile lead could have the next stage fill its disk."""

    async def main() -> None:
        async with one_home(tmp_path, 4 << 20) as (context, store, peer_id):
            most = 2000 + SAFETENSORS_HEADER_BYTES
            for size, fits in ((most, True), (most + 1, False)):
                manifest: Any = SimpleNamespace(train=None, stages=2, memory_bytes=(1000, 10))
                files = StageFiles(context, JOB, manifest, Stage(1, Graph((), (), (), ()), (), (), ()))
                shards = (store.put(bytes(size)), Digest("b" * 64))
                ledger = Ledger(steps=1, samples=1, head="e" * 64)
                index = store.put(encode_index(Index(job=JOB, step=1, shards=shards, ledger=ledger)))
                owners = {0: PeerId("one"), 1: peer_id}
                if fits:
                    await files.replicate(index, owners)
                    continue
                with pytest.raises(ShardRefused, match=f"stage 0: .* {most + 1} bytes; at most {most}"):
                    await files.replicate(index, owners)

    asyncio.run(main())


def test_a_shard_that_is_mostly_header_is_held_too(tmp_path: Path) -> None:
    """Of a layer with 2 inputs and 1 output, under AdamW: without the last copy the job could not end."""

    async def main() -> None:
        state = {"variable/weight": torch.zeros(1, 2), "variable/bias": torch.zeros(1)}
        for name, value in tuple(state.items()):
            for slot in ("step", "exp_avg", "exp_avg_sq"):
                state[f"optimizer/{name.removeprefix('variable/')}/{slot}"] = torch.zeros_like(value)
        needed = sum(4 * tensor.numel() for tensor in state.values())
        async with of_last_of_two(tmp_path, needed) as (files, store, us):
            shard = await files.save(Version(1), state)
            ledger = Ledger(steps=1, samples=1, head="e" * 64)
            made = Index(job=JOB, step=1, shards=(shard, shard), ledger=ledger)
            index = store.put(encode_index(made))
            assert store.path(shard).stat().st_size > COPY_TIMES * needed
            await files.replicate(index, {0: PeerId("one"), 1: us})

    asyncio.run(main())


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda right: right, None),
        (lambda right: right[:-1], "not safetensors"),
        (lambda right: b"nothing of the kind", "not safetensors"),
        (lambda right: shard_of(2, 1.0), "of state 1"),  # the shard of a former snapshot
        (lambda right: shard_of(3, 2.0), "the graph says"),
    ],
)
def test_a_copy_from_which_nobody_could_go_on_is_not_held(
    made: Callable[[bytes], bytes], why: str | None, tmp_path: Path
) -> None:
    """The owner of a stage may name any blob as its shard: once that counts, the snapshots before it are deleted."""

    async def main() -> None:
        async with one_home(tmp_path) as (context, store, us):
            manifest: Any = SimpleNamespace(train=None, stages=2, memory_bytes=None)
            kept = (Variable("w", TensorType((2,), "float32"), "parameter"),)
            first = Stage(0, Graph((), kept, (), ()), (), (), ())
            last = Stage(1, Graph((), (), (), ()), (), (), ())

            async def of(job: JobId, manifest: Any) -> Any:
                return (first, last), ()

            graphs: Any = SimpleNamespace(of=of)
            files = StageFiles(context, JOB, manifest, last, graphs=graphs)
            named = store.put(made(shard_of(2, 2.0)))
            ledger = Ledger(steps=2, samples=2, head="e" * 64)
            shards = (named, await files.save(Version(2), {}))
            index = store.put(encode_index(Index(job=JOB, step=2, shards=shards, ledger=ledger)))
            owners = {0: PeerId("one"), 1: us}
            if why is None:
                await files.replicate(index, owners)
                return
            with pytest.raises(JobError, match=why):
                await files.replicate(index, owners)

    asyncio.run(main())


def shard_of(numbers: int, step: float) -> bytes:
    """A shard of the state of that step, with a variable of so many."""
    _, pieces = snapshot.bytes_of({"variable/w": torch.full((numbers,), step)}, Version(int(step)))
    return b"".join(map(bytes, pieces))


def test_a_snapshot_in_which_a_lead_names_another_shard_than_ours_is_not_held_and_we_have_no_part_in_it(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with one_home(tmp_path) as (context, store, us):
            manifest: Any = SimpleNamespace(train=None, stages=2, memory_bytes=None)
            files = StageFiles(context, JOB, manifest, Stage(1, Graph((), (), (), ()), (), (), ()))
            other, owners = store.put(b"of the first stage"), {0: PeerId("one"), 1: us}
            ours = await files.save(Version(2), {})

            def index(step: int, shard: Digest) -> Digest:
                ledger = Ledger(steps=step, samples=step, head="e" * 64)
                return store.put(
                    encode_index(Index(job=JOB, step=step, shards=(other, shard), ledger=ledger))
                )

            made_up, of_others, right = index(2, other), index(3, other), index(2, ours)
            with pytest.raises(JobError, match="another shard than ours"):
                await files.replicate(made_up, owners)
            await files.replicate(of_others, owners)  # a state that an owner before us may have saved
            seen, law = context.seen, JobLaw(job=JOB, author=us, stages=2)
            assert not any(seen.takes_part(JOB, 1, digest, 2) for digest in (made_up, of_others, None))
            await files.replicate(right, owners)
            assert seen.takes_part(JOB, 1, right, 2) and not seen.takes_part(JOB, 0, right, 2)
            assert not seen.takes_part(JOB, 1, right, 3)  # the state has gone on since
            assert seen.ownership_view(JOB, replace(law, steps=2), 2, {}, us).snapshots == {right}
            assert not seen.ownership_view(JOB, replace(law, steps=3), 2, {}, us).snapshots

    asyncio.run(main())


def test_what_never_became_a_snapshot_is_not_kept_in_the_place_of_the_one_before(tmp_path: Path) -> None:
    """A save that others did not hold in time, or a snapshot that was given up: nobody goes back there."""

    async def main() -> None:
        async with of_last_of_two(tmp_path, 100) as (files, store, _):
            shards = [
                await files.save(Version(step), {"variable/w": torch.tensor(float(step))})
                for step in (1, 2, 3)
            ]
            before = Checkpoint(step=1, digest=Digest("b" * 64))
            await files.forget_before(Checkpoint(step=3, digest=Digest("c" * 64)), before)
            assert [store.has(digest) for digest in shards] == [True, False, True]

    asyncio.run(main())


def test_what_was_given_up_is_not_needed_any_more(tmp_path: Path) -> None:
    """Saves and copies of snapshots that never became durable filled the disk, needed until one did."""

    async def main() -> None:
        async with of_last_of_two(tmp_path, 100) as (files, store, us):
            shards, owners = [], {0: PeerId("one"), 1: us}
            for step in range(1, 6):
                shards.append(await files.save(Version(step), {"variable/w": torch.tensor(float(step))}))
                ledger = Ledger(steps=step, samples=step, head="e" * 64)
                copy = store.put(bytes([step]))
                index = encode_index(Index(job=JOB, step=step, shards=(copy, shards[-1]), ledger=ledger))
                await files.replicate(store.put(index), owners)
            await files.forget_given_up(Checkpoint(step=2, digest=Digest("b" * 64)), {4})
            assert [store.has(digest) for digest in shards] == [True, True, False, True, False]
            assert len(store.held()) == 3 * 3

    asyncio.run(main())


class MadeShards:
    """Shards of 1024 bytes, of which `make` is called for each half."""

    load_weights, load_state = snapshot.load_weights, snapshot.load_state

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make

    def bytes_of(
        self, tensors: Mapping[str, torch.Tensor], version: Version
    ) -> tuple[int, Iterator[bytes | memoryview]]:
        return 1024, (self._make() for _ in range(2))


def test_a_shard_for_which_there_is_no_room_is_not_written_anywhere(tmp_path: Path) -> None:
    """Whole, each second, to a disk of which it was to leave a gibibyte."""

    def make() -> bytes:
        raise AssertionError("nothing is made before there is room for it")

    async def main() -> None:
        async with of_last_of_two(tmp_path, 100, MadeShards(make), 1023) as (files, store, _):
            with pytest.raises(QuotaExceeded, match="a blob of 1024 bytes does not fit"):
                await files.save(Version(1), {})
            assert store.held() == {} and store.used_bytes == 0

    asyncio.run(main())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_shard_is_written_once_as_its_library_would_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    state = {"variable/w": torch.arange(5.0), "optimizer/w/step": torch.tensor(3)}

    async def main() -> None:
        async with of_last_of_two(tmp_path, 100) as (files, store, _):
            path = store.path(await files.save(Version(4, "e" * 64), state))
            snapshot.save(state, tmp_path / "saved", snapshot.marked(Version(4, "e" * 64)))
            assert path.read_bytes() == (tmp_path / "saved").read_bytes()

    asyncio.run(main())
    assert not (tmp_path / "scratch").exists()


def test_a_disk_that_is_full_half_way_is_told_from_one_that_was_not_written_to(tmp_path: Path) -> None:
    pieces = [bytes(512)]

    def make() -> bytes:
        if pieces:
            return pieces.pop()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with of_last_of_two(tmp_path, 100, MadeShards(make)) as (files, store, _):
            with pytest.raises(BlobError, match="the disk is full"):
                await files.save(Version(1), {})
            assert store.used_bytes == 0

    asyncio.run(main())


def test_a_save_that_is_cancelled_is_written_no_further(tmp_path: Path) -> None:
    making, go_on = threading.Event(), threading.Event()

    def make() -> bytes:
        making.set()
        assert go_on.wait(60)
        return bytes(512)

    async def main() -> BlobStore:
        async with of_last_of_two(tmp_path, 100, MadeShards(make)) as (files, store, _):
            saving = asyncio.create_task(files.save(Version(1), {}))
            await asyncio.to_thread(making.wait, 60)
            saving.cancel()
            await asyncio.wait([saving])
            go_on.set()
            return store

    store = asyncio.run(main())  # which waits for the thread
    assert store.held() == {} and store.used_bytes == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_stage_goes_back_to_its_initial_weights_in_any_precision(
    tmp_path: Path, precision: Precision
) -> None:
    """A job in float16 that lost a peer before its first snapshot went back for ever: the initial weights have no loss scale."""
    weights = {"w": torch.arange(6.0).reshape(2, 3)}
    kinds = tuple(Variable(name, TensorType(tuple(w.shape), "float32")) for name, w in weights.items())
    stage = Stage(1, Graph((), kinds, (), ()), (), (), ())
    train = config(precision=precision)
    plane: TrainingStage = TorchTrainingStage(stage, {"w": torch.zeros(2, 3)}, train.optimizer)
    if precision == "fp16":
        plane = LossScaled(plane)
        plane.apply(0.1, SKIPPED)
        assert scale_of(plane) == FIRST / 2

    async def main() -> None:
        async with one_home(tmp_path) as (context, store, _):
            snapshot.save(weights, tmp_path / "weights")
            initial = store.put(tmp_path / "weights")
            manifest: Any = SimpleNamespace(
                train=train, stages=2, memory_bytes=(100, 100), proposed=(), weights=(initial, initial)
            )
            plane.load_state(await StageFiles(context, JOB, manifest, stage).load(Checkpoint(), {}))

    asyncio.run(main())
    assert torch.equal(plane.state()["variable/w"], weights["w"])
    assert scale_of(plane) == (FIRST if precision == "fp16" else 1.0)
