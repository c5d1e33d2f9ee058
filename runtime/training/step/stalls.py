"""Stalled steps: when a stage reports one, and which owner is replaced. Pure.

A stage with nothing to compute knows which other stage it waits for, and reports that to the lead once its `StallClock`
runs out. The owner of a stage that others wait for, and that itself waits for none, holds the step up. Where all report that
they wait, two reports contradict each other: one of the two owners is replaced first, and if the step stalls again, the
other. So a false report moves the reporter's own stage, or once that of a neighbour.

An owner that sends a little now and then lets no step stall. So the time that steps take beyond several usual ones adds up, and
drains while they take less; once it is several times as long as a step may stall, the step counts as stalled whatever progress it makes.

A suspended machine, a compiling call and a slow link look the same from outside, so the clock allows far more than an
honest peer usually takes (`StallClock.patience`), and the lead replaces no owner without a ready standby.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median

LEAD = -1  # in place of a stage that is waited for: a message of the lead, not a tensor of its stage

# Within a step a stage waits for parts of it, which never take as long as several whole steps.
USUAL_STEPS = 4.0
# Times `least_seconds` before any step was timed: planes compile in the first one
UNKNOWN_PACE = 3.0
REMEMBERED = 8  # steps of which the median is taken
PACED = 32  # steps of which the mean is taken
SLOW_LINK_BYTES_PER_SECOND = (
    125e3  # for the largest tensor that a stage waits for, and for copies of snapshots
)
SLOW_DISK_BYTES_PER_SECOND = 20e6  # for a snapshot: others wait meanwhile
RESTORING_BYTES_PER_SECOND = 1e6  # for the state of a stage, from several peers, before a step can begin

# Times its patience: until then the lead acts only if every other stage reports that it waits. Two may be silent.
UNANIMOUS = 2.0
# Times its patience that steps may take in all beyond the usual
LOST_STALLS = 4.0
LEAD_STALLS = 3.0  # times its patience before the lead itself is suspected: it may be waiting for slow stages


@dataclass(frozen=True, kw_only=True)
class StallClock:
    """How long the step has made no progress at one stage. Times are seconds of one clock."""

    least_seconds: float
    since: float  # last progress
    tensor_bytes: int = 0  # the largest tensor that the stage may wait for
    state_bytes: int = 0  # the largest state of any stage
    mark: Hashable = None  # changes with every progress
    began: float | None = None  # the commit before the running step; None where its duration is not usual
    steps: tuple[float, ...] = ()  # durations of the last steps, in seconds
    paced: tuple[float, ...] = ()  # those since the attempt began, at most PACED
    pace: float = inf  # the least mean of PACED steps in a row since then
    lost: float = 0.0  # seconds since then beyond USUAL_STEPS times the pace

    def see(self, now: float, mark: Hashable, *, busy: bool) -> StallClock:
        """Note progress: `mark` has changed, or the stage is `busy` computing."""
        if mark == self.mark and not busy:
            return self
        return replace(self, mark=mark, since=now)

    def begin(self) -> StallClock:
        """An attempt begins, perhaps of other owners. The duration of its first step is not counted."""
        return replace(self, began=None, paced=(), pace=inf, lost=0.0)

    def commit(self, now: float, *, evaluates: bool = False) -> StallClock:
        """A step was committed, and the next one begins; it may `evaluate` the model first."""
        following = None if evaluates else now
        if self.began is None:
            return replace(self, began=following)
        steps, paced = (*self.steps, now - self.began)[-REMEMBERED:], (*self.paced, now - self.began)[-PACED:]
        pace = min(self.pace, fmean(paced)) if len(paced) == PACED else self.pace
        return replace(
            self, began=following, steps=steps, paced=paced, pace=pace, lost=max(0.0, self.lost_until(now))
        )

    def lost_until(self, now: float) -> float:
        """Seconds that the steps of this attempt have taken beyond the usual, the running one included."""
        running = 0.0 if self.began is None else now - self.began
        return self.lost + running - USUAL_STEPS * self.pace if self.pace < inf else 0.0

    def patience(self, *, running: bool) -> float:
        """Seconds without progress before the step counts as stalled. `running`: a step is; else a state may have to be fetched."""
        usual = median(self.steps) if self.steps else UNKNOWN_PACE / USUAL_STEPS * self.least_seconds
        state = self.state_bytes / RESTORING_BYTES_PER_SECOND
        return max(self._step_patience(usual), 0.0 if running else state)

    def _step_patience(self, usual: float) -> float:
        """Seconds without progress in a step, where steps usually take `usual` seconds."""
        link = self.tensor_bytes / SLOW_LINK_BYTES_PER_SECOND
        state = self.state_bytes / SLOW_DISK_BYTES_PER_SECOND
        return max(self.least_seconds, USUAL_STEPS * usual, link, state)

    @property
    def snapshot_patience(self) -> float:
        """Seconds in which every stage saves its shard and another one has fetched it, over a slow link."""
        return max(self.least_seconds, self.state_bytes / SLOW_LINK_BYTES_PER_SECOND)

    def stands_still(self, now: float, *, running: bool, times: float = 1.0) -> bool:
        patience = times * self.patience(running=running)
        return now - self.since >= patience or (running and self.drags_on(now, times=times))

    def drags_on(self, now: float, *, times: float = 1.0) -> bool:
        """Whether steps take far longer than usual, though they make progress."""
        if self.began is None or self.pace == inf:
            return False
        return self.lost_until(now) >= LOST_STALLS * times * self._step_patience(self.pace)


def culprits(
    stages: int,
    waits: Mapping[int, int],
    needed: Collection[int],
    moved: Collection[int] = (),
    *,
    unanimous: bool = True,
) -> tuple[int, ...]:
    """Stages of which one owner is to be replaced, in order of suspicion; empty while some stage may still be computing.

    `waits`: stage -> the stage that it reports to wait for, the lead's own stage 0 included. `needed`: stages that the lead waits
    for. `moved`: stages whose owner was replaced at this step already. `unanimous`: only if every other stage reports that it
    waits.
    """
    # A report of waiting for the lead is void where the lead still waits for that stage.
    waiting = {
        stage: other
        for stage, other in waits.items()
        if other != stage and (other != LEAD or stage not in needed)
    }
    named = {other for other in waiting.values() if other > 0} | {stage for stage in needed if stage > 0}
    silent = [stage for stage in range(1, stages) if stage not in waiting]
    guilty = [stage for stage in silent if stage in named]
    if guilty:
        return () if unanimous and len(silent) > 1 else tuple(guilty)
    path: list[int] = []
    at = min((stage for stage, other in waiting.items() if other != LEAD), default=LEAD)
    while at in waiting and at not in path:
        path.append(at)
        at = waiting[at]
    # They wait for each other in a cycle; or the last one reports that it has sent everything, and the one before denies it.
    contrary = path[path.index(at) :] if at in path else path[-2:]
    order = sorted(contrary, key=lambda stage: (stage in moved, -path.index(stage)))
    return tuple(order) if len(order) > 1 else ()
