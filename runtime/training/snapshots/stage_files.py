"""The blobs of one hosted stage: its weights and snapshots, and second copies of its neighbour's."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from cachetools import FIFOCache

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.stage_graphs import StageGraphs, file_bytes, weights_bytes
from fusion.runtime.training.compute.stage_codecs import residual_shapes
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.history import Version
from fusion.runtime.training.step.messages import NEXT_STAGE
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.api import GLANCE_SECONDS
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import BlobError, QuotaExceeded, SwarmError
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)

SCRATCH_PREFIX = "shard-"
KEPT_SHARDS = 8  # of our own, whose digests are remembered
KEPT = 2  # snapshots that stay on disk: peers may still be fetching the one before the newest


class Shards(Protocol):
    """The format of a stage's state in a blob; implemented by `snapshot`."""

    def bytes_of(
        self, tensors: Mapping[str, torch.Tensor], version: Version
    ) -> tuple[int, Iterator[bytes | memoryview]]: ...

    def load_weights(self, path: Path, stage: Stage) -> dict[str, torch.Tensor]: ...

    def load_state(
        self,
        path: Path,
        stage: Stage,
        residuals: Mapping[str, tuple[int, ...]],
        version: Version | None = None,
    ) -> dict[str, torch.Tensor]: ...

    def check_state(
        self, path: Path, stage: Stage, residuals: Mapping[str, tuple[int, ...]], version: Version
    ) -> None: ...


class ShardRefused(JobError):
    """The shard of another stage can neither be fetched nor loaded."""

    def __init__(self, stage: int, reason: Exception) -> None:
        super().__init__(f"the shard of stage {stage}: {reason}")
        self.stage = stage


# Times a stage's memory in the manifest: the largest shard of it that is fetched as a copy
COPY_TIMES = 2


class StageFiles:
    """`shards`: the format of states in blobs; `graphs`: of the other stages, by which copies of their shards are checked."""

    def __init__(
        self,
        context: Context,
        job: JobId,
        manifest: Manifest,
        stage: Stage,
        shards: Shards = snapshot,
        graphs: StageGraphs | None = None,
    ) -> None:
        self._context = context
        self._blobs = context.blobs.of(job)
        self._job = job
        self._manifest = manifest
        self._stage = stage
        self._shards = shards
        self._graphs = graphs
        self._residuals = self._residuals_of(stage)
        state = snapshot.STATE_COPIES * weights_bytes(stage) + 4 * sum(map(prod, self._residuals.values()))
        tensors = snapshot.STATE_COPIES * len(stage.graph.variables) + len(self._residuals)
        self._most = file_bytes(state, tensors)  # bytes of our weights, or of a shard of ours
        # Set once the files that an export writes beside the weights are here
        self.copied = asyncio.Event()
        self._by_step: dict[int, set[Digest]] = {}  # blobs of snapshots that we wrote or fetched
        self._left: set[Digest] = set()  # of these, to be deleted once nothing else on this peer needs them
        self._own: FIFOCache[int, Digest] = FIFOCache(KEPT_SHARDS)  # our shard of each step, as far as known

    async def put(self, data: bytes) -> Digest:
        return await self._blobs.put(data)

    async def checkpoint(self, index_digest: Digest) -> Checkpoint:
        """The snapshot with this index, its ledger included. Raises BlobError, JobError."""
        return (await self._index(index_digest, {})).checkpoint(index_digest)

    async def load(self, checkpoint: Checkpoint, owners: Mapping[int, PeerId]) -> dict[str, torch.Tensor]:
        """The state of our stage at a snapshot, or its initial weights where `checkpoint` names none, as
        `TrainingStage.load_state` takes it. Raises BlobError, JobError."""
        blobs, stage = self._blobs, self._stage
        if checkpoint.digest is None:
            proposed = [peer for peer in self._manifest.proposed if peer]
            path = await blobs.fetch(self._manifest.weights[stage.index], proposed, max_bytes=self._most)
            weights = await asyncio.to_thread(self._shards.load_weights, path, stage)
            train = self._manifest.train
            return snapshot.untrained(weights, scaled=train is not None and train.precision == "fp16")
        digest, version = await self._shard_of(checkpoint, owners)
        near = self._near(stage.index, owners, snapshot.FURTHEST)
        path = await blobs.fetch(digest, near, max_bytes=self._most)
        state = await asyncio.to_thread(self._shards.load_state, path, stage, self._residuals, version)
        self._own[version.step] = digest
        self._context.seen.take_part(self._job, stage.index, checkpoint.digest, version.step)
        return state

    async def load_shard(
        self, digest: Digest, version: Version, near: Sequence[PeerId]
    ) -> dict[str, torch.Tensor]:
        """The state `version` of our stage from its shard, which the peers of `near` hold. Raises BlobError, JobError."""
        path = await self._blobs.fetch(digest, near, max_bytes=self._most)
        self._keep(version.step, digest)
        state = await asyncio.to_thread(self._shards.load_state, path, self._stage, self._residuals, version)
        self._own[version.step] = digest
        return state

    async def fetch(self, checkpoint: Checkpoint, owners: Mapping[int, PeerId]) -> None:
        """Fetch the blobs that `load` would read. Raises BlobError, JobError."""
        if checkpoint.digest is None:
            proposed = [peer for peer in self._manifest.proposed if peer]
            weights = self._manifest.weights[self._stage.index]
            await self._blobs.fetch(weights, proposed, max_bytes=self._most)
            return
        digest, _ = await self._shard_of(checkpoint, owners)
        near = self._near(self._stage.index, owners, snapshot.FURTHEST)
        await self._blobs.fetch(digest, near, max_bytes=self._most)

    async def save(self, version: Version, state: Mapping[str, torch.Tensor]) -> Digest:
        """Store the state `version` of our stage as a blob. Raises QuotaExceeded where there is no room, before anything is written,
        and BlobError where it cannot be written."""
        size_bytes, parts = self._shards.bytes_of(state, version)
        begun, abandoned = threading.Event(), threading.Event()  # we are cancelled, but a thread cannot be

        def pieces() -> Iterator[bytes | memoryview]:
            begun.set()
            for piece in parts:
                if abandoned.is_set():
                    return  # too few bytes: the store keeps none of them
                yield piece

        try:
            digest = await self._blobs.put_pieces(size_bytes, pieces())
        except QuotaExceeded as error:
            if begun.is_set():
                raise BlobError(str(error)) from error
            raise
        finally:
            abandoned.set()
        self._keep(version.step, digest)
        self._own[version.step] = digest
        return digest

    async def replicate(
        self,
        index_digest: Digest,
        owners: Mapping[int, PeerId],
        away: int = NEXT_STAGE,
        *,
        look: bool = False,
    ) -> None:
        """Hold the index of a snapshot and, beside our own shard, that of the stage `away` places before ours on the ring of stages, so
        that no single departure loses a shard; more of them where one peer owns several in a row (`copies_at`). Owners that
        are not in `owners` are read from recent claims, or, with `look`, from the directory. Raises QuotaExceeded, BlobError, JobError; ShardRefused
        where another stage's shard is at fault."""
        index = await self._index(index_digest, owners)
        own = self._own.get(index.step)
        if own not in (None, index.shards[self._stage.index]):
            raise JobError(f"the snapshot {index_digest[:12]} has another shard than ours")
        stages = self._manifest.stages
        copies = [(self._stage.index - away) % stages]
        if away == NEXT_STAGE:
            copies = copies_at(self._stage.index, stages, owners)
            while (before := (copies[-1] - 1) % stages) not in owners:
                owners = {**owners, before: await self._owner_of(before, look=look)}
                copies = copies_at(self._stage.index, stages, owners)
        for stage in copies:
            await self._hold_shard(index_digest, index, stage, owners)
        if own is not None:
            self._context.seen.take_part(self._job, self._stage.index, index_digest, index.step)

    async def check_shard(self, index_digest: Digest, stage: int, owners: Mapping[int, PeerId]) -> None:
        """Fetch the shard of a stage in this snapshot, which the stage's next owner has to load. Raises QuotaExceeded where there is no
        room here, BlobError, JobError."""
        await self._hold_shard(index_digest, await self._index(index_digest, owners), stage, owners)

    async def _hold_shard(
        self, index_digest: Digest, index: snapshot.Index, number: int, owners: Mapping[int, PeerId]
    ) -> None:
        """Hold a copy of the shard of stage `number`. Raises QuotaExceeded, BlobError, JobError; ShardRefused for a shard that the stage's
        next owner could not load: earlier snapshots are deleted once this one is durable."""
        # The author of the index may be a stranger. A shard is no larger than its stage's memory, apart from its header, which
        # is most of the shard of a very small stage.
        needs = self._manifest.memory_bytes
        most = file_bytes(COPY_TIMES * needs[number], 0) if needs else None
        graph = None if self._graphs is None else await self._graphs.of(self._job, self._manifest)
        digest, version = index.shards[number], index.checkpoint(index_digest).version
        try:
            path = await self._blobs.fetch(digest, self._near(number, owners), max_bytes=most)
            self._keep(index.step, index_digest, digest)
            if graph is not None:
                stage = graph[0][number]
                residuals = self._residuals_of(stage)
                await asyncio.to_thread(self._shards.check_state, path, stage, residuals, version)
        except (BlobError, JobError) as error:
            raise ShardRefused(number, error) from error

    def _residuals_of(self, stage: Stage) -> dict[str, tuple[int, ...]]:
        train = self._manifest.train
        return {} if train is None else residual_shapes(stage, train)

    def has_part(self, index_digest: Digest | None, step: int) -> bool:
        """Whether it, of `step`, is the newest snapshot known to have our shard."""
        return self._context.seen.takes_part(self._job, self._stage.index, index_digest, step)

    async def _owner_of(self, stage: int, *, look: bool) -> PeerId:
        """The owner, as in `replicate`; an empty id for none."""
        leases, place = self._context.leases, (self._job, stage)
        claims = await leases.claims_or_recent(*place, GLANCE_SECONDS) if look else leases.recent(*place)
        owner = winner(claims)
        return PeerId("") if owner is None else owner.peer

    async def forget_before(self, checkpoint: Checkpoint, before: Checkpoint | None = None) -> None:
        """Delete blobs of all steps up to `checkpoint` but the newest KEPT; where the snapshot `before` it is known, but these two, and
        so also what was saved between them and never became a snapshot."""
        steps = sorted((step for step in self._by_step if step <= checkpoint.step), reverse=True)
        kept = steps[:KEPT]
        if before is not None and before.step in self._by_step:
            kept = [checkpoint.step, before.step]
        await self._forget(set(steps).difference(kept))

    async def forget_given_up(self, newest: Checkpoint, kept: Collection[int]) -> None:
        """Delete what was saved and held after the `newest` snapshot, except for the steps in `kept`: no lead will complete it."""
        await self._forget({step for step in self._by_step if step > newest.step}.difference(kept))

    async def _forget(self, steps: set[int]) -> None:
        for step in steps:
            self._left |= self._by_step.pop(step)
        self._hold()
        for digest in self._left.difference(*self._by_step.values()):
            if await self._context.blobs.drop(digest):
                self._left.discard(digest)

    async def hold_copies(self) -> None:
        """Hold copies beside the launcher's: on the first and the last stage the files that an export writes beside the weights, and
        the initial weights of the stage before ours, until the first snapshot."""
        manifest, stage = self._manifest, self._stage.index
        if stage in (0, manifest.stages - 1):
            await self._fetched([digest for _, digest in manifest.files])
            await self._fetched([] if manifest.tokenizer is None else [manifest.tokenizer])
        self.copied.set()
        await self._fetched([manifest.weights[(stage - 1) % manifest.stages]])

    async def _fetched(self, digests: Sequence[Digest]) -> None:
        """Fetch the blobs; those that nobody has are logged."""
        manifest, stage = self._manifest, self._stage.index
        for digest in digests:
            try:
                await self._blobs.fetch(digest, max_bytes=self._context.blobs.store.largest_bytes)
            except SwarmError as error:
                log.warning("stage %d of %s holds no copy of a file: %s", stage, manifest.name, error)

    async def _shard_of(self, checkpoint: Checkpoint, owners: Mapping[int, PeerId]) -> tuple[Digest, Version]:
        """Our shard of a snapshot, which is kept from now on, and the version of its state."""
        assert checkpoint.digest is not None, "the initial weights are no snapshot"
        index = await self._index(checkpoint.digest, owners)
        indexed = index.checkpoint(checkpoint.digest)
        if not indexed.version.matches(checkpoint.version) or (
            checkpoint.sound and checkpoint.ledger != indexed.ledger
        ):
            raise JobError(f"the snapshot {checkpoint.digest[:12]} is not of the state that it is said to be")
        self._keep(index.step, checkpoint.digest, index.shards[self._stage.index])
        return index.shards[self._stage.index], indexed.version

    async def _index(self, digest: Digest, owners: Mapping[int, PeerId]) -> snapshot.Index:
        data = await self._blobs.read(digest, snapshot.MAX_INDEX_BYTES, self._near(0, owners))
        return snapshot.decode_index(data, self._job, self._manifest.stages)

    def _near(self, stage: int, owners: Mapping[int, PeerId], furthest: int = NEXT_STAGE) -> list[PeerId]:
        """Peers that probably hold the shard of a stage: its owner, and those of the stages after it."""
        likely = (owners.get((stage + away) % self._manifest.stages) for away in range(furthest + 1))
        return list(dict.fromkeys(peer for peer in likely if peer))

    def _keep(self, step: int, *digests: Digest) -> None:
        self._by_step.setdefault(step, set()).update(digests)
        self._hold()

    def _hold(self) -> None:
        self._context.blobs.hold(self, set().union(*self._by_step.values()))


def copies_at(stage: int, stages: int, owners: Mapping[int, PeerId]) -> list[int]:
    """The stages whose shards' second copies the owner of `stage` holds: the one before it and, where one other peer owns that
    and more stages before it, those too, since their copies at each other would be on one disk."""
    copies = [(stage - 1) % stages]
    while len(copies) < stages - 1:
        last, before = copies[-1], (copies[-1] - 1) % stages
        owner = owners.get(last)
        if owner is None or owner == owners.get(stage) or owners.get(before) != owner:
            break
        copies.append(before)
    return copies


def scratch_folder(context: Context) -> Path:
    """The folder where older versions wrote shards before they moved them into the store."""
    return context.home / "scratch"


def sweep(context: Context) -> None:
    """Delete what a killed process of an older version left in the scratch folder."""
    for path in scratch_folder(context).glob(f"{SCRATCH_PREFIX}*"):
        path.unlink(missing_ok=True)
