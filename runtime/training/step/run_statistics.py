"""Statistics of a job so far: owners lost, recoveries, steps discarded and replayed, and the losses of the last steps.

The lead counts, and sends its counts with each `begin`. Every stage counts the commits and discards that it receives on its
own copy, and sends that when it joins. So the counts outlive any lead: the next one takes the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusion.runtime.job.progress import RECENT

Attempt = tuple[int, int]  # (term of the lead, how many it had begun)
NO_ATTEMPT: Attempt = (0, 0)
# Of each count. No job gets there, and counting on from another peer's number stays within the 64 bits of a message.
MOST = 1 << 53


@dataclass(frozen=True, kw_only=True)
class RunStatistics:
    """All counts only grow. A step that is committed again has the same loss as before."""

    high: int = 0  # the most steps ever committed
    discarded: int = 0  # steps that were begun and not committed
    replayed: int = 0  # steps committed again after a restore
    losses: int = 0  # stages whose owner vanished
    recoveries: int = 0  # times that steps resumed after an interruption
    last_discard: Attempt = NO_ATTEMPT  # the newest attempt counted in `discarded`
    seconds: float = 0.0  # that leads have run the job for
    recent: tuple[tuple[int, float], ...] = ()  # (step, loss) of the last committed steps, oldest first

    def commit(self, step: int, loss: float | None = None) -> RunStatistics:
        """`step` was committed, with `loss` where it is known. Losses of later steps, from before a restore, are dropped: they
        would leave it no room."""
        known = self.before(step).recent
        updated = self if loss is None else replace(self, recent=_last({**dict(known), step: loss}))
        if step < self.high:
            return replace(updated, replayed=self.replayed + 1)
        return replace(updated, high=step + 1)

    def before(self, step: int) -> RunStatistics:
        """A copy without the losses of `step` and later ones."""
        return replace(self, recent=tuple(pair for pair in self.recent if pair[0] < step))

    def discard(self, attempt: Attempt) -> RunStatistics:
        """`attempt` was discarded, and with it the one step that it had begun and not committed. A duplicate counts once."""
        if attempt <= self.last_discard:
            return self
        return replace(self, discarded=self.discarded + 1, last_discard=attempt)

    def lose(self) -> RunStatistics:
        return replace(self, losses=self.losses + 1)

    def recover(self) -> RunStatistics:
        return replace(self, recoveries=self.recoveries + 1)

    def merge(self, other: RunStatistics) -> RunStatistics:
        """The maximum of both, field by field, and MOST at most."""
        return RunStatistics(
            high=min(MOST, max(self.high, other.high)),
            discarded=min(MOST, max(self.discarded, other.discarded)),
            replayed=min(MOST, max(self.replayed, other.replayed)),
            losses=min(MOST, max(self.losses, other.losses)),
            recoveries=min(MOST, max(self.recoveries, other.recoveries)),
            last_discard=max(self.last_discard, other.last_discard),
            seconds=min(float(MOST), max(self.seconds, other.seconds)),
            recent=_last(dict(sorted({*self.recent, *other.recent}))),
        )


def _last(losses: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(losses.items())[-RECENT:])


CLEAN = RunStatistics()


@dataclass(frozen=True, kw_only=True)
class Interruptions:
    """The lead's count of losses and recoveries."""

    statistics: RunStatistics = CLEAN
    broken: bool = False  # interrupted, and not resumed yet
    counted: bool = False  # the loss of the previous lead is counted, or there was none

    def lose(self) -> Interruptions:
        """The owner of a stage vanished."""
        return replace(self, statistics=self.statistics.lose(), broken=True)

    def lose_lead(self) -> Interruptions:
        return self if self.counted else replace(self.lose(), counted=True)

    def discard(self, attempt: Attempt) -> Interruptions:
        return replace(self, statistics=self.statistics.discard(attempt))

    def merge(self, other: RunStatistics) -> Interruptions:
        return replace(self, statistics=self.statistics.merge(other))

    def recover(self) -> Interruptions:
        """Steps have resumed: the loss of the previous lead is settled."""
        statistics = self.statistics.recover() if self.broken else self.statistics
        return Interruptions(statistics=statistics, counted=True)
