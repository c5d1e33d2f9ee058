from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.runtime.device.share import (
    ACTIVE_SECONDS,
    CREDIT_SECONDS,
    NOBODY,
    Caller,
    DeviceShare,
    Waiting,
)
from fusion.swarm.directory.records import JobId
from fusion.swarm.transport import PeerId

PAUSE = 0.0005  # from the end of a call to the next one of whoever waited for it


def caller(author: str, job: str = "", *, serves: bool = False) -> Caller:
    return Caller(PeerId(author), JobId(job or author), serves)


@dataclass
class Device:
    """One device in simulated time. `load`: of each job so many calls wait always; `bursts`: of each job so many calls,
    one after the other, then a pause."""

    now: float = 0.0
    waiting: list[Waiting] = field(default_factory=list)
    waited: dict[Caller, list[float]] = field(default_factory=dict)
    used: Counter[Caller] = field(default_factory=Counter)
    order: list[Caller] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.share = DeviceShare(lambda: self.now)
        self._arrivals: list[tuple[float, int, Caller]] = []
        self._asked: dict[int, float] = {}
        self._count = 0

    def ask(self, owner: Caller, at: float) -> None:
        self._count += 1
        heapq.heappush(self._arrivals, (at, self._count, owner))

    def _let_in(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now:
            at, _, owner = heapq.heappop(self._arrivals)
            call = self.share.arrives(owner)
            self._asked[id(call)] = at
            self.waiting.append(call)

    def run(
        self, until: float, seconds: dict[Caller, float], bursts: dict[Caller, tuple[int, float]]
    ) -> None:
        """`bursts`: calls one after the other, then a pause; others ask anew as soon as one of theirs begins."""
        left = {owner: count for owner, (count, _) in bursts.items()}
        while self.now < until:
            self._let_in()
            if not self.waiting:
                self.now = self._arrivals[0][0]
                continue
            choice = self.share.choose(self.waiting)
            if isinstance(choice, float):
                assert 0.0 < choice <= ACTIVE_SECONDS
                later = self._arrivals[0][0] if self._arrivals else self.now + choice
                self.now = min(self.now + choice, later)
                continue
            self.waiting = [call for call in self.waiting if call is not choice]
            owner = choice.caller
            self.share.begins(choice, self.waiting)
            self.waited.setdefault(owner, []).append(self.now - self._asked.pop(id(choice)))
            if owner not in bursts:
                self.ask(owner, self.now)
            end = self.now + seconds[owner]
            while self._arrivals and self._arrivals[0][0] < end:
                self.now = max(self.now, self._arrivals[0][0])
                self._let_in()
            self.now = end
            self.share.ends(owner, seconds[owner])
            self.used[owner] += 1
            self.order.append(owner)
            if owner in bursts:
                left[owner] -= 1
                if not left[owner]:
                    left[owner] = bursts[owner][0]
                    self.ask(owner, self.now + bursts[owner][1])
                else:
                    self.ask(owner, self.now + PAUSE)


def test_authors_get_as_much_whatever_their_calls_take_and_however_many_jobs_they_have() -> None:
    device = Device()
    one, greedy = caller("one"), [caller("greedy", f"job {n}") for n in range(20)]
    seconds = {one: 0.01} | dict.fromkeys(greedy, 0.05)
    for owner in seconds:
        for _ in range(3):
            device.ask(owner, 0.0)
    device.run(100.0, seconds, {})
    of_one = device.used[one] * 0.01
    assert of_one == pytest.approx(50.0, abs=CREDIT_SECONDS)
    of_greedy = [device.used[owner] for owner in greedy]
    assert max(of_greedy) - min(of_greedy) <= 2, "its own jobs take turns"


def test_who_computes_now_and_then_waits_for_the_call_that_runs_and_no_more() -> None:
    """And gets its next calls at once, one after the other."""
    device = Device()
    honest, greedy = caller("honest"), [caller("greedy", f"job {n}") for n in range(10)]
    seconds = {honest: 0.015} | dict.fromkeys(greedy, 0.015)
    device.ask(honest, 0.0)
    for owner in greedy:
        for _ in range(2):
            device.ask(owner, 0.5)
    device.run(60.0, seconds, {honest: (4, 0.1)})
    waited = device.waited[honest][20:]
    assert max(waited) <= 0.015 + 1e-6
    assert sum(waited) / len(waited) < 0.004, "of four calls one finds another's under way"
    assert sum(device.used[owner] for owner in greedy) * 0.015 > 20.0, "the rest is for whoever wants it"


@pytest.mark.parametrize("jobs", [1, 3])
def test_steps_and_answers_go_on_beside_an_author_that_always_has_calls_waiting(jobs: int) -> None:
    """Calls of 15 ms: four in a step of 170 ms, one in a token of 56 ms; in the order of their coming steps were at 0.46 and
    0.27 of quiet, answers at 0.61 and 0.36."""
    step, token = caller("honest", "step"), caller("honest", "token", serves=True)
    bursts = {step: (4, 0.1113), token: (1, 0.0407)}
    flood = [caller("greedy", f"job {n}") for n in range(jobs)]

    def rates(greedy: list[Caller]) -> tuple[int, int]:
        device = Device()
        for owner in (step, token, *greedy, *greedy):
            device.ask(owner, 0.0)
        device.run(100.0, dict.fromkeys((step, token), 0.015) | dict.fromkeys(greedy, 0.0171), bursts)
        return device.used[step], device.used[token]

    for quiet, beside in zip(rates([]), rates(flood), strict=True):
        assert beside >= 0.8 * quiet


def test_who_goes_from_one_device_to_the_next_seldom_finds_a_call_under_way() -> None:
    """And pauses are made no longer than what they are made for: a call now and then stops nobody."""
    chain, busy = caller("chain"), [caller("busy", f"job {n}") for n in range(3)]
    for rest, most, least in ((0.0168, 0.003, 40.0), (0.9, 0.02, 95.0)):
        device = Device()
        for owner in (chain, *busy, *busy):
            device.ask(owner, 0.0)
        device.run(100.0, {chain: 0.015} | dict.fromkeys(busy, 0.0155), {chain: (1, rest)})
        waited = device.waited[chain][20:]
        assert sum(waited) / len(waited) <= most
        assert sum(device.used[owner] for owner in busy) * 0.0155 >= least


def test_the_device_is_held_for_nobody_who_does_not_come_back_soon() -> None:
    device = Device()
    rare, busy = caller("rare"), caller("busy")
    device.ask(rare, 0.0)
    device.ask(busy, 0.0)
    device.run(20.0, {rare: 0.01, busy: 0.01}, {rare: (1, 0.05)})
    assert device.used[busy] * 0.01 > 20.0 - 2 * device.used[rare] * 0.01 - 0.1, "but for pauses"


def test_serving_waits_for_one_training_call_of_another_job_at_most() -> None:
    device = Device()
    answers = caller("author", "answers", serves=True)
    trains = [caller("author", f"job {n}") for n in range(3)] + [caller("other")]
    seconds = {answers: 0.03} | dict.fromkeys(trains, 1.0)
    for owner in seconds:
        device.ask(owner, 0.0)
    device.run(60.0, seconds, {})
    between = [device.order[at : at + 2] for at in range(len(device.order) - 1)]
    assert all(answers in pair for pair in between[5:])
    assert min(device.used[owner] for owner in trains) >= 5, "and training goes on"


@pytest.mark.parametrize("serves", [False, True])
def test_operators_of_seconds_leave_others_most_of_the_time(serves: bool) -> None:
    """Also where these wait for another device in between, and however many jobs have such operators."""
    device = Device()
    honest, strange = caller("honest"), [caller("strange", f"job {n}", serves=serves) for n in range(4)]
    device.ask(honest, 0.0)
    for owner in strange:
        device.ask(owner, 300.0)
    seconds = {honest: 0.015} | dict.fromkeys(strange, 2.0)
    device.run(300.0, seconds, {honest: (1, 0.015)})
    before = device.used[honest]
    device.run(400.0, seconds, {honest: (1, 0.015)})
    assert device.used[honest] - before >= 0.85 * before / 3
    assert sum(device.used[owner] for owner in strange) * 2.0 >= 0.05 * 100, "and nobody has nothing"


@pytest.mark.parametrize("seconds", [0.025, 0.04, 0.05, 0.1, 1.0])
@pytest.mark.parametrize("step", [(1, 0.02), (2, 0.04), (4, 0.11)])
def test_operators_of_any_length_leave_steps_and_answers_most_of_their_pace(
    seconds: float, step: tuple[int, float]
) -> None:
    """Of somebody who has just come. Operators of 25 to 50 ms left steps that go to and fro between two devices 0.44 to 0.63."""
    for quiet, beside in zip(rates(step), rates(step, seconds), strict=True):
        assert beside >= 0.8 * quiet


@functools.cache
def rates(step: tuple[int, float], strange_seconds: float = 0.0) -> tuple[int, int]:
    """Of calls of steps and of answers in twenty seconds, beside operators that take so long, or alone."""
    steps, token, strange = (
        caller("honest", "step"),
        caller("honest", "token", serves=True),
        caller("strange"),
    )
    bursts = {steps: step, token: (1, 0.0407)}
    device = Device()
    for owner in (steps, token):
        device.ask(owner, 0.0)
    if strange_seconds:
        device.ask(strange, 25.0)
    both = {steps: 0.016, token: 0.016, strange: strange_seconds}
    device.run(25.0, both, bursts)
    before = device.used[steps], device.used[token]
    device.run(45.0, both, bursts)
    return device.used[steps] - before[0], device.used[token] - before[1]


@pytest.mark.parametrize(
    ("operator", "call", "rest", "least"), [(2.0, 0.01, 0.5, 0.8), (0.03, 0.015, 0.15, 0.75)]
)
def test_who_computes_little_does_not_keep_large_operators_from_the_device(
    operator: float, call: float, rest: float, least: float
) -> None:
    device = Device()
    large, little = caller("large"), caller("little")
    device.ask(large, 0.0)
    device.ask(large, 0.0)
    device.ask(little, 60.0)
    device.run(360.0, {large: operator, little: call}, {little: (1, rest)})
    assert device.used[large] * operator >= least * 360.0


def test_a_call_that_rests_goes_on_behind_who_has_had_less_and_before_its_jobs_next() -> None:
    share = DeviceShare(lambda: 0.0)
    first, second = share.arrives(caller("one")), share.arrives(caller("one"))
    share.begins(first, [second])
    other = share.arrives(caller("other"))
    rested = share.yields(first.caller, 0.01)
    assert share.choose([rested, second, other]) is other
    share.begins(other, [rested, second])
    share.ends(other.caller, 1.0)
    assert share.choose([rested, second]) is rested


def test_calls_of_one_job_run_in_their_order() -> None:
    share = DeviceShare(lambda: 0.0)
    first, second = share.arrives(caller("one")), share.arrives(caller("one"))
    assert share.choose([first, second]) is first
    share.begins(first, [second])
    share.ends(first.caller, 100.0)
    assert share.choose([second]) is second


@pytest.mark.parametrize("known", [False, True])
def test_who_comes_anew_or_after_a_rest_has_saved_nothing(known: bool) -> None:
    """Ids are free: who comes under a new one must not go before all others for that."""
    device = Device()
    late, busy = caller("late"), caller("busy")
    device.ask(busy, 0.0)
    device.ask(busy, 0.0)
    device.ask(late, 0.0 if known else 101.0)
    device.run(100.0, {late: 0.5, busy: 0.5}, {late: (1, 100.5)})
    began = len(device.order)
    device.run(120.0, {late: 0.5, busy: 0.5}, {})
    came = device.order.index(late, began)
    of_late = device.order[came:].count(late)
    assert abs(device.order[came:].count(busy) - of_late) <= 2 if known else of_late <= 4


@pytest.mark.parametrize("age", [30.0, 120.0])
def test_who_has_just_come_has_little_of_a_device_that_others_keep_busy(age: float) -> None:
    """What strangers leave of it in their first twenty seconds to somebody who was there for half a minute: 0.79, where their
    share grew with their age."""
    device = Device()
    honest, stranger = caller("honest"), [caller("stranger", f"job {n}") for n in range(3)]
    for owner, at in ((honest, 0.0), (honest, 0.0), *((owner, age) for owner in stranger)):
        device.ask(owner, at)
    seconds = {honest: 0.015} | dict.fromkeys(stranger, 0.015)
    device.run(age, seconds, {})
    before = device.used[honest]
    device.run(age + 20.0, seconds, {})
    assert (device.used[honest] - before) * 0.015 >= 0.85 * 20.0
    assert sum(device.used[owner] for owner in stranger) > 0, "and nobody has nothing"


@pytest.mark.heavy
def test_who_came_first_has_no_more_of_it_after_an_hour() -> None:
    device = Device()
    honest, stranger = caller("honest"), [caller("stranger", f"job {n}") for n in range(3)]
    for owner, at in ((honest, 0.0), (honest, 0.0), *((owner, 120.0) for owner in stranger)):
        device.ask(owner, at)
    seconds = {honest: 0.015} | dict.fromkeys(stranger, 0.015)
    device.run(3600.0, dict.fromkeys(seconds, 0.5), {})
    before = device.used[honest]
    device.run(3600.0 + 100.0, seconds, {})
    assert (device.used[honest] - before) * 0.015 == pytest.approx(50.0, abs=2.0)


def test_what_was_saved_has_an_end() -> None:
    device = Device()
    rare, busy = caller("rare"), caller("busy")
    device.ask(rare, 0.0)
    device.ask(busy, 0.0)
    device.ask(busy, 0.0)
    device.run(600.0, {rare: 0.5, busy: 0.5}, {rare: (1, 5.0)})
    began = len(device.order)
    device.run(640.0, {rare: 0.5, busy: 0.5}, {})
    came = device.order.index(rare, began)
    assert device.order[came : came + 8].count(rare) >= 6
    assert device.order[came:].count(busy) >= len(device.order[came:]) * 0.5 - CREDIT_SECONDS / 0.5


def test_what_is_remembered_has_an_end() -> None:
    times = itertools.count()
    share = DeviceShare(lambda: 0.1 * next(times))
    for number in range(5000):
        call = share.arrives(caller(f"author {number}"))
        share.begins(call, [])
        share.ends(call.caller, 1.0)
    assert max(len(share._jobs), len(share._authors._known), len(share._histories)) <= 1024
    call = share.arrives(NOBODY)
    assert share.choose([call]) is call


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.floats(0.0, 2.0)), max_size=40
    ),
    st.lists(st.floats(0.0, 1.0), min_size=40, max_size=40),
)
@settings(max_examples=examples(200))
def test_every_call_runs_once_whatever_comes_when(
    calls: list[tuple[int, int, bool, float]], seconds: list[float]
) -> None:
    now = 0.0
    share = DeviceShare(lambda: now)
    left = sorted(calls, key=lambda call: call[3])
    waiting: list[Waiting] = []
    ran = 0
    while left or waiting:
        while left and left[0][3] <= now:
            author, job, serves, _ = left.pop(0)
            waiting.append(share.arrives(caller(f"{author}", f"{author} {job} {serves}", serves=serves)))
        if not waiting:
            now = left[0][3]
            continue
        choice = share.choose(waiting)
        if isinstance(choice, float):
            assert 0.0 < choice <= ACTIVE_SECONDS
            now += choice
            continue
        assert any(call is choice for call in waiting)
        assert not any(
            c.caller.job == choice.caller.job for c in waiting[: [c is choice for c in waiting].index(True)]
        )
        waiting = [call for call in waiting if call is not choice]
        share.begins(choice, waiting)
        now += seconds[ran]
        share.ends(choice.caller, seconds[ran])
        ran += 1
    assert ran == len(calls)
