"""When the next snapshot pays: Young's rule (1974), with the failure rate that this job has seen.

    period = sqrt(2 * cost * mean time between losses)

minimises the cost of snapshots plus that of replay after a loss, to first order (Daly 2006 refines it where the cost is not
small beside the mean time between losses; there `OVERHEAD` bounds it). Pure: the lead passes the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

PRIOR_SECONDS = 60.0  # prior of the mean time between losses
LONGEST_SECONDS = 86400.0  # of the mean time between losses: stages report it, and may lie
OVERHEAD = 0.05  # share of the time that snapshots may cost at most
FIRST_COST_SECONDS = 0.2  # prior of the cost, for a small state
# The same for a large one: copied, hashed, written and replicated beside the steps.
SAVED_BYTES_PER_SECOND = 150e6
USUAL_SECONDS = 5.0  # prior of the time until a snapshot is durable
GIVE_UP = 10  # times the usual until a snapshot that is not durable is given up
GIVE_UP_SECONDS = 86400.0  # until it is given up in any case
FORGET = 0.5  # weight of the newest measurement of a snapshot
FORGET_STEP = 0.1  # of a step


def period_seconds(cost_seconds: float, mean_seconds_between_losses: float) -> float:
    """The time from one snapshot to the next."""
    return max(math.sqrt(2.0 * cost_seconds * mean_seconds_between_losses), cost_seconds / OVERHEAD)


def first_cost_seconds(state_bytes: int) -> float:
    """Prior of the delay by a snapshot, for a job whose largest stage has `state_bytes` of state."""
    return max(FIRST_COST_SECONDS, state_bytes / SAVED_BYTES_PER_SECOND)


def share(state_bytes: int) -> float:
    """The predicted share of an undisturbed job's time that snapshots take."""
    cost = first_cost_seconds(state_bytes)
    return cost / period_seconds(cost, PRIOR_SECONDS)


@dataclass(frozen=True, kw_only=True)
class _Durable:
    """The newest durable snapshot, until the step in which it became durable ends: that step is delayed as well."""

    took_seconds: float
    computing_seconds: float
    cost_before_seconds: float  # estimate before this snapshot


@dataclass(frozen=True, kw_only=True)
class SnapshotPeriod:
    """The lead's estimates of the cost of snapshots and the rate of losses. Times are of one monotonic clock."""

    began: float  # losses are counted since then
    taken: float  # when the state of the newest durable snapshot was taken
    losses: int = 0
    cost_seconds: float = FIRST_COST_SECONDS  # delay of the job by a snapshot
    usual_seconds: float = USUAL_SECONDS  # from the request until durable
    patience: float = GIVE_UP  # times the usual that the current one may take
    step_seconds: float | None = None  # of a step without a snapshot under way
    requested: float | None = None  # when the snapshot under way was requested
    delay_seconds: float = 0.0  # of the steps since
    ending: _Durable | None = None  # until the next commit

    def period(self, now: float) -> float:
        """Seconds from one snapshot to the next, as estimated now."""
        between = (max(0.0, now - self.began) + PRIOR_SECONDS) / (self.losses + 1)
        return period_seconds(self.cost_seconds, min(between, LONGEST_SECONDS))

    def due(self, now: float) -> bool:
        """Whether to take a snapshot before the next step; never while one is under way."""
        return self.requested is None and now - self.taken >= self.period(now)

    def overdue(self, now: float) -> bool:
        """Whether the snapshot under way takes so long that it is given up."""
        limit = min(self.patience * self.usual_seconds, GIVE_UP_SECONDS)
        return self.requested is not None and now - self.requested >= limit

    def seconds(self, now: float) -> float:
        """Since the snapshot under way was requested; 0 if none is."""
        return 0.0 if self.requested is None else now - self.requested

    def seen(self, now: float, seconds: float, losses: int) -> SnapshotPeriod:
        """`losses` stages were lost in the last `seconds`."""
        return replace(self, began=now - seconds, losses=losses)

    def restored(self, now: float) -> SnapshotPeriod:
        """All stages have restored the newest snapshot: nothing would be replayed yet."""
        return replace(self, taken=now, requested=None, ending=None)

    def stepped(self, seconds: float) -> SnapshotPeriod:
        """A step took `seconds`, from one commit to the next."""
        if self.requested is not None or self.ending is not None:
            late = 0.0 if self.step_seconds is None else seconds - self.step_seconds
            return replace(self, delay_seconds=self.delay_seconds + late)._counted(None)
        return replace(self, step_seconds=_smooth(self.step_seconds, seconds, FORGET_STEP))

    def request(self, now: float) -> SnapshotPeriod:
        """Called when all stages were sent the order to save their state."""
        return replace(self, requested=now, delay_seconds=0.0, ending=None)

    def give_up(self) -> SnapshotPeriod:
        """The snapshot under way will never be complete."""
        return replace(self, requested=None)

    def give_up_overdue(self) -> SnapshotPeriod:
        """The snapshot under way took too long. The next one gets twice the time: over slow links none would ever be complete in the
        time of this one."""
        return replace(self.give_up(), patience=2 * self.patience)

    def durable(self, now: float, computing_seconds: float) -> SnapshotPeriod:
        """The snapshot under way is durable. `computing_seconds`: the longest that it held up a stage's device, as reported."""
        if self.requested is None:
            return self
        took = max(0.0, now - self.requested)
        usual = max(0.1, _smooth(self.usual_seconds, took))
        durable = replace(self, taken=self.requested, requested=None, usual_seconds=usual, patience=GIVE_UP)
        ending = _Durable(
            took_seconds=took, computing_seconds=computing_seconds, cost_before_seconds=self.cost_seconds
        )
        return replace(durable, ending=ending)._counted(ending)

    def _counted(self, ending: _Durable | None) -> SnapshotPeriod:
        """A copy that includes the cost of the snapshot in `self.ending`, if any, with `ending` in its place."""
        if self.ending is None:
            return replace(self, ending=ending)
        # Saving and sending beside the steps delay the steps; a stall for another reason must not count for more than the
        # snapshot took.
        cost = min(max(self.ending.computing_seconds, self.delay_seconds), self.ending.took_seconds)
        believed = max(1e-4, _smooth(self.ending.cost_before_seconds, cost))
        return replace(self, cost_seconds=believed, ending=ending)


def _smooth(before: float | None, new: float, weight: float = FORGET) -> float:
    return new if before is None else (1.0 - weight) * before + weight * new
