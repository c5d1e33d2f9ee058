from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.links import packet_trains
from fusion.swarm.links.packet_trains import FIRST_BYTES, LEAST_BYTES, MOST_BYTES, MOST_TRAINS, TRAIN_SECONDS

MBPS = 1e6 / 8
RATES = st.floats(1 * MBPS, 10_000 * MBPS)
ROUND_TRIPS = st.floats(0.0002, 0.3)


@given(RATES)
def test_a_train_grows_to_what_the_link_needs_and_no_further(rate: float) -> None:
    size, count = FIRST_BYTES, 1
    while not packet_trains.long_enough(size, rate):
        longer = packet_trains.next_bytes(size, rate)
        assert size < longer <= MOST_BYTES
        size, count = longer, count + 1
    assert count <= 3
    assert size <= LEAST_BYTES or size <= 2 * rate * TRAIN_SECONDS  # a slow link is not blocked for long


@given(RATES, ROUND_TRIPS, st.floats(0.0, 0.5), st.integers(FIRST_BYTES, MOST_BYTES))
def test_what_holds_a_train_up_makes_it_slow_and_nothing_makes_it_fast(
    rate: float, rtt: float, held_up: float, size: int
) -> None:
    train = packet_trains.train(size, size / rate + rtt + held_up, rtt, rtt, 0.0)
    assert (
        train.rate <= 1.001 * rate or train.seconds < 0.2 * rtt
    )  # over before the round trip can be told from it
    assert train.rate == pytest.approx(size / train.seconds)


@given(st.floats(0.1 * MBPS, 10_000 * MBPS))
def test_no_line_is_held_up_for_long(rate: float) -> None:
    size = packet_trains.wanted_bytes(rate)
    assert size <= FIRST_BYTES or size / rate <= packet_trains.LONGEST_SECONDS


@given(RATES, ROUND_TRIPS, st.floats(0.0, 1e12))
def test_a_peer_cannot_make_a_link_look_faster_than_the_clock_allows(
    rate: float, rtt: float, claimed: float
) -> None:
    train = packet_trains.train(LEAST_BYTES, LEAST_BYTES / rate + rtt, rtt, rtt, claimed)
    assert train.rate <= packet_trains.FARTHEST * LEAST_BYTES / train.seconds


@given(st.lists(st.floats(0.3, 1.0), min_size=1, max_size=MOST_TRAINS))
def test_trains_end_and_the_best_two_of_them_agree(shares: list[float]) -> None:
    done = packet_trains.settled(shares, 0.0)
    assert done or len(shares) < MOST_TRAINS
    if done and len(shares) < MOST_TRAINS:
        best = sorted(shares)[-2:]
        assert best[1] <= packet_trains.AGREE * best[0]


def test_a_full_way_back_holds_a_train_back_and_says_nothing_of_the_way_there() -> None:
    rate, idle, now = 8 * MBPS, 0.02, 1.0
    slowed = packet_trains.train(LEAST_BYTES, LEAST_BYTES / rate + 4.0 * now, idle, now, 0.0)
    assert packet_trains.plainly_cut(slowed, rate) and packet_trains.held_back(slowed, rate, idle)
    cut = packet_trains.train(LEAST_BYTES, 10 * LEAST_BYTES / rate + idle, idle, idle, 0.0)
    assert packet_trains.plainly_cut(cut, rate) and not packet_trains.held_back(cut, rate, idle)
    both = packet_trains.train(LEAST_BYTES, 10 * LEAST_BYTES / rate + 6.0 * now, idle, now, 0.0)
    assert not packet_trains.held_back(both, rate, idle)
    as_ever = packet_trains.train(LEAST_BYTES, LEAST_BYTES / rate + idle, idle, now, 0.0)
    assert not packet_trains.held_back(as_ever, 0.7 * rate, idle)


def test_one_train_is_enough_where_it_says_what_was_known() -> None:
    assert packet_trains.settled([78.0], 80.0)
    assert not packet_trains.settled([40.0], 80.0)
    assert not packet_trains.settled([160.0], 80.0)
    assert not packet_trains.settled([80.0], 0.0)


@given(st.floats(2 * MBPS, 200 * MBPS), st.floats(0.0002, 0.06))
def test_a_check_sees_a_cut_and_nothing_where_there_is_none(rate: float, rtt: float) -> None:
    size = packet_trains.check_bytes(rate, rtt)
    assert FIRST_BYTES <= size <= 4 * LEAST_BYTES
    assert not packet_trains.too_late(size, packet_trains.healthy_seconds(size, rate, rtt), rate, rtt)
    if size < 4 * LEAST_BYTES:
        assert packet_trains.too_late(size, size / (rate / 10), rate, rtt)


@pytest.mark.parametrize(
    ("mbps", "rtt", "kib"), [(8, 0.04, 64), (20, 0.04, 128), (80, 0.02, 256), (100, 0.01, 256)]
)
def test_checks_of_home_links_are_short(mbps: float, rtt: float, kib: int) -> None:
    assert packet_trains.check_bytes(mbps * MBPS, rtt) <= kib * 1024
