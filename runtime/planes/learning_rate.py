"""The learning rate and the clip factor of each step, which the lead decides. Pure."""

from __future__ import annotations

import math

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import OptimizerConfig

SKIPPED = 0.0  # the clip factor of a step in which a gradient in float16 has overflowed: nothing is applied
MAX_SKIPPED = 24  # in a row: then the largest loss scale has become 1


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of update number `step` (0 .. steps - 1) of a job of `steps` updates.

    Warm-up rises linearly and reaches `config.learning_rate` at update `warmup_steps`; linear and cosine then fall
    to `final_ratio` of it at the last update.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    if config.schedule == "linear":
        return peak * (1.0 - (1.0 - config.final_ratio) * progress)
    if config.schedule == "cosine":
        fall = 0.5 * (1.0 + math.cos(math.pi * progress))
        return peak * (config.final_ratio + (1.0 - config.final_ratio) * fall)
    raise JobError(f'optimizer.schedule: "constant", "linear" or "cosine", not "{config.schedule}"')


def clip_factor(config: OptimizerConfig, squared_norm: float) -> float:
    """The factor for gradients of this global squared norm, as in torch's clip_grad_norm_; 1.0 without clipping."""
    if config.clip_norm is None:
        return 1.0
    return min(1.0, config.clip_norm / (math.sqrt(squared_norm) + 1e-6))
