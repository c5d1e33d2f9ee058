"""The speed of a job, by the times of the last committed steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fusion.runtime.job.manifest import TrainConfig

SPEED_STEPS = 8  # over which the speed is averaged
PACE_STEPS = 2  # committed in a row before the pace is known


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The current speed of a job."""

    step_seconds: float  # of the last step, or of the running one once that takes longer
    compute_seconds: tuple[float, ...]  # of each stage for one microbatch, median of the last steps
    steps_left: int


class StepTimes:
    """`clock` returns seconds."""

    def __init__(self, config: TrainConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._times: deque[float] = deque(maxlen=SPEED_STEPS + 1)
        self._computed: deque[tuple[float, ...]] = deque(maxlen=SPEED_STEPS)  # as `Pace.compute_seconds`

    def begin(self) -> None:
        """An attempt begins: earlier times no longer apply."""
        self._times.clear()
        self._times.append(self._clock())
        self._computed.clear()

    def committed(self, busy: Sequence[float]) -> float:
        """A step was committed. Returns its seconds. `busy`: the share of them that each stage computed, as reported."""
        self._times.append(self._clock())
        took = self._times[-1] - self._times[-2]
        self._computed.append(tuple(_share(b) * took / self._config.microbatches for b in busy))
        return took

    @property
    def tokens_per_second(self) -> float:
        config, seconds = self._config, self._times[-1] - self._times[0]
        tokens = config.microbatches * config.microbatch_size * max(1, config.sequence)
        return tokens * (len(self._times) - 1) / seconds if seconds > 0 else 0.0

    def pace(self, step: int) -> Pace | None:
        """The pace after `step` committed steps; None before PACE_STEPS were committed in a row."""
        if len(self._computed) < PACE_STEPS:
            return None
        return Pace(
            step_seconds=max(self._times[-1] - self._times[-2], self._clock() - self._times[-1]),
            compute_seconds=tuple(median(of_stage) for of_stage in zip(*self._computed, strict=True)),
            steps_left=self._config.steps - step,
        )


def _share(reported: float) -> float:
    """A share reported by another peer; 0 where it is none."""
    return reported if 0 <= reported <= 1 else 0.0
