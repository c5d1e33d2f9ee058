"""Loads the draft model of a served model, with the first stage. If that fails, one warning is logged, and the model is served without
speculation."""

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

NO_DRAFT = (SwarmError, *PLANE_ERRORS)  # errors of fetching or loading a draft


@dataclass(frozen=True)
class DraftOnDisk:
    stage: Stage
    weights: Path
    positions: int  # of its context


class DraftLoader:
    def __init__(self, context: Context, plane: Plane, graphs: StageGraphs) -> None:
        self._context = context
        self._plane = plane
        self._graphs = graphs

    async def fetch(self, job: JobId, manifest: Manifest) -> None:
        """Fetch the draft to this disk, if there is one: for the owner of the first stage and its standbys."""
        with suppress(*NO_DRAFT):
            await self._fetch(job, manifest)

    async def load(self, job: JobId, manifest: Manifest) -> DraftModel | None:
        """Load the draft. None where the job has none, or none that fits beside the first stage into the memory that the manifest
        declares."""
        try:
            draft = await self._fetch(job, manifest)
            if draft is None or manifest.serve is None:
                return None
            compute = self._context.on_behalf_of(manifest.author, job).compute
            return await compute.run(self._make, draft, manifest.serve.vocabulary)
        except NO_DRAFT as error:
            log.warning("%s is served without its draft model: %s", manifest.name, error_line(error))
            return None

    def _make(self, draft: DraftOnDisk, vocabulary: int) -> DraftModel:
        weights = WeightsFile(draft.weights, len(draft.stage.graph.variables))
        plane = self._plane.decoding(draft.stage, weights)
        return DraftModel(plane, vocabulary, draft.positions, weights_bytes(draft.stage))

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
