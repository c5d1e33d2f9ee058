"""Fetches the parts of a training stage from the swarm: its part of the graph, its data, its blobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion.runtime.device.share import Caller
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest, TrainConfig
from fusion.runtime.job.stage_graphs import StageGraphs
from fusion.runtime.training.compute.inbox import StagePlan
from fusion.runtime.training.data.batches import Batches
from fusion.runtime.training.data.data_blobs import fetch_data
from fusion.runtime.training.snapshots import snapshot
from fusion.runtime.training.snapshots.stage_files import Shards, StageFiles
from fusion.swarm.claims.election import winner
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

MakeBatches = Callable[[TrainConfig, Sequence[str], Path | None, Path | None], Batches]


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The parts of a stage, without its state."""

    config: TrainConfig
    plan: StagePlan
    files: StageFiles
    batches: Batches
    near: Mapping[int, PeerId]  # stage -> its last known owner, other than this peer
    caller: Caller  # of its calls on the device


class StageSource:
    """`batches` reads data blobs; `shards` is the format of states in blobs."""

    def __init__(
        self, context: Context, graphs: StageGraphs, batches: MakeBatches = Batches, shards: Shards = snapshot
    ) -> None:
        self._context = context
        self._graphs = graphs
        self._make_batches = batches
        self._shards = shards

    async def plan(self, job: JobId, manifest: Manifest, index: int) -> StagePlan:
        """Raises BlobError, Unsupported, Understated."""
        config = trained(manifest, index)
        stages, ties = await self._graphs.of(job, manifest)
        await self._graphs.check(job, manifest, index)
        return StagePlan(
            stage=stages[index],
            stages=len(stages),
            ties=tuple(group for group in ties if index in group.stages),
            sizes=config.sizes,
            memory_bytes=manifest.memory_bytes,
            whole=stages if index == 0 else (),
        )

    def files(self, job: JobId, manifest: Manifest, plan: StagePlan) -> StageFiles:
        return StageFiles(self._context, job, manifest, plan.stage, self._shards, self._graphs)

    async def parts(
        self, job: JobId, manifest: Manifest, plan: StagePlan, files: StageFiles, near: Mapping[int, PeerId]
    ) -> StageParts:
        """The parts, with the data on this disk. Raises BlobError, JobError; Refused as `fetch_data`."""
        config = trained(manifest, plan.stage.index)
        received = {edge.name for edge in plan.stage.receives}
        inputs = [i.name for i in plan.stage.graph.inputs if i.name not in received]
        train = held_out = None
        if Batches.needs_blobs(config, inputs):
            hints = list(dict.fromkeys([*near.values(), *(peer for peer in manifest.proposed if peer)]))
            train, held_out = await fetch_data(self._context, job, manifest.name, config.data, hints)
        batches = await asyncio.to_thread(self._make_batches, config, inputs, train, held_out)
        return StageParts(
            config=config,
            plan=plan,
            files=files,
            batches=batches,
            near=near,
            caller=self._context.accounts.caller(job, manifest.author),
        )

    def owners(self, job: JobId, manifest: Manifest) -> dict[int, PeerId]:
        """Stage -> its last known owner, other than this peer."""
        claims = {stage: winner(self._context.leases.recent(job, stage)) for stage in range(manifest.stages)}
        own = self._context.peer_id
        return {
            stage: claim.peer for stage, claim in claims.items() if claim is not None and claim.peer != own
        }


def trained(manifest: Manifest, index: int) -> TrainConfig:
    """The training configuration. Raises JobError where `index` is no stage of a training job."""
    if manifest.train is None or not 0 <= index < manifest.stages:
        raise JobError(f"stage {index} of {manifest.name} is no stage of a training job")
    return manifest.train
