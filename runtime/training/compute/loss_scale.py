"""Dynamic loss scaling for training in float16 (Micikevicius et al., arXiv 1710.03740, section 3.2; PyTorch's GradScaler).

Float16 has few exponents: small gradients would underflow. So the loss's gradient is multiplied by a power of two, the scale, and
the update divides by it. A step whose gradients overflow is committed with a clip factor of 0: it changes nothing but the scale,
which is halved. After GROWTH_STEPS without overflow it is doubled. The scale is a function of the applied commits, so all stages
have the same one without communication, and it is part of the state in snapshots and handovers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fusion.dag.cutting.stage import Stage
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.learning_rate import MAX_SKIPPED, SKIPPED
from fusion.runtime.planes.plane import RngKey, Tensors, TrainingStage

LOSS_SCALE = "loss_scale"  # in a stage's state: the scale, and the steps since it changed; float64
FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**MAX_SKIPPED
GROWTH_STEPS = 1000  # without overflow, until a larger one is tried


def scale_state(scale: float = FIRST, good: int = 0) -> torch.Tensor:
    """A scale as in a stage's state. `good`: steps since it changed."""
    return torch.tensor([scale, float(good)], dtype=torch.float64)


def scale_of(stage: TrainingStage) -> float:
    """The current factor of the stage's gradients."""
    return stage.scale if isinstance(stage, LossScaled) else 1.0


def skips(stage: TrainingStage, clip_factor: float) -> bool:
    """Whether `apply` with that factor changes no weight, since gradients of some stage have overflowed."""
    return isinstance(stage, LossScaled) and clip_factor == SKIPPED


class LossScaled:
    """Wraps a training stage of any plane and scales its gradients. Only gradients between stages and those of tied variables are
    visible scaled. The scale is a power of two, so scaling itself does not round."""

    def __init__(self, inner: TrainingStage) -> None:
        self._inner = inner
        self._scale, self._good = FIRST, 0
        self.stage: Stage = inner.stage

    @property
    def scale(self) -> float:
        return self._scale

    def forward(self, microbatch: int, inputs: Tensors, rng: RngKey) -> dict[str, torch.Tensor]:
        return self._inner.forward(microbatch, inputs, rng)

    def backward(self, microbatch: int, gradients: Tensors, loss_scale: float) -> dict[str, torch.Tensor]:
        return self._inner.backward(microbatch, gradients, loss_scale * self._scale)

    def evaluate(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        return self._inner.evaluate(inputs)

    def gradients(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        return self._inner.gradients(names)

    def set_gradients(self, gradients: Tensors) -> None:
        self._inner.set_gradients(gradients)

    def squared_norm(self, skip: frozenset[str] = frozenset()) -> float:
        """The squared norm of the unscaled gradients. Infinite where they overflowed and a smaller scale may help, NaN where none is
        left."""
        norm = self._inner.squared_norm(skip) / self._scale**2
        if math.isfinite(norm):
            return norm
        return math.inf if self._scale > LEAST else math.nan

    def apply(self, learning_rate: float, clip_factor: float) -> None:
        if clip_factor == SKIPPED:
            self._inner.discard()
            self._scale, self._good = max(LEAST, self._scale / 2), 0
            return
        self._inner.apply(learning_rate, clip_factor / self._scale)
        self._good += 1
        if self._good >= GROWTH_STEPS:
            self._scale, self._good = min(MOST, self._scale * 2), 0

    def discard(self) -> None:
        self._inner.discard()

    def state(self) -> dict[str, torch.Tensor]:
        return {**self._inner.state(), LOSS_SCALE: scale_state(self._scale, self._good)}

    def load_state(self, state: Tensors) -> None:
        """Raises JobError for a state without a scale, or with an impossible one."""
        stored = state.get(LOSS_SCALE)
        if stored is None or stored.shape != (2,):
            raise JobError("a state of training in float16 has a loss scale, and this one has none")
        scale, good = (float(number) for number in stored)
        whole = LEAST <= scale <= MOST and math.frexp(scale)[0] == 0.5  # NaN is in no range
        if not (whole and 0 <= good < GROWTH_STEPS and good == int(good)):
            raise JobError(f"a loss scale of {scale:g} after {good:g} steps cannot be")
        self._inner.load_state({key: value for key, value in state.items() if key != LOSS_SCALE})
        self._scale, self._good = scale, int(good)
