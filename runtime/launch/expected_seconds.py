"""How long a step, or a token, will take for whoever waits for it."""

from __future__ import annotations

from fusion.runtime.job.manifest import TrainConfig
from fusion.runtime.placing.placed_job import Placed
from fusion.runtime.training.lead.tuning import state_bytes
from fusion.runtime.training.snapshots.snapshot_period import first_cost_seconds, share


def expected_seconds(placed: Placed) -> float:
    """As the placement has it; of training, snapshots take their share."""
    config, seconds = placed.config, placed.predicted_seconds
    if not isinstance(config, TrainConfig):
        return seconds
    largest = max(map(state_bytes, placed.parts))
    if config.snapshot_every:
        return seconds + first_cost_seconds(largest) / config.snapshot_every
    return seconds * (1 + share(largest))
