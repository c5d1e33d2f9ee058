"""A job that is ready to be launched."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.runtime.job.manifest import Manifest, TrainConfig
from fusion.runtime.placing.placed_job import Placed
from fusion.runtime.placing.plan import Plan
from fusion.runtime.placing.stage_count import StageChoice
from fusion.runtime.training.lead.tuning import state_bytes
from fusion.runtime.training.snapshots.snapshot_period import first_cost_seconds, share
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job whose blobs all lie in the local store."""

    job: JobId
    manifest: Manifest
    author: Identity  # whose key the manifest names
    blobs: tuple[Digest, ...]  # everything that peers will fetch, the manifest included
    predicted_seconds: float  # a step, or a token, by the placement's model; 0: not known
    parameters: int
    invited: tuple[PeerId, ...] = ()  # that get a grant when the job is launched
    plan: Plan | None = None  # of a training job that was placed here: what launching it will set going
    stage_count: StageChoice | None = None  # of a model to serve: over how many peers, and why


def expected_seconds(placed: Placed) -> float:
    """Of a step or a token on the wall clock, by the placement's model; of a step, with its share of snapshots."""
    config, seconds = placed.config, placed.predicted_seconds
    if not isinstance(config, TrainConfig):
        return seconds
    largest = max(map(state_bytes, placed.parts))
    if config.snapshot_every:
        return seconds + first_cost_seconds(largest) / config.snapshot_every
    return seconds * (1 + share(largest))
