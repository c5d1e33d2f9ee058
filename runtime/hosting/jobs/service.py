"""What runs the stages of one kind of job, as hosting and the rooms around it see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fusion.runtime.job.manifest import Manifest
from fusion.runtime.job.progress import Progress
from fusion.swarm.directory.records import JobId, JobRecord


def ignore_progress(progress: Progress) -> None:
    """For callers of `Service.host` that need no final progress."""


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
        JobFailed for the whole job, anything else where only this peer cannot go on. `handover`: what `pass_on` gave on the
        previous owner, where it handed the stage over. `left` is called at the end, however the stage ends, with the job's
        progress, where the stage knows it."""

    def progress(self, job: JobId) -> Progress | None:
        """Of a job of which a stage runs here; else None."""

    async def prepare(self, job: JobId, manifest: Manifest, stage: int, record: JobRecord) -> int:
        """Stand by for a stage: bring what `host` needs onto this peer and, where memory allows, into memory.
        Idempotent; called again whenever the job's snapshot has changed. Gives the step that is here now. Raises SwarmError,
        JobError."""

    def forget(self, job: JobId, stage: int) -> None:
        """No longer standing by: free the memory that `prepare` keeps."""

    async def pass_on(self, job: JobId, stage: int) -> Mapping[str, Any]:
        """Hand over: stop a stage that runs here at a boundary where nothing is lost. Gives the `handover` for the successor's
        `host`, msgpack-able, below 16 KiB. Raises JobError where it cannot; the caller bounds the time."""

    def stop(self, job: JobId) -> bool:
        """End the job for its author: save a snapshot, if its first stage runs here and has anything to save, and end. Whether
        that was begun: `progress` has the end, and the stage's `host` returns."""

    def stay(self, job: JobId, stage: int) -> None:
        """Resume the stage that `pass_on` stopped, or still waits to stop: no peer took it."""
