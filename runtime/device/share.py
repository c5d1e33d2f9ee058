"""Which of the calls that wait for a device runs next: fair queueing among authors, then among the jobs of one. Pure.

The shared resource is seconds of the device (start-time fair queueing: Goyal, Vin and Cheng 1996). A long call yields between two
of its operators, and each slice counts as a call. Each author has a tag, which grows by the seconds of its calls; the lowest goes
first. It grows by the inverse square of the author's age here, relative to the oldest and up to AGE_SECONDS: a newcomer gets less of
a busy device, and a new id least. An author that is active and uses less than its share saves credit, up to CREDIT_SECONDS: one that
computes now and then waits for the call that runs, and not for authors that always compute. An author that is new, or comes back
after REST_SECONDS, has no credit. Calls of one job run in the order in which they were made.

Serving waits for at most one training call of other jobs, unless its author has used far more.

A job whose next call arrives right after its last one would find another job's call begun each time. So the device is held free for a
job with a lower tag, HOLD_SECONDS at most, where the expected wait that this saves is more than the expected time that it wastes
(anticipatory scheduling: Iyer and Druschel 2001).

While an author that has used less is active, one that has used more pauses after each call for as long as that took, PAUSE_SECONDS at
most: a job that waits for two devices in turn would otherwise find a call under way on each. All pauses together take no longer than
the calls of the authors that they favour.

An operator cannot be interrupted. After one of more than LONG_SECONDS its author's training, or its serving, pauses for LONG_TIMES as
long, so that others wait for a tenth of the time. Such a pause may take more time than the calls that it favours, the more the younger
the author and the longer the operator: otherwise an author that computes a little now and then could block a large model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cachetools import LRUCache

from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

AGE_SECONDS = 3600.0  # after which authors are of one age
CREDIT_SECONDS = 5.0  # of the device that an author may save
REST_SECONDS = 10.0  # without a call, after which its credit is gone
HOLD_SECONDS = 0.004
# After a call of an author that has used more than another active one: as long as the call took, and no longer.
PAUSE_SECONDS = 0.02
LONG_SECONDS = PAUSE_SECONDS  # of an operator: no pause makes up for a longer one
LONG_TIMES = (
    9.0  # the author's pause after such an operator, in times of it: others wait for a tenth of the time
)
LEAST_COST = 0.25  # of a second of such a pause, in seconds of the calls that it favours
ABOUT_SECONDS = 1.0  # for which an author is active after a call
LESS_SECONDS = (
    0.5  # by which a tag must be lower to count: two authors that always compute overtake each other by turns
)
REMEMBERED = 1024  # authors, and jobs
RECENT = 0.1  # weight of the newest call in a job's moving averages


class Whose(NamedTuple):
    """The account and job of a call. `serves`: of a served model, where a user waits for the answer."""

    author: PeerId
    job: JobId
    serves: bool = False


NOBODY = Whose(PeerId(""), JobId(""))  # of the peer itself


@dataclass
class Waiting:
    """A call that waits for the device."""

    whose: Whose
    passed: int = 0  # training calls of other jobs that were under way meanwhile


@dataclass
class _Habits:
    """Moving averages of a job's calls."""

    call: float = 0.0  # seconds of a call
    back: float = 0.0  # share of calls that arrive within HOLD_SECONDS of the last one, from 0 to 1
    ended: float = -math.inf  # when the last one did


class _Rest(NamedTuple):
    until: float
    cost: float  # of a second of it


NO_REST = _Rest(-math.inf, 0.0)


class _Line:
    """The tags of those that share the device: authors, or the jobs of one. `ages`: older ones get more."""

    def __init__(self, *, ages: bool = False) -> None:
        self._first_seen: dict[Hashable, float] | None = {} if ages else None  # of those that are known
        self._now = 0.0  # the tag of the one that had the device last
        self._known: dict[Hashable, tuple[float, float]] = {}  # tag, and when last seen; in that order

    def tag(self, who: Hashable) -> float:
        return max(self._known.get(who, (self._now, 0.0))[0], self._now - CREDIT_SECONDS)

    def arrives(self, who: Hashable, at: float) -> None:
        tag, seen = self._known.get(who, (self._now, -math.inf))
        self._keep(who, max(tag, self._now) if at - seen > REST_SECONDS else tag, at)

    def begins(self, who: Hashable) -> None:
        self._now = max(self._now, self.tag(who))

    def stays(self, who: Hashable, at: float) -> None:
        """It still waits."""
        self._keep(who, self.tag(who), at)

    def ends(self, who: Hashable, seconds: float, at: float) -> None:
        self._keep(who, self.tag(who) + seconds / self.weight(who, at, at - seconds), at)

    def weight(self, who: Hashable, at: float, since: float) -> float:
        """The square of its age, where that of the oldest one that was active at `since` or later is 1."""
        if self._first_seen is None:
            return 1.0
        active = (who, *self._active(since))
        ages = {other: 1.0 + min(AGE_SECONDS, at - self._first_seen[other]) for other in active}
        return (ages[who] / max(ages.values())) ** 2

    def others(self, who: Hashable, at: float) -> Iterator[float]:
        """The tags of all others that are active."""
        return (self.tag(other) for other in self._active(at) if other != who)

    def _active(self, at: float) -> Iterator[Hashable]:
        for other, (_, seen) in reversed(self._known.items()):
            if seen < at - ABOUT_SECONDS:
                return
            yield other

    def _keep(self, who: Hashable, tag: float, at: float) -> None:
        self._known.pop(who, None)
        self._known[who] = tag, at
        if self._first_seen is not None:
            self._first_seen.setdefault(who, at)
        if len(self._known) > REMEMBERED:
            oldest = next(iter(self._known))
            del self._known[oldest]
            if self._first_seen is not None:
                del self._first_seen[oldest]


class DeviceShare:
    """`clock`: monotonic seconds. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._authors = _Line(ages=True)
        self._jobs: LRUCache[PeerId, _Line] = LRUCache(REMEMBERED)
        self._habits: LRUCache[JobId, _Habits] = LRUCache(REMEMBERED)
        # When the last call did, its seconds
        self._ended: LRUCache[PeerId, tuple[float, float]] = LRUCache(REMEMBERED)
        # The pauses after long operators of an author's training, and of its serving.
        self._rests: LRUCache[tuple[PeerId, bool], _Rest] = LRUCache(REMEMBERED)
        self._due = 0.0  # seconds of pauses that are allowed: calls of authors that have used less add to it
        # Since when the device is free for a pause, and the cost of a second of it.
        self._paused: tuple[float, float] | None = None
        self._running: Whose | None = None
        self._last: Whose | None = None  # whose call ended last

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return self._running is None

    def arrives(self, whose: Whose) -> Waiting:
        """A call begins to wait."""
        self._authors.arrives(whose.author, self._clock())
        self._line(whose).arrives(whose, self._clock())
        habits = self._of(whose)
        if self._running is None or self._running.job != whose.job:
            soon = self._clock() - habits.ended <= HOLD_SECONDS
            habits.back += RECENT * (soon - habits.back)
        return Waiting(whose, passed=int(_holds_up(self._running, whose)))

    def choose(self, waiting: Sequence[Waiting]) -> Waiting | float:
        """The call to run, of those that wait (at least one, in the order in which they arrived); or seconds for which to hold the
        device free."""
        calls: dict[JobId, Waiting] = {}
        for call in waiting:
            calls.setdefault(call.whose.job, call)
        authors = dict.fromkeys(call.whose.author for call in calls.values())
        for author in authors:
            self._authors.stays(author, self._clock())
        rests = {id(call): self._long_rest(call.whose) for call in calls.values()}
        first = [call for call in calls.values() if rests[id(call)] <= 0.0]
        if not first:
            now = self._clock()
            self._pause(
                max(
                    self._authors.weight(whose.author, now, now)
                    * self._rests[whose.author, whose.serves].cost
                    for whose in (call.whose for call in calls.values())
                )
            )
            return min(ABOUT_SECONDS, *rests.values())  # the author that it favours may be inactive by then
        most = CREDIT_SECONDS + min(self._authors.tag(call.whose.author) for call in first)
        overdue = [
            call
            for call in first
            if call.whose.serves and call.passed and self._authors.tag(call.whose.author) <= most
        ]
        found = min(overdue or first, key=lambda call: self._order(call.whose))
        if overdue:
            return found
        if (hold := self._for_last(found.whose)) > 0.0:
            return hold
        pause = self._for_others(found.whose)
        if pause > 0.0:
            self._pause(1.0)
        return pause or found

    def begins(self, call: Waiting, waiting: Sequence[Waiting]) -> None:
        """`call` begins to run, while `waiting` wait."""
        whose = call.whose
        self._authors.begins(whose.author)
        self._line(whose).begins(whose)
        self._running = whose
        if self._paused is not None:
            since, cost = self._paused
            self._due -= cost * (self._clock() - since)
            self._paused = None
        for other in waiting:
            other.passed += _holds_up(whose, other.whose)

    def ends(self, whose: Whose, seconds: float) -> None:
        """The call that ran has ended after `seconds`."""
        self._authors.ends(whose.author, seconds, self._clock())
        self._line(whose).ends(whose, seconds, self._clock())
        habits = self._of(whose)
        habits.call = seconds if habits.ended == -math.inf else habits.call + RECENT * (seconds - habits.call)
        habits.ended = self._clock()
        self._ended[whose.author] = habits.ended, seconds
        if seconds > LONG_SECONDS:
            self._rests[whose.author, whose.serves] = _rest_after(seconds, habits.ended)
        active = self._authors.others(whose.author, self._clock())
        if any(tag > self._authors.tag(whose.author) + LESS_SECONDS for tag in active):
            self._due = min(CREDIT_SECONDS, self._due + seconds)
        self._running, self._last = None, whose

    def rests(self, whose: Whose, seconds: float) -> Waiting:
        """The call that ran yields between two operators, after `seconds`. It goes on when it is chosen."""
        self.ends(whose, seconds)
        return Waiting(whose)

    def _order(self, whose: Whose) -> tuple[float, float]:
        return self._authors.tag(whose.author), self._line(whose).tag(whose)

    def _line(self, whose: Whose) -> _Line:
        return self._jobs.setdefault(whose.author, _Line())

    def _of(self, whose: Whose) -> _Habits:
        return self._habits.setdefault(whose.job, _Habits())

    def _for_last(self, next_one: Whose) -> float:
        """Seconds to hold the device free for the job that had it last, which may call again at once."""
        last = self._last
        if last is None or last.job == next_one.job or self._order(last) > self._order(next_one):
            return 0.0
        habits = self._of(last)
        if habits.back * self._of(next_one).call <= (1.0 - habits.back) * HOLD_SECONDS:
            return 0.0
        return min(HOLD_SECONDS, max(0.0, habits.ended + HOLD_SECONDS - self._clock()))

    def _for_others(self, next_one: Whose) -> float:
        """Seconds to pause after a call of this author, while an author that has used less is active."""
        if self._due <= 0.0:
            return 0.0
        ended, seconds = self._ended.get(next_one.author, (-math.inf, 0.0))
        left = ended + min(PAUSE_SECONDS, seconds) - self._clock()
        return left if left > 0.0 and self._had_more(next_one.author) else 0.0

    def _long_rest(self, whose: Whose) -> float:
        """Seconds left of the author's pause after a long operator."""
        if self._due <= 0.0:
            return 0.0
        left = self._rests.get((whose.author, whose.serves), NO_REST).until - self._clock()
        return left if left > 0.0 and self._had_more(whose.author) else 0.0

    def _pause(self, cost: float) -> None:
        if self._paused is None:
            self._paused = self._clock(), cost

    def _had_more(self, author: PeerId) -> bool:
        """Whether it has used more than another active author."""
        own = self._authors.tag(author)
        return any(tag < own - LESS_SECONDS for tag in self._authors.others(author, self._clock()))


def _rest_after(seconds: float, now: float) -> _Rest:
    """The pause after an operator of `seconds`. A call that arrives at a random moment waits for half of an operator, so a second of
    the pause costs the less the longer the operator."""
    return _Rest(now + LONG_TIMES * seconds, max(LEAST_COST, LONG_SECONDS / seconds))


def _holds_up(running: Whose | None, whose: Whose) -> bool:
    return running is not None and not running.serves and running.job != whose.job
