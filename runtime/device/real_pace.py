"""The speeds of the device in real steps, against those that probes measured, for each kind of work. Pure.

Probes measure a device at its best; a real step shares caches and the machine with other work, and has other operators than the
probes. So the predicted time of each step is compared with its measured time, and the speeds that a peer announces are corrected by
the ratio, for REMEMBERED_SECONDS: a job that is made to look slow must not mark the peer for good.

A step's time is a sum over kinds of work (`fusion.dag.placement.speeds`), so one stage alone does not show which of them took longer.
The correction factors have a normal prior around one, half of whose variance all kinds have in common, and their posterior mean is
used (a Gaussian linear model: Bishop 2006, Pattern Recognition and Machine Learning, section 3.3): a machine that is slow for
transformers is assumed to be half as slow for convolutions until some have run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from math import inf
from statistics import median

import numpy as np

from fusion.dag.cutting.costs import stage_costs
from fusion.dag.cutting.stage import Stage
from fusion.dag.placement.speeds import KINDS, Rows, Speeds, demands

Work = Rows  # (KINDS,)

REMEMBERED = 64  # steps
REMEMBERED_SECONDS = 900.0
LEAST_STEPS = 5  # of a stage, before it counts; the first ones include set-up
LEAST, MOST = 0.5, 3.0  # bounds of the factors
COMMON = 0.5  # of the variance of the kinds' factors
NOISE = 0.03  # variance of a stage's measurement, over that of the factors; less where it ran more steps


class RealPace:
    """`probed`: the speeds of the probes; `clock`: computing seconds of the calling thread, where the device has such a clock, else
    wall-clock seconds; `now`: wall-clock seconds."""

    def __init__(
        self, probed: Callable[[], Speeds], clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self.clock = clock
        self._now = now
        self._probed = probed
        # (time, the work of each kind, seconds)
        self._steps: deque[tuple[float, tuple[float, ...], float]] = deque(maxlen=REMEMBERED)

    @staticmethod
    def work(stage: Stage, sizes: Mapping[str, int]) -> Work:
        """The work of both passes of one microbatch. Takes a while for a graph of thousands of nodes."""
        forward, backward = demands(stage_costs(stage, sizes))
        total: Work = (forward + backward).sum(axis=1)
        return total

    def record(self, work: Work, seconds: float) -> None:
        """Record a step of one stage. `work`: of all its microbatches."""
        if work.any():
            self._steps.append((self._now(), tuple(work.tolist()), seconds))

    @property
    def speeds(self) -> Speeds:
        """The speeds corrected by steps; at first, those of the probes."""
        probed = self._probed()
        return Speeds.of([float(part) for part in self._factors(probed) * probed.parts])

    def _factors(self, probed: Speeds) -> Rows:
        """(KINDS + 1,) factors of the probed speeds; the last is for updates, which steps do not measure."""
        since = self._now() - REMEMBERED_SECONDS
        steps = defaultdict[tuple[float, ...], list[float]](list)
        for time, work, seconds in self._steps:
            if time >= since:
                steps[work].append(seconds)
        shares, ratios, counts = list[Rows](), list[float](), list[int]()
        for work, times in steps.items():
            predicted = np.array(work) * probed.seconds
            if len(times) >= LEAST_STEPS and 0.0 < predicted.sum() < inf:
                shares.append(np.append(predicted / predicted.sum(), 0.0))
                ratios.append(min(MOST, max(LEAST, median(times) / predicted.sum())))
                counts.append(len(times))
        if not shares:
            return np.ones(KINDS + 1)
        rows = np.array(shares)
        prior = COMMON + (1 - COMMON) * np.eye(KINDS + 1)
        noise = np.diag(NOISE * np.mean(counts) / np.array(counts))
        gain = np.linalg.solve(rows @ prior @ rows.T + noise, np.array(ratios) - 1)
        factors: Rows = np.clip(1 + prior @ rows.T @ gain, LEAST, MOST)
        return factors
