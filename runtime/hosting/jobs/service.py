"""What runs the stages of one kind of job, as hosting and the rooms around it see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import Progress
from fusion.swarm.directory.records import JobId, JobRecord


def ignore_progress(progress: Progress) -> None:
    """For whoever hosts a stage and does not ask how its job stood when it left."""


class Service(Protocol):
    async def host(
        self,
        job: JobId,
        manifest: Manifest,
        stage: int,
        term: int,
        handover: Mapping[str, Any] | None = None,
        *,
        left: Callable[[Progress], None] = ignore_progress,
    ) -> None:
        """Run one stage under our claim's `term` until its job ends (returns), it is cancelled, or it fails: raises
        JobFailed for the whole job, anything else where only this peer cannot go on. `handover`: what the owner before
        said when it handed the stage over (`pass_on`). However it comes to its end, `left` is told how the job stood
        then, where the stage knows."""

    def progress(self, job: JobId) -> Progress | None:
        """How a job stands of which a stage runs here."""

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        """Stand by for a stage: bring what `host` needs onto this peer and, where memory allows, into memory.
        Idempotent; called again whenever the job's snapshot has changed. The step that is here now. Raises SwarmError,
        JobError."""

    def forget(self, job: JobId, stage: int) -> None:
        """No longer standing by: free the memory that `prepare` keeps."""

    async def pass_on(self, job: JobId, stage: int) -> Mapping[str, Any]:
        """We leave: stop a stage that runs here at a boundary where nothing is lost. What the successor's `host` gets,
        msgpack-able, below 16 KiB. Raises JobError where it cannot; the caller bounds the time."""

    def stop(self, job: JobId) -> bool:
        """Whoever launched the job ends it: save what it has come to, if its first stage runs here and has anything to save, and end.
        Whether that was begun: `progress` tells of the end, and the stage's `host` returns."""

    def stay(self, job: JobId, stage: int) -> None:
        """Nobody took the stage that `pass_on` stopped, or still waits to stop: go on with it."""
