"""The models that a peer serves: those that generate token by token, and those that run once for each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import Progress
from fusion.runtime.serving.graphs.gateway import GraphGateway
from fusion.runtime.serving.graphs.stages import GraphStages
from fusion.runtime.serving.service import ServingService
from fusion.swarm.directory.records import JobId, JobRecord


class ServedModels:
    """A service of jobs (`fusion.runtime.hosting.jobs.service`), which dispatches on the kind of model."""

    def __init__(self, generating: ServingService, graphs: GraphStages, runs: GraphGateway) -> None:
        self.generating = generating
        self.runs = runs
        self._graphs = graphs

    async def host(
        self,
        job: JobId,
        manifest: Manifest,
        stage: int,
        term: int,
        handover: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Serve one stage until cancelled. Raises as `ServingService.host`."""
        if _answers_in_one_run(manifest):
            await self._graphs.host(job, manifest, stage)
        else:
            await self.generating.host(job, manifest, stage, term, handover)

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        """Stand by for a stage. Raises JobError, BlobError, QuotaExceeded."""
        if not _answers_in_one_run(manifest):
            return await self.generating.prepare(job, manifest, stage, record)
        await self._graphs.prepare(job, manifest, stage)
        return record.step

    def progress(self, job: JobId) -> Progress | None:
        """Progress of the job, at the owner of its first stage; else None."""
        return self._graphs.progress(job) or self.generating.progress(job)

    def forget(self, job: JobId, stage: int) -> None:
        self.generating.forget(job, stage)

    async def pass_on(self, job: JobId, stage: int) -> Mapping[str, Any]:
        """Hand over, as the peer leaves. A model that runs once for each request has no state to hand over."""
        if self._graphs.held(job, stage) is not None:
            return {}
        return await self.generating.pass_on(job, stage)

    def stop(self, job: JobId) -> bool:
        """A served model has no state to save."""
        return False

    def stay(self, job: JobId, stage: int) -> None:
        self.generating.stay(job, stage)


def _answers_in_one_run(manifest: Manifest) -> bool:
    return manifest.serve is not None and bool(manifest.serve.outputs)
