"""The blobs that a peer that starts again keeps for the jobs on its disk, until other peers publish these jobs."""

from __future__ import annotations

from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.errors import JobError
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest, JobRecord
from fusion.swarm.errors import SwarmError


def blobs_of(record: JobRecord, store: BlobStore) -> frozenset[Digest]:
    """The job's manifest and the blobs that it names, its snapshot and the shards that it names, as far as the store has them.
    Blocking."""
    from fusion.runtime.training.snapshots import snapshot  # not at start: loads what reads weights

    found = {Digest(record.job)}
    if record.snapshot is not None:
        found.add(record.snapshot)
    try:
        manifest = manifests.decode(store.path(Digest(record.job)).read_bytes())
        found |= manifest.blobs
        if record.snapshot is not None:
            data = store.path(record.snapshot).read_bytes()
            found |= set(snapshot.decode_index(data, record.job, manifest.stages).shards)
    except (SwarmError, JobError, OSError):
        pass  # what cannot be read names nothing
    return frozenset(found)
