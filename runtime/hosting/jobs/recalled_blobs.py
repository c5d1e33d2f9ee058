"""What a peer that starts again has to keep of the jobs that its disk tells of, until somebody has spoken of them."""

from __future__ import annotations

from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.errors import JobError
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import Digest, JobRecord
from fusion.swarm.errors import SwarmError


def blobs_of(record: JobRecord, store: BlobStore) -> frozenset[Digest]:
    """The job's manifest and what that begins with, its snapshot and the shards of that, as far as the store has what names them.
    Blocking."""
    from fusion.runtime.training.snapshots import (
        snapshot,
    )  # with all that reads weights, for which a command has no use

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
