"""Jobs whose work raised an unexpected error here: this peer leaves them, and goes on with the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from cachetools import FIFOCache

from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import one_line

log = logging.getLogger(__name__)

REMEMBERED_JOBS = 1024


class JobFaults:
    """`leave` is called once with each job that has failed so. Its members are those jobs, which are ignored from then on."""

    def __init__(self) -> None:
        self.leave: Callable[[JobId], object] = lambda job: None
        self._left: FIFOCache[JobId, None] = FIFOCache(REMEMBERED_JOBS)

    def __contains__(self, job: object) -> bool:
        return job in self._left

    @contextmanager
    def isolated(self, job: JobId) -> Iterator[None]:
        """Any error inside makes this peer leave this job alone. SwarmError and OSError are raised on: the directory or the disk
        fails, not the job."""
        try:
            yield
        except (SwarmError, OSError):
            raise
        except Exception as error:
            # Isolates a job, which is built from what a stranger sent.
            self._leave(job, error)

    async def isolate(self, job: JobId, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` for this job, as `isolated` but for a task of its own: it raises nothing."""
        try:
            await work
        except Exception as error:
            self._leave(job, error)

    def _leave(self, job: JobId, error: Exception) -> None:
        if job in self._left:
            return
        self._left[job] = None
        what = (job[:12], type(error).__name__, one_line(str(error)))
        log.error("job %s fails here and is left to others: %s: %s", *what)
        log.debug("where it happened", exc_info=error)
        self.leave(job)
