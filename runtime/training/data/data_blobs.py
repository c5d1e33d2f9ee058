"""Fetches the blobs of a job's data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusion.dag.placement.misfit import size_text
from fusion.runtime.job.context import Context
from fusion.runtime.job.errors import Refused
from fusion.runtime.job.manifest import DataConfig
from fusion.swarm.blobs.download import TooLarge
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId


async def fetch_data(
    context: Context, job: JobId, name: str, data: DataConfig, hints: Sequence[PeerId]
) -> tuple[Path, Path | None]:
    """The training data and the held-out data, if any. Raises BlobError; Refused where they are too large for the disk that this
    peer lends."""
    blobs, most = context.blobs.of(job), context.blobs.store.largest_bytes
    try:
        train = await blobs.fetch(data.train, hints, max_bytes=most)
        if data.held_out is None:
            return train, None
        return train, await blobs.fetch(data.held_out, hints, max_bytes=most)
    except TooLarge as error:
        raise Refused(
            f"the data of {name} are {size_text(error.size_bytes)}; of one job this peer takes {size_text(most)}, "
            "a quarter of the disk that it lends"
        ) from None
