"""The calls of one stage on its device: run on the device's thread, timed, and bounded by the graph's estimate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from fusion.runtime.device.overrun import Overrun, call_seconds
from fusion.runtime.device.real_pace import RealPace, Work
from fusion.runtime.job.worker import Worker
from fusion.runtime.training.compute.inbox import StagePlan

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Spent:
    """Readings of the clocks, in seconds."""

    at: float
    busy: float  # of the device's thread
    computed: float  # by the clock of `RealPace`


class DeviceCalls:
    """`clock` returns monotonic seconds, on any thread. `flops_per_second`: measured speed of the device; 0: calls are not bounded.
    `pace` records how long the calls of a step took."""

    def __init__(
        self,
        plan: StagePlan,
        worker: Worker,
        clock: Callable[[], float] = time.monotonic,
        flops_per_second: float = 0.0,
        pace: RealPace | None = None,
    ) -> None:
        self.worker = worker
        self.ended = 0  # calls
        self._plan = plan
        self._clock = clock
        self._flops_per_second = flops_per_second
        self._pace = pace
        self._under_way = 0  # calls that run or wait for the device
        # Used by the worker thread only. The last two are created in the first call, as that takes a while.
        self._busy = self._computed = 0.0
        self._overrun: Overrun | None = None
        self._work: Work | None = None  # of a microbatch

    @property
    def waiting(self) -> bool:
        """Whether a call runs, or waits for the device."""
        return self._under_way > 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises what the function raises, and RuntimeError once calls overrun the graph's estimate."""

        def timed() -> T:
            began, computed = self._clock(), self._pace.clock() if self._pace else 0.0
            try:
                result = function(*args, **kwargs)
            finally:
                seconds = self._clock() - began
                self._busy += seconds
            if self._pace is not None:
                self._computed += self._pace.clock() - computed
                if self._work is None:
                    self._work = self._pace.work(self._plan.stage, self._plan.sizes)
            self._hold_to_estimate(seconds)
            return result

        self._under_way += 1
        try:
            return await self.worker.run(timed)
        finally:
            self._under_way -= 1
            self.ended += 1

    def spent(self) -> Spent:
        """The readings now."""
        return Spent(self._clock(), self._busy, self._computed)

    def busy_share(self, since: Spent) -> float:
        """The share of the time since `since` that the device computed for this stage."""
        return min(1.0, (self._busy - since.busy) / max(1e-9, self._clock() - since.at))

    def report_pace(self, since: Spent, microbatches: int) -> None:
        """Record that `microbatches` were computed since `since`."""
        if self._pace is not None and self._work is not None:
            self._pace.record(microbatches * self._work, self._computed - since.computed)

    def _hold_to_estimate(self, seconds: float) -> None:
        if self._flops_per_second <= 0.0:
            return
        if self._overrun is None:
            promised = call_seconds(self._plan.stage, self._plan.sizes, self._flops_per_second)
            self._overrun = Overrun(promised)
        if self._overrun.took(seconds):
            promised = self._overrun.estimate_seconds
            raise RuntimeError(f"calls take {seconds:.1f} s: the graph promises {promised:.3f} s")
