"""What a job went through so far: owners lost, recoveries, steps discarded and replayed, and the loss of the last steps.

The lead counts and tells everyone with each `begin`; every stage counts the commits and discards that it hears of on
its own copy, and brings it along when it joins. So the counts outlive any lead: the next one takes the highest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fusion.runtime.job.progress import RECENT

Attempt = tuple[int, int]  # (term of the lead, how many it had begun)
NO_ATTEMPT: Attempt = (0, 0)
# Of what is counted. No job gets there, and whoever counts on from what another peer says stays within the 64 bits of a message.
MOST = 1 << 53


@dataclass(frozen=True, kw_only=True)
class RunStatistics:
    """Every number only grows; a step that is committed again comes out as it did before."""

    high: int = 0  # the most steps that were ever committed
    discarded: int = 0  # steps that were begun and not committed
    replayed: int = 0  # steps committed again, after going back to a snapshot
    losses: int = 0  # stages whose owner vanished
    recoveries: int = 0  # times that work went on after it had been interrupted
    last_discard: Attempt = NO_ATTEMPT  # the newest attempt that is among `discarded`
    seconds: float = 0.0  # that the leads so far have watched the job
    recent: tuple[tuple[int, float], ...] = ()  # (step, loss) of the last committed steps, oldest first

    def commit(self, step: int, loss: float | None = None) -> RunStatistics:
        """`loss`: of that step, where we know it; those of later steps are of a time before the job went back, and would leave
        it no room."""
        known = self.before(step).recent
        made = self if loss is None else replace(self, recent=_last({**dict(known), step: loss}))
        if step < self.high:
            return replace(made, replayed=self.replayed + 1)
        return replace(made, high=step + 1)

    def before(self, step: int) -> RunStatistics:
        """With the losses of the steps before that one alone."""
        return replace(self, recent=tuple(pair for pair in self.recent if pair[0] < step))

    def discard(self, attempt: Attempt) -> RunStatistics:
        """An attempt has at most one step that is begun and not committed; telling it twice counts once."""
        if attempt <= self.last_discard:
            return self
        return replace(self, discarded=self.discarded + 1, last_discard=attempt)

    def lose(self) -> RunStatistics:
        return replace(self, losses=self.losses + 1)

    def recover(self) -> RunStatistics:
        return replace(self, recoveries=self.recoveries + 1)

    def merge(self, other: RunStatistics) -> RunStatistics:
        """The highest of both, field by field, and MOST at most."""
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
    """The lead's count of them."""

    statistics: RunStatistics = CLEAN
    broken: bool = False  # work was interrupted and has not gone on yet
    counted: bool = False  # whether the loss of the lead before us needs no counting (any more)

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
        """Work goes on: whoever led before is of no more account."""
        statistics = self.statistics.recover() if self.broken else self.statistics
        return Interruptions(statistics=statistics, counted=True)
