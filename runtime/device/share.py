"""Which of the calls that wait for a device runs next: fair queueing among authors, then among the jobs of one. Pure.

The shared resource is seconds of the device (start-time fair queueing: Goyal, Vin and Cheng 1996). A long call yields between two of its
operators, and each slice counts as a call. Each author has a tag, which grows by the seconds of its calls; the lowest goes first. It grows
by the inverse square of the author's age here, relative to the oldest and up to AGE_SECONDS: a newcomer gets less of a busy device, and a
new id least. An author that is active and uses less than its share saves credit, up to CREDIT_SECONDS: one that computes now and then
waits for the call that runs, and not for authors that always compute. An author that is new, or comes back after IDLE_SECONDS, has no
credit. Calls of one job run in the order in which they were made.

Serving waits for at most one training call of other jobs, unless its author has used far more.

A job whose next call arrives right after its last one would find another job's call begun each time. So the device is held free for a job
with a lower tag, HOLD_SECONDS at most, where the expected wait that this saves is more than the expected time that it wastes (anticipatory
scheduling: Iyer and Druschel 2001).

While an author that has used less is active, one that has used more pauses after each call for as long as that took, PAUSE_SECONDS at
most: a job that waits for two devices in turn would otherwise find a call under way on each. All pauses together take no longer than the
calls of the authors that they favour.

An operator cannot be interrupted. After one of more than LONG_SECONDS its author's training, or its serving, pauses for LONG_PAUSE_FACTOR
times as long, so that others wait for a tenth of the time. Such a pause may take more time than the calls that it favours, the more the
younger the author and the longer the operator: otherwise an author that computes a little now and then could block a large model.
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
IDLE_SECONDS = 10.0  # without a call, after which its credit is gone
HOLD_SECONDS = 0.004
# After a call of an author that has used more than another active one: as long as the call took, and no longer.
PAUSE_SECONDS = 0.02
LONG_SECONDS = PAUSE_SECONDS  # of an operator: no pause makes up for a longer one
LONG_PAUSE_FACTOR = (
    9.0  # pause after such an operator, in multiples of it: others wait for a tenth of the time
)
MIN_PAUSE_COST = 0.25  # of a second of such a pause, in seconds of the calls that it favours
ACTIVE_SECONDS = 1.0  # for which an author is active after a call
# By which a tag must be lower to count: two authors that always compute overtake each other by turns.
TAG_MARGIN_SECONDS = 0.5
REMEMBERED = 1024  # authors, and jobs
RECENT = 0.1  # weight of the newest call in a job's moving averages


class Caller(NamedTuple):
    """The account and job of a call. `serves`: for a served model, where a user waits for the answer."""

    author: PeerId
    job: JobId
    serves: bool = False


NOBODY = Caller(PeerId(""), JobId(""))  # the peer itself


@dataclass
class Waiting:
    """A call that waits for the device."""

    caller: Caller
    passed: int = 0  # training calls of other jobs that ran meanwhile


@dataclass
class _CallHistory:
    """Moving averages of a job's calls."""

    call: float = 0.0  # seconds of a call
    prompt_share: float = 0.0  # share of calls that arrive within HOLD_SECONDS of the last one, from 0 to 1
    ended: float = -math.inf  # when the last one did


class _Pause(NamedTuple):
    until: float
    cost: float  # of a second of it


NO_PAUSE = _Pause(-math.inf, 0.0)


class _FairQueue:
    """The tags of members that share the device: authors, or the jobs of one. `ages`: older members get more."""

    def __init__(self, *, ages: bool = False) -> None:
        self._first_seen: dict[Hashable, float] | None = {} if ages else None  # by member
        self._now = 0.0  # the highest tag of a call that has begun
        self._known: dict[Hashable, tuple[float, float]] = {}  # (tag, last seen), the most recently seen last

    def tag(self, member: Hashable) -> float:
        return max(self._known.get(member, (self._now, 0.0))[0], self._now - CREDIT_SECONDS)

    def arrives(self, member: Hashable, at: float) -> None:
        tag, seen = self._known.get(member, (self._now, -math.inf))
        self._keep(member, max(tag, self._now) if at - seen > IDLE_SECONDS else tag, at)

    def begins(self, member: Hashable) -> None:
        self._now = max(self._now, self.tag(member))

    def stays(self, member: Hashable, at: float) -> None:
        """The member still waits."""
        self._keep(member, self.tag(member), at)

    def ends(self, member: Hashable, seconds: float, at: float) -> None:
        self._keep(member, self.tag(member) + seconds / self.weight(member, at, at - seconds), at)

    def weight(self, member: Hashable, at: float, since: float) -> float:
        """The squared age of the member, relative to the oldest that was active at `since` or later."""
        if self._first_seen is None:
            return 1.0
        active = (member, *self._active(since))
        ages = {other: 1.0 + min(AGE_SECONDS, at - self._first_seen[other]) for other in active}
        return (ages[member] / max(ages.values())) ** 2

    def others(self, member: Hashable, at: float) -> Iterator[float]:
        """The tags of all other active members."""
        return (self.tag(other) for other in self._active(at) if other != member)

    def _active(self, at: float) -> Iterator[Hashable]:
        for other, (_, seen) in reversed(self._known.items()):
            if seen < at - ACTIVE_SECONDS:
                return
            yield other

    def _keep(self, member: Hashable, tag: float, at: float) -> None:
        self._known.pop(member, None)
        self._known[member] = tag, at
        if self._first_seen is not None:
            self._first_seen.setdefault(member, at)
        if len(self._known) > REMEMBERED:
            oldest = next(iter(self._known))
            del self._known[oldest]
            if self._first_seen is not None:
                del self._first_seen[oldest]


class DeviceShare:
    """`clock`: monotonic seconds. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._authors = _FairQueue(ages=True)
        self._jobs: LRUCache[PeerId, _FairQueue] = LRUCache(REMEMBERED)
        self._histories: LRUCache[JobId, _CallHistory] = LRUCache(REMEMBERED)
        # By author: when its last call ended, and its seconds
        self._ended: LRUCache[PeerId, tuple[float, float]] = LRUCache(REMEMBERED)
        # By (author, serves): the pause after a long operator.
        self._long_pauses: LRUCache[tuple[PeerId, bool], _Pause] = LRUCache(REMEMBERED)
        self._pause_budget = (
            0.0  # seconds: calls of authors that have used less add to it, pauses take from it
        )
        # Since when the device is free for a pause, and the cost of a second of it.
        self._paused: tuple[float, float] | None = None
        self._running: Caller | None = None
        self._last: Caller | None = None  # of the call that ended last

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return self._running is None

    def arrives(self, caller: Caller) -> Waiting:
        """A call begins to wait."""
        self._authors.arrives(caller.author, self._clock())
        self._job_queue(caller).arrives(caller, self._clock())
        habits = self._history(caller)
        if self._running is None or self._running.job != caller.job:
            soon = self._clock() - habits.ended <= HOLD_SECONDS
            habits.prompt_share += RECENT * (soon - habits.prompt_share)
        return Waiting(caller, passed=int(_delays(self._running, caller)))

    def choose(self, waiting: Sequence[Waiting]) -> Waiting | float:
        """The call to run, of at least one that waits, in the order in which they arrived; or the seconds to hold the device free."""
        calls: dict[JobId, Waiting] = {}
        for call in waiting:
            calls.setdefault(call.caller.job, call)
        authors = dict.fromkeys(call.caller.author for call in calls.values())
        for author in authors:
            self._authors.stays(author, self._clock())
        pauses = {id(call): self._long_pause_seconds(call.caller) for call in calls.values()}
        ready = [call for call in calls.values() if pauses[id(call)] <= 0.0]
        if not ready:
            now = self._clock()
            self._pause(
                max(
                    self._authors.weight(caller.author, now, now)
                    * self._long_pauses[caller.author, caller.serves].cost
                    for caller in (call.caller for call in calls.values())
                )
            )
            return min(
                ACTIVE_SECONDS, *pauses.values()
            )  # the author that the pause favours may be inactive by then
        tag_limit = CREDIT_SECONDS + min(self._authors.tag(call.caller.author) for call in ready)
        overdue = [
            call
            for call in ready
            if call.caller.serves and call.passed and self._authors.tag(call.caller.author) <= tag_limit
        ]
        chosen = min(overdue or ready, key=lambda call: self._order(call.caller))
        if overdue:
            return chosen
        if (hold := self._hold_seconds(chosen.caller)) > 0.0:
            return hold
        pause = self._pause_seconds(chosen.caller)
        if pause > 0.0:
            self._pause(1.0)
        return pause or chosen

    def begins(self, call: Waiting, waiting: Sequence[Waiting]) -> None:
        """`call` begins to run, while `waiting` wait."""
        caller = call.caller
        self._authors.begins(caller.author)
        self._job_queue(caller).begins(caller)
        self._running = caller
        if self._paused is not None:
            since, cost = self._paused
            self._pause_budget -= cost * (self._clock() - since)
            self._paused = None
        for other in waiting:
            other.passed += _delays(caller, other.caller)

    def ends(self, caller: Caller, seconds: float) -> None:
        """The call that ran has ended after `seconds`."""
        self._authors.ends(caller.author, seconds, self._clock())
        self._job_queue(caller).ends(caller, seconds, self._clock())
        habits = self._history(caller)
        habits.call = seconds if habits.ended == -math.inf else habits.call + RECENT * (seconds - habits.call)
        habits.ended = self._clock()
        self._ended[caller.author] = habits.ended, seconds
        if seconds > LONG_SECONDS:
            self._long_pauses[caller.author, caller.serves] = _pause_after(seconds, habits.ended)
        active = self._authors.others(caller.author, self._clock())
        if any(tag > self._authors.tag(caller.author) + TAG_MARGIN_SECONDS for tag in active):
            self._pause_budget = min(CREDIT_SECONDS, self._pause_budget + seconds)
        self._running, self._last = None, caller

    def yields(self, caller: Caller, seconds: float) -> Waiting:
        """The call that ran yields between two operators, after `seconds`. It continues when it is chosen."""
        self.ends(caller, seconds)
        return Waiting(caller)

    def _order(self, caller: Caller) -> tuple[float, float]:
        return self._authors.tag(caller.author), self._job_queue(caller).tag(caller)

    def _job_queue(self, caller: Caller) -> _FairQueue:
        return self._jobs.setdefault(caller.author, _FairQueue())

    def _history(self, caller: Caller) -> _CallHistory:
        return self._histories.setdefault(caller.job, _CallHistory())

    def _hold_seconds(self, next_one: Caller) -> float:
        """Seconds to hold the device free for the job that had it last, which may call again at once."""
        last = self._last
        if last is None or last.job == next_one.job or self._order(last) > self._order(next_one):
            return 0.0
        habits = self._history(last)
        if habits.prompt_share * self._history(next_one).call <= (1.0 - habits.prompt_share) * HOLD_SECONDS:
            return 0.0
        return min(HOLD_SECONDS, max(0.0, habits.ended + HOLD_SECONDS - self._clock()))

    def _pause_seconds(self, next_one: Caller) -> float:
        """Seconds to pause after a call of this author, while an author that has used less is active."""
        if self._pause_budget <= 0.0:
            return 0.0
        ended, seconds = self._ended.get(next_one.author, (-math.inf, 0.0))
        left = ended + min(PAUSE_SECONDS, seconds) - self._clock()
        return left if left > 0.0 and self._used_more(next_one.author) else 0.0

    def _long_pause_seconds(self, caller: Caller) -> float:
        """Seconds left of the author's pause after a long operator."""
        if self._pause_budget <= 0.0:
            return 0.0
        left = self._long_pauses.get((caller.author, caller.serves), NO_PAUSE).until - self._clock()
        return left if left > 0.0 and self._used_more(caller.author) else 0.0

    def _pause(self, cost: float) -> None:
        if self._paused is None:
            self._paused = self._clock(), cost

    def _used_more(self, author: PeerId) -> bool:
        """Whether the author has used more than another active author."""
        own = self._authors.tag(author)
        return any(tag < own - TAG_MARGIN_SECONDS for tag in self._authors.others(author, self._clock()))


def _pause_after(seconds: float, now: float) -> _Pause:
    """The pause after an operator of `seconds`. A call that arrives at a random moment waits for half of an operator, so a second of
    the pause costs the less the longer the operator."""
    return _Pause(now + LONG_PAUSE_FACTOR * seconds, max(MIN_PAUSE_COST, LONG_SECONDS / seconds))


def _delays(running: Caller | None, caller: Caller) -> bool:
    return running is not None and not running.serves and running.job != caller.job
