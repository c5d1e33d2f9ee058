"""Which shards of the jobs' newest snapshots are on this peer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import Manifest
from fusion.runtime.training.snapshots import snapshot
from fusion.swarm.directory.records import Digest, JobId, JobRecord, Place
from fusion.swarm.errors import SwarmError
from fusion.swarm.printable import one_line

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Snapshot:
    index: Digest
    step: int
    shards: tuple[Digest, ...]


class ShardsHere:
    def __init__(self, context: Context) -> None:
        self._blobs = context.blobs
        self._newest: dict[JobId, _Snapshot] = {}  # of jobs whose index is here

    def step(self, place: Place) -> int:
        """The step of the job's newest snapshot, as of the last `look`; -1 where the stage's shard is not on this peer."""
        job, stage = place
        known = self._newest.get(job)
        here = known is not None and stage < len(known.shards) and self._blobs.has(known.shards[stage])
        return known.step if known is not None and here else -1

    async def look(self, jobs: Mapping[JobId, tuple[JobRecord, Manifest]]) -> None:
        """Read from the local store which shards the newest snapshots of these jobs consist of."""
        self._newest = {job: known for job, known in self._newest.items() if job in jobs}
        for job, (record, manifest) in jobs.items():
            digest, known = record.snapshot, self._newest.get(job)
            if digest is None or (known is not None and known.index == digest) or not self._blobs.has(digest):
                continue
            try:
                data = await self._blobs.of(job).read(digest, snapshot.MAX_INDEX_BYTES)
                index = snapshot.decode_index(data, job, manifest.stages)
            except (SwarmError, JobError) as error:
                log.warning("the snapshot of %s: %s", manifest.name, one_line(str(error)))
                continue
            self._newest[job] = _Snapshot(digest, index.step, index.shards)
        self._blobs.hold(self, {shard for known in self._newest.values() for shard in known.shards})
