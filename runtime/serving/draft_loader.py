"""The draft model of a served model on its way into memory, with the first stage. Whatever is wrong with it, answers go on
without one: it is said once, and that is all."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.context import Context
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.stage_graphs import (
    MAX_GRAPH_BYTES,
    StageGraphs,
    file_bytes,
    needed_bytes,
    weights_bytes,
    whole_stage,
)
from fusion.runtime.planes.plane import Plane
from fusion.runtime.planes.weights_file import WeightsFile
from fusion.runtime.serving.drafts.draft_files import MAX_ABOUT_BYTES, AboutDraft, draft_files
from fusion.runtime.serving.drafts.draft_model import DraftModel
from fusion.runtime.serving.ring.frames import plan_ring
from fusion.runtime.serving.ring.stage_session import PLANE_ERRORS
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import error_line

log = logging.getLogger(__name__)

NO_DRAFT = (SwarmError, *PLANE_ERRORS)  # what a draft raises that cannot be had, or made anything of


@dataclass(frozen=True)
class DraftOnDisk:
    stage: Stage
    weights: Path
    positions: int  # that it can read at most


class DraftLoader:
    def __init__(self, context: Context, plane: Plane, graphs: StageGraphs) -> None:
        self._context = context
        self._plane = plane
        self._graphs = graphs

    async def fetch(self, job: JobId, manifest: Manifest) -> None:
        """The draft on this disk, if it can be had: for whoever has the first stage or stands by for it."""
        with suppress(*NO_DRAFT):
            await self._fetch(job, manifest)

    async def load(self, job: JobId, manifest: Manifest) -> DraftModel | None:
        """The draft in memory. None where the job has none, or none that can be run beside the first stage in the memory that
        the manifest says."""
        try:
            found = await self._fetch(job, manifest)
            if found is None or manifest.serve is None:
                return None
            compute = self._context.on_behalf_of(manifest.author, job).compute
            return await compute.run(self._make, found, manifest.serve.vocabulary)
        except NO_DRAFT as error:
            log.warning("%s is served without its draft model: %s", manifest.name, error_line(error))
            return None

    def _make(self, found: DraftOnDisk, vocabulary: int) -> DraftModel:
        weights = WeightsFile(found.weights, len(found.stage.graph.variables))
        plane = self._plane.decoding(found.stage, weights)
        return DraftModel(plane, vocabulary, found.positions, weights_bytes(found.stage))

    async def _fetch(self, job: JobId, manifest: Manifest) -> DraftOnDisk | None:
        files = draft_files(manifest)
        if files is None or manifest.serve is None:
            return None
        blobs, hints = self._context.blobs.of(job), [peer for peer in manifest.proposed if peer]
        about = AboutDraft.from_json(await blobs.read(files.about, MAX_ABOUT_BYTES, hints))
        graph = await blobs.read(files.graph, MAX_GRAPH_BYTES, hints)
        work_for, author = self._context.work_for, manifest.author
        stage = await work_for(job, author, whole_stage, graph, f"the draft of {manifest.name}")
        plan_ring((stage,), 0)  # JobError where it is no language model
        positions = min(about.max_sequence, manifest.serve.max_sequence)
        alone = replace(manifest, serve=replace(manifest.serve, max_sequence=positions))
        needed = await work_for(job, author, needed_bytes, stage, alone)
        await self._graphs.check(job, manifest, 0, beside_bytes=needed)
        most = file_bytes(weights_bytes(stage), len(stage.graph.variables))
        return DraftOnDisk(stage, await blobs.fetch(files.weights, max_bytes=most), positions)
