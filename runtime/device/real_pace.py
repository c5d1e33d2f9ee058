"""How much longer the steps of jobs compute than probes of the device say. Pure.

Probes show what a device can do at its best; a step also has to do with caches that others use, a machine that is not always
ours, and operators that are not as the probes. So what was promised of each step is held against what it took, and what a peer says of
its speed is corrected by the median of that, for a while: a job of somebody who wants the peer to look slow must not mark it for good.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

from fusion.dag.cutting.costs import stage_costs
from fusion.dag.cutting.stage import Stage
from fusion.dag.placement.speeds import Speeds, asked

REMEMBERED = 64  # steps
REMEMBERED_SECONDS = 900.0
LEAST_STEPS = 5  # before anything is said; the first ones set things up
LEAST, MOST = 0.5, 3.0


class RealPace:
    """`speeds` are those of the probes; `clock` counts the seconds that the calling thread computes, where there is such a
    clock for the device, else those that pass; `now` those that pass."""

    def __init__(
        self, speeds: Callable[[], Speeds], clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self.clock = clock
        self._now = now
        self._speeds = speeds
        self._seen: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # when, and how much longer

    def promised(self, stage: Stage, sizes: Mapping[str, int]) -> float:
        """Seconds of both passes of one microbatch. Takes a while for a graph of thousands of nodes."""
        forward, backward = asked(stage_costs(stage, sizes))
        return float((forward + backward).sum(axis=1) @ self._speeds().seconds)

    def saw(self, promised_seconds: float, took_seconds: float) -> None:
        """A step of one stage."""
        if promised_seconds > 0.0:
            ratio = min(MOST, max(LEAST, took_seconds / promised_seconds))
            self._seen.append((self._now(), ratio))

    @property
    def factor(self) -> float:
        """By which what probes say is to be multiplied."""
        since = self._now() - REMEMBERED_SECONDS
        ratios = [ratio for at, ratio in self._seen if at >= since]
        return median(ratios) if len(ratios) >= LEAST_STEPS else 1.0
