"""When the next snapshot is worth its price: Young's rule (1974), with the failure rate that this job has seen.

    period = sqrt(2 * cost * mean time between losses)

minimises what snapshots cost plus what is replayed after a loss, to first order (Daly 2006 refines it where the cost is
not small beside the mean time between losses: there `OVERHEAD` rules). Pure: the lead tells the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

PRIOR_SECONDS = 60.0  # one loss in so many seconds is believed before anything was seen
# Between two losses that are expected: stages say for how long the job was quiet, and may lie.
LONGEST_SECONDS = 86400.0
OVERHEAD = 0.05  # share of the time that snapshots may cost at most
FIRST_COST_SECONDS = 0.2  # believed before the first was measured, of a small state
# The same, of a large one: copied, hashed, written, and held twice, beside the steps.
SAVED_BYTES_PER_SECOND = 150e6
USUAL_SECONDS = 5.0  # until durable, believed before the first was
GIVE_UP = 10  # times the usual: then a snapshot that is not durable is given up
GIVE_UP_SECONDS = 86400.0  # after which one is in any case, however long those before it took
FORGET = 0.5  # weight of the newest measurement of a snapshot
FORGET_STEP = 0.1  # of a step


def period_seconds(cost_seconds: float, mean_seconds_between_losses: float) -> float:
    """The time from one snapshot to the next."""
    return max(math.sqrt(2.0 * cost_seconds * mean_seconds_between_losses), cost_seconds / OVERHEAD)


def first_cost_seconds(state_bytes: int) -> float:
    """By which the first snapshot is believed to delay a job of whose stages the largest has so much to save."""
    return max(FIRST_COST_SECONDS, state_bytes / SAVED_BYTES_PER_SECOND)


def share(state_bytes: int) -> float:
    """Of the time of a job that is undisturbed, how much its snapshots are believed to take."""
    cost = first_cost_seconds(state_bytes)
    return cost / period_seconds(cost, PRIOR_SECONDS)


@dataclass(frozen=True, kw_only=True)
class _Durable:
    """The newest snapshot that is held twice, until the step that it became so in has ended: that one is late as well."""

    took_seconds: float
    computing_seconds: float
    cost_before_seconds: float  # as it was believed before this snapshot


@dataclass(frozen=True, kw_only=True)
class SnapshotPeriod:
    """The lead's books of what snapshots cost and how often stages are lost. Times are of one monotonic clock."""

    began: float  # since when the losses are counted
    taken: float  # when the state of the newest durable snapshot was taken
    losses: int = 0
    cost_seconds: float = FIRST_COST_SECONDS  # by which a snapshot delays the job
    usual_seconds: float = USUAL_SECONDS  # from asking for one until it is durable
    patience: float = GIVE_UP  # times the usual that the one under way may take
    step_seconds: float | None = None  # a step while no snapshot is under way
    asked: float | None = None  # when the snapshot that is under way was asked for
    delay_seconds: float = 0.0  # by which steps have been late since
    ending: _Durable | None = None  # until the next commit

    def period(self, now: float) -> float:
        """Seconds from one snapshot to the next, by what was seen until now."""
        between = (max(0.0, now - self.began) + PRIOR_SECONDS) / (self.losses + 1)
        return period_seconds(self.cost_seconds, min(between, LONGEST_SECONDS))

    def due(self, now: float) -> bool:
        """Whether the next step should be preceded by a snapshot: never while one is under way."""
        return self.asked is None and now - self.taken >= self.period(now)

    def overdue(self, now: float) -> bool:
        """Whether the snapshot under way takes so long that it had better be given up."""
        limit = min(self.patience * self.usual_seconds, GIVE_UP_SECONDS)
        return self.asked is not None and now - self.asked >= limit

    def seen(self, now: float, seconds: float, losses: int) -> SnapshotPeriod:
        """So many stages were lost in the last so many seconds."""
        return replace(self, began=now - seconds, losses=losses)

    def restored(self, now: float) -> SnapshotPeriod:
        """Everybody is back at the newest snapshot: nothing can be lost yet."""
        return replace(self, taken=now, asked=None, ending=None)

    def stepped(self, seconds: float) -> SnapshotPeriod:
        """A step took so long, from one commit to the next."""
        if self.asked is not None or self.ending is not None:
            late = 0.0 if self.step_seconds is None else seconds - self.step_seconds
            return replace(self, delay_seconds=self.delay_seconds + late)._counted(None)
        return replace(self, step_seconds=_smooth(self.step_seconds, seconds, FORGET_STEP))

    def ask(self, now: float) -> SnapshotPeriod:
        """All stages were told to save their state."""
        return replace(self, asked=now, delay_seconds=0.0, ending=None)

    def give_up(self) -> SnapshotPeriod:
        """The snapshot under way will never be whole."""
        return replace(self, asked=None)

    def give_up_overdue(self) -> SnapshotPeriod:
        """The snapshot under way took too long. The next one gets twice the time: over links that have become slow, or are slower than
        was believed, none would ever be whole in the time of this one."""
        return replace(self.give_up(), patience=2 * self.patience)

    def durable(self, now: float, computing_seconds: float) -> SnapshotPeriod:
        """It is whole, and held twice; `computing_seconds`: the longest that it kept a stage's device busy, as the stages say."""
        if self.asked is None:
            return self
        took = max(0.0, now - self.asked)
        usual = max(0.1, _smooth(self.usual_seconds, took))
        durable = replace(self, taken=self.asked, asked=None, usual_seconds=usual, patience=GIVE_UP)
        ending = _Durable(
            took_seconds=took, computing_seconds=computing_seconds, cost_before_seconds=self.cost_seconds
        )
        return replace(durable, ending=ending)._counted(ending)

    def _counted(self, ending: _Durable | None) -> SnapshotPeriod:
        """With the cost of the snapshot that is ending as far as it is known, and from now on with `ending`."""
        if self.ending is None:
            return replace(self, ending=ending)
        # What saving and sending beside the steps cost shows in the steps; a stall for another reason must not count
        # as more than the time that the snapshot took.
        cost = min(max(self.ending.computing_seconds, self.delay_seconds), self.ending.took_seconds)
        believed = max(1e-4, _smooth(self.ending.cost_before_seconds, cost))
        return replace(self, cost_seconds=believed, ending=ending)


def _smooth(before: float | None, new: float, weight: float = FORGET) -> float:
    return new if before is None else (1.0 - weight) * before + weight * new
