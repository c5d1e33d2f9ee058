"""Stages of served models on their way into this peer's memory: blobs to the disk, graph and weights to a plane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path

from cachetools import LRUCache
from safetensors import SafetensorError
from safetensors.torch import load_file

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError, JobFailed
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.model_files import CHAT_FILES
from fusion.runtime.job.stage_graphs import StageGraphs, file_bytes, weights_bytes
from fusion.runtime.job.text import MAX_TOKENIZER_BYTES
from fusion.runtime.planes.plane import Plane
from fusion.runtime.serving.draft_loader import DraftLoader
from fusion.runtime.serving.grammar.grammars import Grammars
from fusion.runtime.serving.loaded_stage import LoadedStage
from fusion.runtime.serving.ring.frames import last_reader, plan_ring
from fusion.swarm.blobs.blobs import JobBlobs
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.errors import BlobError, QuotaExceeded

log = logging.getLogger(__name__)

REMEMBERED_RINGS = 8

Place = tuple[JobId, int]


class StageLoader:
    """Loads each stage once, however many wait for it."""

    def __init__(self, context: Context, plane: Plane, graphs: StageGraphs) -> None:
        self._context = context
        self.grammars = Grammars(context)  # for answers that follow a schema
        self._plane = plane
        self._graphs = graphs
        self._drafts = DraftLoader(context, plane, graphs)
        self._loading: dict[Place, asyncio.Task[LoadedStage]] = {}
        # Of each ring, by its graph and cuts, what all its stages have in common: its last reader of token ids, or why it is
        # none. Worked out once and not beside another: of a stranger's job of thousands of stages dozens are loaded at once.
        self._rings: LRUCache[tuple[Digest, tuple[int, ...]], int | JobError] = LRUCache(REMEMBERED_RINGS)
        self._planning = asyncio.Lock()

    async def load(self, place: Place, manifest: Manifest) -> LoadedStage:
        """The stage in memory: one that stands by and is promoted in the middle of its preparations goes on with them.
        Raises JobFailed where no peer could load it (its weights), Unsupported where we do not understand its graph, JobError where it was cancelled, BlobError
        where a blob cannot be had."""
        loading = self._loading.get(place)
        if loading is None:
            loading = self._loading[place] = asyncio.create_task(self._load(place, manifest))
            loading.add_done_callback(lambda _: self._loading.pop(place, None))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            # Ours, or that of the work itself (`cancel`): then it was not we who were cancelled.
            if loading.cancelled() and not _cancelled_ourselves():
                raise JobError(f"stage {place[1]} of {manifest.name} is not wanted here any more") from None
            raise

    def cancel(self, place: Place) -> None:
        """The stage is not wanted here any more."""
        loading = self._loading.get(place)
        if loading is not None:
            loading.cancel()

    async def aclose(self) -> None:
        for loading in self._loading.values():
            loading.cancel()
        await asyncio.gather(*self._loading.values(), self.grammars.aclose(), return_exceptions=True)

    async def fetch(self, place: Place, manifest: Manifest) -> Path:
        """Everything that the stage needs, on this disk; where its weights are. Raises BlobError, Unsupported, Understated
        where the manifest says less than the stage needs: then nothing but the graph was fetched."""
        job, stage = place
        part = (await self.stages(job, manifest))[stage]
        await self._graphs.check(job, manifest, stage)
        blobs = self._context.blobs.of(job)
        most = file_bytes(weights_bytes(part), len(part.graph.variables))
        wanted: list[Awaitable[Path | None]] = [blobs.fetch(manifest.weights[stage], max_bytes=most)]
        if manifest.tokenizer is not None and stage in (0, manifest.stages - 1):
            # No stage reads it, any gateway may: the swarm has to hold it once the launcher is gone.
            wanted.append(blobs.fetch(manifest.tokenizer, max_bytes=MAX_TOKENIZER_BYTES))
        if stage == 0:
            wanted.append(self._drafts.fetch(job, manifest))
        if stage in (0, manifest.stages - 1):
            chat = [(digest, CHAT_FILES[name]) for name, digest in manifest.files if name in CHAT_FILES]
            wanted += (_if_there_is(blobs, digest, most_bytes) for digest, most_bytes in chat)
        path = (await asyncio.gather(*wanted))[0]
        assert path is not None
        return path

    async def stages(self, job: JobId, manifest: Manifest) -> tuple[Stage, ...]:
        """All stages of the job. Raises BlobError, Unsupported for a graph that is none."""
        stages, _ = await self._graphs.of(job, manifest)
        return stages

    async def weights_bytes(self, place: Place, manifest: Manifest) -> int:
        """Of the stage's own weights. Raises as `stages`."""
        return weights_bytes((await self.stages(place[0], manifest))[place[1]])

    async def _load(self, place: Place, manifest: Manifest) -> LoadedStage:
        job, stage = place
        path = await self.fetch(place, manifest)
        stages = await self.stages(job, manifest)
        plan = plan_ring(stages, stage, await self._last_reader(stages, manifest))
        try:
            plane = await self._context.on_behalf_of(manifest.author, job).compute.run(
                lambda: self._plane.decoding(stages[stage], load_file(path))
            )
        except (SafetensorError, ValueError, KeyError) as error:
            raise JobFailed(f"the weights of stage {stage} of {manifest.name}: {error}") from None
        draft = await self._drafts.load(job, manifest) if stage == 0 else None
        return LoadedStage(plan, plane, manifest.weights[stage], weights_bytes(stages[stage]), draft)

    async def _last_reader(self, stages: tuple[Stage, ...], manifest: Manifest) -> int:
        """Raises JobFailed for a model that cannot be served in a ring."""
        ring = (manifest.graph, tuple(manifest.cuts))
        async with self._planning:
            if ring not in self._rings:
                self._rings[ring] = await asyncio.to_thread(_reader_or_error, stages)
            found = self._rings[ring]
        if isinstance(found, JobError):
            raise JobFailed(str(found))
        return found


async def _if_there_is(blobs: JobBlobs, digest: Digest, max_bytes: int) -> None:
    """Keep a copy for gateways. Owners of an older release have none, so nobody may have one any more; answers to prompts
    need none."""
    try:
        await blobs.fetch(digest, max_bytes=max_bytes)
    except (BlobError, QuotaExceeded) as error:
        log.info("not kept for chats: %s", error)


def _reader_or_error(stages: tuple[Stage, ...]) -> int | JobError:
    try:
        return last_reader(stages)
    except JobError as error:
        return error


def _cancelled_ourselves() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
