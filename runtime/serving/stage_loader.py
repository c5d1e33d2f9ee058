"""Loads stages of served models: fetches their blobs, and loads graph and weights into a plane."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from cachetools import LRUCache

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed, Unrunnable
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import LoadingPhase, StageLoading
from fusion.runtime.job.stage_graphs import StageGraphs, weights_bytes
from fusion.runtime.planes.plane import Plane
from fusion.runtime.planes.weights_file import WeightsFile
from fusion.runtime.serving.draft_loader import DraftLoader
from fusion.runtime.serving.grammar.grammars import Grammars
from fusion.runtime.serving.loaded_stage import LoadedStage
from fusion.runtime.serving.ring.frames import LastReader, last_reader, plan_ring
from fusion.runtime.serving.stage_blobs import StageBlobs
from fusion.swarm.directory.records import Digest, JobId, Place
from fusion.swarm.printable import one_line

REMEMBERED_RINGS = 8


@dataclass(frozen=True)
class _Step:
    phase: LoadingPhase
    since: float  # by the clock
    weights: Digest


class StageLoader:
    """Loads each stage once, however many callers wait for it."""

    def __init__(self, context: Context, plane: Plane, graphs: StageGraphs) -> None:
        self._context = context
        self.grammars = Grammars(context)  # for completions with a schema
        self._plane = plane
        self._graphs = graphs
        self._drafts = DraftLoader(context, plane, graphs)
        self._blobs = StageBlobs(context, graphs, self._drafts)
        self._steps: dict[Place, _Step] = {}
        self._loading: dict[Place, asyncio.Task[LoadedStage]] = {}
        # Ring, by its graph and cuts -> its last reader of token ids, or why it is not valid. Computed once, and one ring at a time: of
        # a stranger's job of thousands of stages dozens are loaded at once.
        self._rings: LRUCache[tuple[Digest, tuple[int, ...]], LastReader | JobError] = LRUCache(
            REMEMBERED_RINGS
        )
        self._planning = asyncio.Lock()

    async def load(self, place: Place, manifest: Manifest) -> LoadedStage:
        """The loaded stage; joins a load that runs already, as when a standby is promoted while it prepares.

        Raises JobFailed where no peer could load it (its weights), Unsupported where this release does not know its graph, JobError
        where the load was cancelled by `cancel`, BlobError where a blob is not available."""
        loading = self._loading.get(place)
        if loading is None:
            loading = self._loading[place] = asyncio.create_task(self._load(place, manifest))
            loading.add_done_callback(lambda _: self._loading.pop(place, None))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            # Either this caller was cancelled, or the load (`cancel`).
            if loading.cancelled() and not _cancelled_ourselves():
                raise JobError(f"stage {place[1]} of {manifest.name} is not wanted here any more") from None
            raise

    def cancel(self, place: Place) -> None:
        """Cancel the load: the stage is not needed any more."""
        loading = self._loading.get(place)
        if loading is not None:
            loading.cancel()

    async def aclose(self) -> None:
        for loading in self._loading.values():
            loading.cancel()
        await asyncio.gather(*self._loading.values(), self.grammars.aclose(), return_exceptions=True)

    async def fetch(self, place: Place, manifest: Manifest) -> Path:
        """As `StageBlobs.fetch`."""
        return await self._blobs.fetch(place, manifest)

    def under_way(self) -> list[StageLoading]:
        """The stages that are being loaded."""
        return [self._stage_loading(place, step) for place, step in self._steps.items()]

    def _stage_loading(self, place: Place, step: _Step) -> StageLoading:
        fetched = self._context.blobs.progress(step.weights)
        return StageLoading(
            job=place[0],
            stage=place[1],
            phase=step.phase,
            bytes=fetched.bytes,
            of_bytes=fetched.of_bytes,
            seconds=round(self._context.clock.monotonic() - step.since, 1),
            trouble=one_line(fetched.trouble),
        )

    def _step(self, place: Place, manifest: Manifest, phase: LoadingPhase) -> None:
        self._steps[place] = _Step(phase, self._context.clock.monotonic(), manifest.weights[place[1]])

    async def stages(self, job: JobId, manifest: Manifest) -> tuple[Stage, ...]:
        """All stages of the job. Raises BlobError, and Unsupported for an invalid graph."""
        stages, _ = await self._graphs.of(job, manifest)
        return stages

    async def weights_bytes(self, place: Place, manifest: Manifest) -> int:
        """The bytes of the stage's own weights. Raises as `stages`."""
        return weights_bytes((await self.stages(place[0], manifest))[place[1]])

    async def _load(self, place: Place, manifest: Manifest) -> LoadedStage:
        try:
            self._step(place, manifest, "fetching")
            path = await self._blobs.fetch(place, manifest)
            self._step(place, manifest, "loading")
            return await self._into_memory(place, manifest, path)
        finally:
            self._steps.pop(place, None)

    async def _into_memory(self, place: Place, manifest: Manifest, path: Path) -> LoadedStage:
        job, stage = place
        stages = await self.stages(job, manifest)
        part = stages[stage]
        plan = plan_ring(stages, stage, await self._last_reader(job, stages, manifest))
        try:
            plane = await self._context.on_behalf_of(manifest.author, job).compute.run(
                lambda: self._plane.decoding(part, WeightsFile(path, len(part.graph.variables)))
            )
        except (ValueError, KeyError) as error:
            raise JobFailed(f"the weights of stage {stage} of {manifest.name}: {error}") from None
        draft = await self._drafts.load(job, manifest) if stage == 0 else None
        return LoadedStage(plan, plane, weights_bytes(part), draft)

    async def _last_reader(self, job: JobId, stages: tuple[Stage, ...], manifest: Manifest) -> LastReader:
        """Raises Unrunnable for a model that cannot be served in a ring."""
        ring = (manifest.graph, tuple(manifest.cuts))
        async with self._planning:
            if ring not in self._rings:
                work_for = self._context.work_for
                self._rings[ring] = await work_for(job, manifest.author, _reader_or_error, stages)
            reader = self._rings[ring]
        if isinstance(reader, JobError):
            raise Unrunnable(str(reader))
        return reader


def _reader_or_error(stages: tuple[Stage, ...]) -> LastReader | JobError:
    try:
        return last_reader(stages)
    except JobError as error:
        return error


def _cancelled_ourselves() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
