from threading import Thread

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.examples import examples

from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.swarm.directory.records import JobId, Place

LENT = 100
ONE, TWO, THREE = places = [(JobId("a" * 64), stage) for stage in range(3)]


def test_what_runs_is_refused_where_it_does_not_fit() -> None:
    budget = MemoryBudget(LENT)
    budget.hold(ONE, 60)
    with pytest.raises(MemoryError, match="stage 1 of job aaaaaaaaaaaa needs"):
        budget.hold(TWO, 60)
    assert budget.by_place == {ONE: 60} and budget.free_bytes == 40
    budget.hold(ONE, 60)  # again: it is the same stage
    assert budget.free_bytes == 40
    budget.release(ONE)
    budget.release(ONE)
    assert budget.free_bytes == LENT and not budget.by_place


def test_standbys_give_way_and_those_in_use_last() -> None:
    budget, gone = MemoryBudget(LENT), list[Place]()
    assert budget.keep(ONE, 30, lambda: gone.append(ONE), in_use=lambda: True)
    assert budget.keep(TWO, 30, lambda: gone.append(TWO))
    assert not budget.keep(THREE, 50, lambda: gone.append(THREE))
    assert budget.free_bytes == LENT and budget.spare_bytes == 40
    budget.hold(THREE, 60)
    assert gone == [TWO] and budget.keeps(ONE) and not budget.keeps(TWO)
    with pytest.raises(MemoryError):
        budget.resize(THREE, 80)  # for a session nobody else's goes
    budget.hold(THREE, 80)
    assert gone == [TWO, ONE]


def test_nothing_is_given_up_in_vain() -> None:
    budget, gone = MemoryBudget(LENT), list[Place]()
    budget.hold(ONE, 60)
    assert budget.keep(TWO, 30, lambda: gone.append(TWO))
    with pytest.raises(MemoryError):
        budget.hold(THREE, 50)
    assert not gone and budget.by_place == {ONE: 60, TWO: 30}


def test_a_standby_that_is_promoted_counts_once() -> None:
    budget = MemoryBudget(LENT)
    assert budget.keep(ONE, 80, lambda: pytest.fail("it is the same stage"))
    budget.hold(ONE, 90)
    assert budget.by_place == {ONE: 90}
    budget.forget(ONE)
    assert budget.by_place == {ONE: 90}
    assert budget.keep(ONE, 80, lambda: None)
    budget.release(ONE)  # its claim was lost: it stands by as before
    assert budget.by_place == {ONE: 80} and budget.free_bytes == LENT


def test_room_is_left_beside_a_standby() -> None:
    budget = MemoryBudget(LENT)
    assert not budget.keep(ONE, 60, lambda: None, beside=50)
    assert budget.keep(ONE, 50, lambda: None, beside=50) and budget.spare_bytes == 50


def test_sessions_grow_and_shrink_what_is_set_aside() -> None:
    budget = MemoryBudget(LENT)
    budget.resize(ONE, 10)
    assert not budget.by_place  # not ours
    assert budget.keep(ONE, 10, lambda: None)
    budget.resize(ONE, 70)
    with pytest.raises(MemoryError):
        budget.resize(ONE, 101)
    budget.hold(TWO, 30)
    budget.resize(ONE, 20)
    assert budget.by_place == {ONE: 20, TWO: 30}


def test_what_is_loose_goes_first_and_only_as_much_as_is_needed() -> None:
    budget, gone = MemoryBudget(LENT), list[int | Place]()
    budget.hold(ONE, 10)
    budget.resize(ONE, 60, 40, gone.append)
    assert budget.by_place == {ONE: 60} and budget.free_bytes == 80
    assert budget.keep(TWO, 50, lambda: gone.append(TWO)) and gone == [10]
    assert budget.by_place == {ONE: 50, TWO: 50} and budget.free_bytes == 80
    with pytest.raises(MemoryError):
        budget.hold(THREE, 81)
    assert gone == [10]
    budget.hold(THREE, 40)
    assert gone == [10, 30, TWO] and budget.by_place == {ONE: 20, THREE: 40}
    with pytest.raises(MemoryError):
        budget.resize(ONE, 61, 30)  # its own it gives up itself
    budget.resize(ONE, 60, 20, gone.append)
    budget.release(ONE)
    assert budget.free_bytes == 60 and gone == [10, 30, TWO]


def test_a_replica_that_is_given_up_takes_what_is_loose_with_it() -> None:
    budget, gone = MemoryBudget(LENT), list[int | Place]()
    assert budget.keep(ONE, 10, lambda: gone.append(ONE))
    budget.resize(ONE, 50, 40, gone.append)
    assert budget.keep(TWO, 50, lambda: gone.append(TWO))
    budget.hold(THREE, 95)
    assert sum(budget.by_place.values()) <= LENT and gone == [40, ONE, TWO]
    budget.resize(ONE, 50, 40, gone.append)
    assert budget.by_place == {THREE: 95}


def test_threads_do_not_share_what_is_there_once() -> None:
    budget, taken = MemoryBudget(LENT), list[Place]()

    def take(place: Place) -> None:
        try:
            budget.hold(place, 40)
        except MemoryError:
            return
        taken.append(place)

    threads = [Thread(target=take, args=((JobId("b" * 64), stage),)) for stage in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 2 and budget.free_bytes == 20


class Account(RuleBasedStateMachine):
    """Whatever is asked in whatever order: no more than is lent is ever set aside, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(LENT)
        self.held: dict[Place, int] = {}
        self.kept: dict[Place, int] = {}
        self.used: set[Place] = set()
        self.loose: dict[Place, int] = {}

    def sheds(self, place: Place, taken: int) -> None:
        assert 0 < taken <= self.loose[place]
        self.loose[place] -= taken
        for table in (self.held, self.kept):
            if place in table:
                table[place] = max(0, table[place] - taken)

    def gives_up(self, place: Place) -> None:
        assert place not in self.held, "a promoted standby is what runs"
        del self.kept[place]
        self.loose.pop(place, None)

    @rule(place=st.sampled_from(places), size=st.integers(0, 120))
    def hold(self, place: Place, size: int) -> None:
        least = max(size, self.kept.get(place, 0))
        others = [
            max(b, self.kept.get(p, 0)) - self.loose.get(p, 0) for p, b in self.held.items() if p != place
        ]
        fits = least + sum(others) <= LENT
        try:
            self.budget.hold(place, size)
        except MemoryError:
            assert not fits
        else:
            assert fits
            self.held[place] = size
            self.loose.pop(place, None)

    @rule(place=st.sampled_from(places), size=st.integers(0, 120), beside=st.integers(0, 50))
    def keep(self, place: Place, size: int, beside: int) -> None:
        if self.budget.keep(
            place, size, lambda: self.gives_up(place), in_use=lambda: place in self.used, beside=beside
        ):
            self.kept[place] = size
            if place not in self.held:
                self.loose.pop(place, None)

    @precondition(lambda self: self.held or self.kept)
    @rule(place=st.sampled_from(places), size=st.integers(0, 120), least=st.integers(0, 120))
    def resize(self, place: Place, size: int, least: int) -> None:
        before = set(self.kept) & self.used
        loose = max(0, size - least)
        try:
            self.budget.resize(place, size, loose, lambda taken: self.sheds(place, taken))
        except MemoryError:
            pass
        else:
            table = self.held if place in self.held else self.kept
            if place in table:
                table[place], self.loose[place] = size, loose
        assert before <= set(self.kept)

    @rule(place=st.sampled_from(places), times=st.integers(1, 2))
    def release(self, place: Place, times: int) -> None:
        for _ in range(times):
            self.budget.release(place)
        self.held.pop(place, None)
        self.loose.pop(place, None)

    @rule(place=st.sampled_from(places))
    def forget(self, place: Place) -> None:
        self.budget.forget(place)
        self.kept.pop(place, None)
        if place not in self.held:
            self.loose.pop(place, None)

    @rule(place=st.sampled_from(places))
    def use(self, place: Place) -> None:
        self.used ^= {place}

    @invariant()
    def never_more_than_is_lent(self) -> None:
        both = {p: max(self.held.get(p, 0), self.kept.get(p, 0)) for p in {*self.held, *self.kept}}
        assert self.budget.by_place == both
        assert sum(both.values()) <= LENT
        loose = sum(self.loose.get(place, 0) for place in self.held)
        assert self.budget.free_bytes == LENT - sum(self.held.values()) + loose >= 0


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=examples(60), stateful_step_count=30)
