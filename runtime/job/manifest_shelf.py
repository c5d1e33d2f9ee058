"""The manifests of the swarm's jobs, fetched in the background: a job whose manifest does not arrive, or is not valid, does not
delay other jobs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Container, Coroutine
from typing import Any

from cachetools import FIFOCache

from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.context import Context
from fusion.runtime.job.cool_down import CoolDown
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest
from fusion.swarm.directory.records import Digest, JobId, JobRecord
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import one_line
from fusion.swarm.transport import PeerId

log = logging.getLogger(__name__)


FETCH_SECONDS = 20.0  # for one manifest to arrive
COOL_DOWN_SECONDS = 5.0  # after one did not, doubling
LONGEST_COOL_DOWN_SECONDS = 300.0
FETCHES = 32  # at once
FETCHES_PER_AUTHOR = 4  # of a job's record: an author's many jobs without manifests must not delay others
KEPT_BYTES = 64 << 20  # of manifests in memory; others are read from the disk again
REFUSED_JOBS = 4096  # whose blob is known not to be a manifest


class ManifestShelf:
    """`spawn` runs a job's fetch as a task; `arrived` is called when it got a manifest."""

    def __init__(
        self,
        context: Context,
        spawn: Callable[[JobId, Coroutine[Any, Any, None]], object],
        arrived: Callable[[], None],
    ) -> None:
        self._context = context
        self._blobs = context.blobs
        self._spawn = spawn
        self._arrived = arrived
        clock = context.clock.monotonic
        self._cooling: CoolDown[JobId] = CoolDown(COOL_DOWN_SECONDS, LONGEST_COOL_DOWN_SECONDS, clock)
        self._known: dict[JobId, tuple[Manifest, int]] = {}  # with its size in bytes, the oldest first
        self._refused: FIFOCache[JobId, None] = FIFOCache(REFUSED_JOBS)
        self._fetching: dict[JobId, PeerId] = {}  # and the author of the record that led to it

    def get(self, job: JobId) -> Manifest | None:
        """The job's manifest, if it is here."""
        return self._known[job][0] if job in self._known else None

    def fetch(self, record: JobRecord) -> bool:
        """Begin to fetch the manifest of the record's job in the background, unless that has just failed, or too many fetches are
        under way. Whether it has begun."""
        job = record.job
        if job in self._known or job in self._refused or job in self._fetching or self._cooling.lasts(job):
            return False
        busy = Counter(self._fetching.values())
        if busy.total() >= FETCHES or busy[record.author] >= FETCHES_PER_AUTHOR:
            return False
        self._fetching[job] = record.author
        self._spawn(job, self._fetch(record))
        return True

    def keep_only(self, jobs: Container[JobId]) -> None:
        """Forget the manifests of all other jobs."""
        self._known = {job: entry for job, entry in self._known.items() if job in jobs}

    async def _fetch(self, record: JobRecord) -> None:
        job = record.job
        hints = [peer for peer in (record.author, record.lead) if peer is not None]
        # A stranger may name any blob as a job: one that was here before must not be deleted.
        here = self._blobs.has(Digest(job))
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                data = await self._blobs.read(Digest(job), manifests.MAX_MANIFEST_BYTES, hints)
            manifest = await self._context.work_for(job, record.author, manifests.decode, data)
        except JobError as error:
            log.warning("job %s (%s) is refused: %s", record.name, job[:12], one_line(str(error)))
            await self._refuse(job, drop=not here)
        except (SwarmError, TimeoutError) as error:
            reason = one_line(str(error)) or "timed out"
            log.warning("no manifest of job %s (%s): %s", record.name, job[:12], reason)
            self._cooling.start(job)
        else:
            self._cooling.forget(job)
            self._keep(job, manifest, len(data))
            self._arrived()
        finally:
            del self._fetching[job]

    async def _refuse(self, job: JobId, *, drop: bool) -> None:
        """For good: the digest fixes the bytes, so they will never be a manifest."""
        self._refused[job] = None
        try:
            if drop:
                await self._blobs.drop(Digest(job))
        except SwarmError as error:
            log.warning("%s", error)

    def _keep(self, job: JobId, manifest: Manifest, size: int) -> None:
        self._known[job] = (manifest, size)
        while len(self._known) > 1 and sum(s for _, s in self._known.values()) > KEPT_BYTES:
            del self._known[next(iter(self._known))]
