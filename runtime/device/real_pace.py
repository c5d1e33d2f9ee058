"""How much longer the steps of jobs compute than probes of the device say, kind by kind of what they ask for. Pure.

Probes show what a device can do at its best; a step also has to do with caches that others use, a machine that is not always
ours, and operators that are not as the probes. So what was promised of each step is held against what it took, and what a peer says of
its speeds is corrected by that, for a while: a job of somebody who wants the peer to look slow must not mark it for good.

A step's time is a sum over kinds (`fusion.dag.placement.speeds`), so one stage alone does not tell which of them took longer. Factors are
taken to be drawn from a normal distribution around one, half of whose variance all kinds have in common, and their posterior mean is
what counts (a Gaussian linear model: Bishop 2006, Pattern Recognition and Machine Learning, section 3.3): a machine that is slow for
transformers is thought to be half as slow for convolutions until some have run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from math import inf
from statistics import median

import numpy as np

from fusion.dag.cutting.costs import stage_costs
from fusion.dag.cutting.stage import Stage
from fusion.dag.placement.speeds import KINDS, Rows, Speeds, asked

Asks = Rows  # (KINDS,)

REMEMBERED = 64  # steps
REMEMBERED_SECONDS = 900.0
LEAST_STEPS = 5  # of a stage, before it says anything; the first ones set things up
LEAST, MOST = 0.5, 3.0  # times what probes say
COMMON = 0.5  # of the variance of the kinds' factors
NOISE = 0.03  # variance of what a stage shows, over that of the factors; less where it ran more steps


class RealPace:
    """`probed`: the speeds of the probes; `clock` counts the seconds that the calling thread computes, where there is such a
    clock for the device, else those that pass; `now` those that pass."""

    def __init__(
        self, probed: Callable[[], Speeds], clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self.clock = clock
        self._now = now
        self._probed = probed
        # When, what was asked for of each kind, and seconds.
        self._seen: deque[tuple[float, tuple[float, ...], float]] = deque(maxlen=REMEMBERED)

    @staticmethod
    def asks(stage: Stage, sizes: Mapping[str, int]) -> Asks:
        """Of both passes of one microbatch. Takes a while for a graph of thousands of nodes."""
        forward, backward = asked(stage_costs(stage, sizes))
        found: Asks = (forward + backward).sum(axis=1)
        return found

    def saw(self, asks: Asks, took_seconds: float) -> None:
        """A step of one stage. `asks`: of all its microbatches."""
        if asks.any():
            self._seen.append((self._now(), tuple(asks.tolist()), took_seconds))

    @property
    def speeds(self) -> Speeds:
        """As steps have shown them to be; at first, what probes reach."""
        probed = self._probed()
        return Speeds.of([float(part) for part in self._factors(probed) * probed.parts])

    def _factors(self, probed: Speeds) -> Rows:
        """(KINDS + 1,) by which what probes say is to be multiplied; the last for updates, which no step has told us of."""
        since = self._now() - REMEMBERED_SECONDS
        steps = defaultdict[tuple[float, ...], list[float]](list)
        for at, asks, took in self._seen:
            if at >= since:
                steps[asks].append(took)
        shares, ratios, counts = list[Rows](), list[float](), list[int]()
        for asks, times in steps.items():
            promised = np.array(asks) * probed.seconds
            if len(times) >= LEAST_STEPS and 0.0 < promised.sum() < inf:
                shares.append(np.append(promised / promised.sum(), 0.0))
                ratios.append(min(MOST, max(LEAST, median(times) / promised.sum())))
                counts.append(len(times))
        if not shares:
            return np.ones(KINDS + 1)
        rows = np.array(shares)
        prior = COMMON + (1 - COMMON) * np.eye(KINDS + 1)
        noise = np.diag(NOISE * np.mean(counts) / np.array(counts))
        gain = np.linalg.solve(rows @ prior @ rows.T + noise, np.array(ratios) - 1)
        factors: Rows = np.clip(1 + prior @ rows.T @ gain, LEAST, MOST)
        return factors
