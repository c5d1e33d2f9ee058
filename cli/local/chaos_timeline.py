"""The history of a job from the reports of its leads: attempts, commits, recoveries, stalls. Pure.

A lead tells its progress at each change (`fusion.cli.local.chaos_trace`), and every owner how the job ended. An attempt begins with a step that is not yet
committed, so its first report is no commit; each further one with a higher step is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Attempt:
    at: float  # unix seconds
    lead: str  # the fleet's name of the peer
    count: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Commit:
    at: float
    step: int  # the state is of this step from now on
    attempt: Attempt


@dataclass(kw_only=True)
class Timeline:
    """Of one job. `see` takes the events in the order in which they arrive."""

    job: str
    attempts: list[Attempt] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    snapshots: dict[int, str] = field(default_factory=dict)  # step -> index
    messages: list[tuple[float, str, str]] = field(default_factory=list)  # (time, lead, what it waits for)
    last: dict[str, Any] = field(default_factory=dict)  # the newest progress
    ended_at: float | None = None
    _open: dict[str, tuple[Attempt, int]] = field(default_factory=dict)  # lead -> its attempt, and how far

    def see(self, lead: str, record: Record) -> bool:
        """Take an object that a peer printed. Whether it was about this job."""
        if record.get("event") != "step" or record.get("job") != self.job:
            return False
        at, step, count = float(record["at"]), int(record["step"]), int(record["attempts"])
        ended = record.get("state") in ("done", "stopped", "failed")
        if ended and lead not in self._open:
            pass  # it has only learned of the end
        elif count > 0:
            attempt, reached = self._open.get(lead, (None, 0))
            if attempt is None or attempt.count != count:
                attempt, reached = Attempt(at=at, lead=lead, count=count, step=step), step
                self.attempts.append(attempt)
            elif step > reached:
                self.commits.append(Commit(at=at, step=step, attempt=attempt))
            self._open[lead] = (attempt, step)
        else:  # it has only just taken the lead, perhaps not for the first time
            self._open.pop(lead, None)
        if record.get("snapshot"):
            self.snapshots[int(record["snapshot_step"])] = str(record["snapshot"])
        message = str(record.get("message") or "")
        if message and (not self.messages or self.messages[-1][1:] != (lead, message)):
            self.messages.append((at, lead, message))
        if self.ended_at is None:  # reports after the end repeat it
            self.last = dict(record)
            if ended:
                self.ended_at = at
                self.messages.append(
                    (at, lead, f"{record['state']} at step {step}: {record.get('error') or '-'}")
                )
        return True

    @property
    def step(self) -> int:
        """The highest committed step."""
        return max((commit.step for commit in self.commits), default=0)

    @property
    def lead(self) -> str | None:
        return self.attempts[-1].lead if self.attempts else None

    @property
    def owners(self) -> tuple[str | None, ...]:
        """Peer id of each stage's owner, as the newest lead knows them."""
        return tuple(self.last.get("owners") or ())

    @property
    def discarded(self) -> int:
        """Steps that were under way in vain: each attempt but the last ended in the middle of one."""
        return max(0, len(self.attempts) - 1)

    @property
    def replayed(self) -> int:
        """Commits of steps that had been committed before."""
        highest = replayed = 0
        for commit in self.commits:
            replayed += commit.step <= highest
            highest = max(highest, commit.step)
        return replayed

    def rate(self, warm_up: int = 0) -> float:
        """Committed steps a second, each step counted once, after the first `warm_up` commits. 0 where unknown."""
        counted = self.commits[warm_up:]
        steps = self.step - counted[0].step if counted else 0
        seconds = counted[-1].at - counted[0].at if counted else 0.0
        return steps / seconds if seconds > 0 else 0.0

    def recovery(self, at: float) -> tuple[float | None, float | None]:
        """Seconds from a loss at `at` to the next step that was committed in an attempt begun after it, and to the
        next one that had not been committed before. A commit whose gradients were complete already does not count.
        None where there was none."""
        before = max((commit.step for commit in self.commits if commit.at <= at), default=0)
        after = [commit for commit in self.commits if commit.attempt.at > at]
        first = next((commit.at - at for commit in after), None)
        new = next((commit.at - at for commit in after if commit.step > before), None)
        return first, new

    def stall(self, at: float, until: float) -> float:
        """The longest time without a commit that overlaps [at, until]."""
        times = [commit.at for commit in self.commits]
        gaps = [b - a for a, b in pairwise(times) if b >= at and a <= until]
        if times and times[-1] < until and self.ended_at is None:
            gaps.append(until - times[-1])
        return max(gaps, default=0.0)

    def waits(self, at: float, until: float) -> list[str]:
        """What the leads reported to wait for in this time."""
        return [
            f"{when - at:+.1f} s {lead}: {text}" for when, lead, text in self.messages if at <= when <= until
        ]
