"""Which of the calls that wait for a device runs next: shared out among authors, then among the jobs of one. Pure.

What is shared are the seconds that calls took (start-time fair queueing: Goyal, Vin and Cheng 1996). A call that runs for
long rests between two of its operators, and each part counts as a call. Each author has a tag, which grows by the seconds of its calls, and the lowest goes first. It grows the faster the younger
the author is here, up to AGE_SECONDS, by the square of how much younger: who has just come has the less of a device that others keep
busy, and a new id has least. An author that goes on
with less than its share keeps what it saved, up to CREDIT_SECONDS: whoever computes now and then does not wait for whoever
always does, but for the call that runs. Whoever comes anew, or after a rest, has saved nothing. Of one job calls run in the
order in which they were made.

Serving does not wait for more than one training call of other jobs, unless its author has had far more.

A job whose next call comes right after its last one would find another's call begun each time. So the device is held free
for a job of the lower tag, HOLD_SECONDS at most, where what it would wait for otherwise is more than what is lost if it does
not come back, each as often as that happens (anticipatory scheduling: Iyer and Druschel 2001).

And while an author that has had less is about, one that has had more pauses after each call for as long as that took, PAUSE_SECONDS at
most: whoever waits for the one and the other device in turn would find a call under way on each. All pauses together take no longer
than the calls for whose sake they are made.

An operator cannot be interrupted. After one of more than LONG_SECONDS its author's training, or its answers, pause for LONG_TIMES
as long, so that others wait for a tenth of the time. Such a pause may take more time than the calls for whose sake it is, the more of it the younger the author
is and the longer the operator; or else whoever computes a little now and then could keep somebody's large model from the device.
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
CREDIT_SECONDS = 5.0  # of the device that an author may have saved
REST_SECONDS = 10.0  # without a call, after which nothing is left of that
HOLD_SECONDS = 0.004
# After a call of an author that has had more than another who is about: for as long as the call took, and no longer.
PAUSE_SECONDS = 0.02
LONG_SECONDS = PAUSE_SECONDS  # without a rest: no pause is as long any more
LONG_TIMES = 9.0  # so long as that for which its author rests then: others wait for a tenth of the time
LEAST_COST = 0.25  # of a second in which the device is free for such a rest, in seconds of the calls for whose sake it is
ABOUT_SECONDS = 1.0  # for which an author is, after a call
LESS_SECONDS = 0.5  # that it has had less: of two who want all that they can get each has had less by turns
REMEMBERED = 1024  # authors, and jobs
RECENT = 0.1  # that the newest call counts for in what is usual for a job


class Whose(NamedTuple):
    """Whose call it is. `serves`: it is about an answer, for which somebody waits."""

    author: PeerId
    job: JobId
    serves: bool = False


NOBODY = Whose(PeerId(""), JobId(""))  # of the peer itself


@dataclass
class Waiting:
    """A call that was asked for, in the order in which that was."""

    whose: Whose
    passed: int = 0  # training calls of other jobs that were under way meanwhile


@dataclass
class _Habits:
    """What is usual for a job."""

    call: float = 0.0  # seconds that one takes
    back: float = 0.0  # how often the next one comes while the device would be held free, from 0 to 1
    ended: float = -math.inf  # the last one


class _Rest(NamedTuple):
    until: float
    cost: float  # of a second of it


NO_REST = _Rest(-math.inf, 0.0)


class _Line:
    """Those who want one thing, authors or the jobs of one, in the order of what they had of it. `ages`: who came first has
    more of it."""

    def __init__(self, *, ages: bool = False) -> None:
        self._came: dict[Hashable, float] | None = {} if ages else None  # of those that are known
        self._now = 0.0  # the tag of whoever had it last
        self._known: dict[Hashable, tuple[float, float]] = {}  # tag, and when seen; in the order of that

    def tag(self, who: Hashable) -> float:
        return max(self._known.get(who, (self._now, 0.0))[0], self._now - CREDIT_SECONDS)

    def arrives(self, who: Hashable, at: float) -> None:
        tag, seen = self._known.get(who, (self._now, -math.inf))
        self._keep(who, max(tag, self._now) if at - seen > REST_SECONDS else tag, at)

    def begins(self, who: Hashable) -> None:
        self._now = max(self._now, self.tag(who))

    def stays(self, who: Hashable, at: float) -> None:
        """It still wants it."""
        self._keep(who, self.tag(who), at)

    def ends(self, who: Hashable, seconds: float, at: float) -> None:
        self._keep(who, self.tag(who) + seconds / self.weight(who, at, at - seconds), at)

    def weight(self, who: Hashable, at: float, since: float) -> float:
        """The square of its age, where that of the oldest one who is about, or has been `since`, is 1."""
        if self._came is None:
            return 1.0
        about = (who, *self._about(since))
        ages = {other: 1.0 + min(AGE_SECONDS, at - self._came[other]) for other in about}
        return (ages[who] / max(ages.values())) ** 2

    def others(self, who: Hashable, at: float) -> Iterator[float]:
        """The tags of all others that are about."""
        return (self.tag(other) for other in self._about(at) if other != who)

    def _about(self, at: float) -> Iterator[Hashable]:
        for other, (_, seen) in reversed(self._known.items()):
            if seen < at - ABOUT_SECONDS:
                return
            yield other

    def _keep(self, who: Hashable, tag: float, at: float) -> None:
        self._known.pop(who, None)
        self._known[who] = tag, at
        if self._came is not None:
            self._came.setdefault(who, at)
        if len(self._known) > REMEMBERED:
            gone = next(iter(self._known))
            del self._known[gone]
            if self._came is not None:
                del self._came[gone]


class DeviceShare:
    """`clock` gives seconds that only rise. Not for several threads at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._authors = _Line(ages=True)
        self._jobs: LRUCache[PeerId, _Line] = LRUCache(REMEMBERED)
        self._habits: LRUCache[JobId, _Habits] = LRUCache(REMEMBERED)
        # When the last call did, its seconds
        self._ended: LRUCache[PeerId, tuple[float, float]] = LRUCache(REMEMBERED)
        # Of an author's training, and of its answers: until when they leave the device to others.
        self._rests: LRUCache[tuple[PeerId, bool], _Rest] = LRUCache(REMEMBERED)
        self._due = 0.0  # seconds of pauses that calls of those who have had less have made up for
        # Since when the device is free for such a pause, and what a second of it counts for.
        self._paused: tuple[float, float] | None = None
        self._running: Whose | None = None
        self._last: Whose | None = None  # whose call ended last

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return self._running is None

    def arrives(self, whose: Whose) -> Waiting:
        """A call that waits from now on."""
        self._authors.arrives(whose.author, self._clock())
        self._line(whose).arrives(whose, self._clock())
        habits = self._of(whose)
        if self._running is None or self._running.job != whose.job:
            soon = self._clock() - habits.ended <= HOLD_SECONDS
            habits.back += RECENT * (soon - habits.back)
        return Waiting(whose, passed=int(_holds_up(self._running, whose)))

    def choose(self, waiting: Sequence[Waiting]) -> Waiting | float:
        """Of those that wait, in the order in which they came and at least one, the one to run; or the seconds to wait for
        another one."""
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
            return min(ABOUT_SECONDS, *rests.values())  # whoever it is for may be gone by then
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
        """`call` runs from now on, while the others wait."""
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
        """The call that ran took so long."""
        self._authors.ends(whose.author, seconds, self._clock())
        self._line(whose).ends(whose, seconds, self._clock())
        habits = self._of(whose)
        habits.call = seconds if habits.ended == -math.inf else habits.call + RECENT * (seconds - habits.call)
        habits.ended = self._clock()
        self._ended[whose.author] = habits.ended, seconds
        if seconds > LONG_SECONDS:
            self._rests[whose.author, whose.serves] = _rest_after(seconds, habits.ended)
        about = self._authors.others(whose.author, self._clock())
        if any(tag > self._authors.tag(whose.author) + LESS_SECONDS for tag in about):
            self._due = min(CREDIT_SECONDS, self._due + seconds)
        self._running, self._last = None, whose

    def rests(self, whose: Whose, seconds: float) -> Waiting:
        """The call that ran is between two operators, after so long. It goes on when it is chosen."""
        self.ends(whose, seconds)
        return Waiting(whose)

    def _order(self, whose: Whose) -> tuple[float, float]:
        return self._authors.tag(whose.author), self._line(whose).tag(whose)

    def _line(self, whose: Whose) -> _Line:
        return self._jobs.setdefault(whose.author, _Line())

    def _of(self, whose: Whose) -> _Habits:
        return self._habits.setdefault(whose.job, _Habits())

    def _for_last(self, next_one: Whose) -> float:
        """Whoever had it last may come back at once."""
        last = self._last
        if last is None or last.job == next_one.job or self._order(last) > self._order(next_one):
            return 0.0
        habits = self._of(last)
        if habits.back * self._of(next_one).call <= (1.0 - habits.back) * HOLD_SECONDS:
            return 0.0
        return min(HOLD_SECONDS, max(0.0, habits.ended + HOLD_SECONDS - self._clock()))

    def _for_others(self, next_one: Whose) -> float:
        """Somebody who has had less is about, and should not find a call of this author's under way each time."""
        if self._due <= 0.0:
            return 0.0
        ended, seconds = self._ended.get(next_one.author, (-math.inf, 0.0))
        left = ended + min(PAUSE_SECONDS, seconds) - self._clock()
        return left if left > 0.0 and self._had_more(next_one.author) else 0.0

    def _long_rest(self, whose: Whose) -> float:
        """Seconds for which it leaves the device to others, after a call that held them up for long."""
        if self._due <= 0.0:
            return 0.0
        left = self._rests.get((whose.author, whose.serves), NO_REST).until - self._clock()
        return left if left > 0.0 and self._had_more(whose.author) else 0.0

    def _pause(self, cost: float) -> None:
        if self._paused is None:
            self._paused = self._clock(), cost

    def _had_more(self, author: PeerId) -> bool:
        """Than another who is about."""
        own = self._authors.tag(author)
        return any(tag < own - LESS_SECONDS for tag in self._authors.others(author, self._clock()))


def _rest_after(seconds: float, now: float) -> _Rest:
    """For others, of whom one that comes at any moment would wait for half of the operator: the less of it each second costs, the
    longer they would."""
    return _Rest(now + LONG_TIMES * seconds, max(LEAST_COST, LONG_SECONDS / seconds))


def _holds_up(running: Whose | None, whose: Whose) -> bool:
    return running is not None and not running.serves and running.job != whose.job
