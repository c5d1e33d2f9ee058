"""The jobs that a peer knows of: those that go on, as it last saw them, and those that have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusion.runtime.job.manifest import Manifest
from fusion.swarm.directory.records import JobId, JobRecord

REMEMBERED = 1000  # jobs that have ended


class KnownJobs:
    """Of a job that has ended the lead's term at that time is kept (`lead_term` gives it): only a later lead knows better,
    whatever the directory says."""

    def __init__(self, lead_term: Callable[[JobId], int]) -> None:
        self._lead_term = lead_term
        self._open: dict[JobId, tuple[JobRecord, Manifest]] = {}
        self._ended: dict[JobId, int] = {}

    def see(self, jobs: Mapping[JobId, tuple[JobRecord, Manifest]]) -> None:
        """These go on now; what ends meanwhile is taken out of them."""
        self._open = dict(jobs)

    def get(self, job: JobId) -> tuple[JobRecord, Manifest] | None:
        """Of a job that goes on."""
        return self._open.get(job)

    def end(self, job: JobId) -> None:
        self._open.pop(job, None)
        self._ended.pop(job, None)
        self._ended[job] = self._lead_term(job)
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def ended(self, record: JobRecord) -> bool:
        """Whether the job was over when that was said of it."""
        return record.term <= self._ended.get(record.job, -1)
