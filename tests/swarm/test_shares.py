"""Who gives way once there is not enough: liars with many names, and honest peers among them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.shares import IDLE_SECONDS, Shares
from fusion.swarm.transport import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_largest_share_gives_its_newest_as_far_as_both_then_hold_the_same() -> None:
    shares: Shares[int] = Shares(Clock(), limit=6)
    for item in range(6):
        assert shares.room()
        shares.take(item, A)
    assert not shares.room()
    given = []
    while (item := shares.yields(B, 1)) is not None:
        given.append(item)
        shares.release(item)
        shares.take(100 + item, B)
    assert given == [5, 4, 3] and shares.of(A) == shares.of(B) == 3
    assert shares.yields(A, 1) is None


def test_what_lies_idle_gives_way_first_to_anyone() -> None:
    clock = Clock()
    shares: Shares[str] = Shares(clock)
    for item, holder in (("silent", A), ("used", A), ("other", B)):
        shares.take(item, holder)
        clock.now += 1
    clock.now += IDLE_SECONDS
    shares.use("used"), shares.use("other")
    assert shares.yields(C, 1) == "silent"
    shares.release("silent")
    assert shares.yields(C, 1) is None, "all are used, and nobody holds more than C asks for"


def test_what_was_used_may_be_told_afterwards() -> None:
    clock = Clock()
    shares: Shares[str] = Shares(clock)
    for item, holder in (("first", A), ("second", B)):
        shares.take(item, holder)
        clock.now += 1
    shares.used({"first": 3.0, "second": 0.5, "gone": 9.0})
    clock.now = 1 + IDLE_SECONDS
    assert shares.yields(C, 1) == "second"
    shares.release("second")
    assert shares.yields(C, 1) is None and "gone" not in shares


def test_however_many_newcomers_there_are_who_completed_something_gets_half() -> None:
    shares: Shares[str] = Shares(Clock())
    shares.take("first", A)
    shares.release("first", completed=True)
    for i in range(100):
        shares.take(f"stranger {i}", PeerId(f"stranger {i}"))
    got = 0
    while (item := shares.yields(A, 1)) is not None:
        shares.release(item)
        shares.take(f"mine {(got := got + 1)}", A)
    assert got == 50
    assert shares.yields(PeerId("another stranger"), 1) is not None, "A holds half, far more than its share"


names = st.sampled_from([PeerId(str(i)) for i in range(5)])


@given(st.lists(st.tuples(names, st.integers(1, 8)), max_size=60))
def test_whoever_asks_is_never_left_with_more_than_the_one_that_gave_way(
    asked: list[tuple[PeerId, int]],
) -> None:
    shares: Shares[int] = Shares(Clock(), limit=24)
    amounts: dict[int, tuple[PeerId, int]] = {}
    for item, (peer, amount) in enumerate(asked):
        while not shares.room(amount):
            other = shares.yields(peer, amount)
            if other is None:
                break
            holder, given = amounts.pop(other)
            assert holder != peer and shares.of(holder) - given >= shares.of(peer) + amount
            shares.release(other)
        else:
            shares.take(item, peer, amount)
            amounts[item] = (peer, amount)
        assert sum(amount for _, amount in amounts.values()) <= 24
        for each in {peer for peer, _ in amounts.values()}:
            assert shares.of(each) == sum(size for peer, size in amounts.values() if peer == each)


def test_what_a_holder_has_is_counted_and_whether_it_is_the_only_one() -> None:
    shares: Shares[int] = Shares(Clock())
    assert shares.alone(A) and shares.count(A) == 0
    shares.take(1, A, amount=5)
    shares.take(2, A)
    assert shares.alone(A) and not shares.alone(B) and shares.count(A) == 2
    shares.take(3, B)
    assert not shares.alone(A) and shares.count(B) == 1
    shares.release(3)
    assert shares.alone(A) and shares.count(B) == 0


def test_what_could_never_be_held_is_told_apart_from_what_has_to_wait() -> None:
    shares: Shares[int] = Shares(Clock(), limit=6)
    shares.take(1, A, 6)
    assert shares.fits(6) and not shares.room(6) and not shares.fits(7)


def test_where_what_runs_would_begin_anew_it_gives_way_for_no_larger_share() -> None:
    clock = Clock()
    shares: Shares[int] = Shares(clock, limit=4)
    for item in range(4):
        shares.take(item, A)
    assert shares.yields(B, 1) == 3 and shares.yields(B, 1, evenly=False) is None
    shares.take(9, B)
    shares.release(9, completed=True)
    assert shares.yields(B, 1, evenly=False) == 3, "newcomers hold more than half"
    clock.now += IDLE_SECONDS
    assert shares.yields(C, 1, evenly=False) == 0, "idle"
