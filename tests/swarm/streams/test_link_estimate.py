from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.swarm.streams.link_estimate import (
    RateEstimate,
    Read,
    RttEstimate,
    bounds,
    cold_start_bytes,
    sample,
)

MBPS = 1e6 / 8
PIECE = 32 * 1024


def steady(rate: float, size: int, begin: float = 0.0, piece: int = PIECE) -> list[Read]:
    """A payload that comes at `rate` bytes per second."""
    count = max(1, size // piece)
    return [Read(begin + k * piece / rate, piece, first=k == 0) for k in range(count + 1)]


def cold(rate: float, rtt: float, size: int) -> list[Read]:
    """A payload over an idle TCP connection: bursts at `rate`, twice as long every round trip."""
    reads, at, window, left = [Read(0.0, 1448, first=True)], 0.0, 14_600, size
    while left > 0:
        burst, now = min(window, left), at
        for _ in range(math.ceil(burst / 4344)):
            now += 4344 / rate
            reads.append(Read(now, 4344))
        left, window = left - burst, 2 * window
        at = max(now, at + rtt)
    return reads


@given(mbps=st.floats(1, 900), size=st.integers(2_000_000, 8_000_000))
@settings(max_examples=examples(60))
def test_a_steady_payload_tells_its_rate(mbps: float, size: int) -> None:
    found = sample(steady(mbps * MBPS, size), 0.0, 0.02)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(mbps * MBPS, rel=0.02)


def test_a_payload_that_comes_in_one_read_tells_nothing() -> None:
    assert sample([Read(0.0, 60_000, first=True)], 0.0, 0.02) is None
    assert sample([], 0.0, 0.02) is None
    assert sample(steady(1e9, 1_000_000), 0.0, 0.02) is None  # over before one could time it


@pytest.mark.parametrize(("mbps", "rtt"), [(100, 0.04), (300, 0.02), (150, 0.06)])
def test_the_pauses_of_slow_start_are_not_the_link(mbps: float, rtt: float) -> None:
    reads = cold(mbps * MBPS, rtt, 2_000_000)
    found = sample(reads, 0.0, rtt)
    assert found is not None
    whole = 2_000_000 / (reads[-1].at - reads[0].at)  # what bytes by seconds would say
    assert 1.1 * whole < found.bytes_per_second < 1.05 * mbps * MBPS


def test_what_a_cold_start_explains_is_no_evidence_of_a_slow_link() -> None:
    found = sample(cold(100 * MBPS, 0.04, 150_000), 0.0, 0.04)
    assert found is not None
    assert found.bytes_per_second < 60 * MBPS and not found.sure
    slow = sample(steady(8 * MBPS, 1_000_000), 0.0, 0.04)
    assert slow is not None and slow.sure


@pytest.mark.parametrize(("held_up", "sure"), [(0.012, False), (0.06, True)])
def test_a_cold_start_that_waits_for_a_core_is_no_evidence_of_a_slow_link(held_up: float, sure: bool) -> None:
    """The one payload of a second, of 256 KiB over 400 Mbps."""
    reads = cold(400 * MBPS, 0.0047, 256 * 1024)
    late = [
        Read(read.at + held_up * (k > len(reads) // 2), read.size, read.first) for k, read in enumerate(reads)
    ]
    found = sample(late, 0.0, 0.0047)
    assert found is not None and found.bytes_per_second < 130 * MBPS and found.sure is sure


def test_what_piled_up_while_we_were_held_up_does_not_make_a_link_fast() -> None:
    rate, reads = 50 * MBPS, []
    for read in steady(50 * MBPS, 4_000_000):
        at = 0.26 if 0.2 < read.at < 0.26 else read.at  # for 60 ms nothing was read
        if reads and reads[-1].at == at:
            reads[-1] = Read(at, reads[-1].size + read.size)
        else:
            reads.append(Read(at, read.size, read.first))
    found = sample(reads, 0.0, 0.02)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(rate, rel=0.1)


@given(
    mbps=st.floats(4, 200),
    seconds=st.floats(0.25, 0.8),
    begin=st.floats(0.0, 1.0),
    held_up=st.floats(0.0, 0.11),
)
@settings(max_examples=examples(100))
def test_a_wait_at_our_end_makes_no_link_fast(
    mbps: float, seconds: float, begin: float, held_up: float
) -> None:
    rate = mbps * MBPS
    start = begin * (seconds - held_up)  # nothing is read from then on for so long, and then all of it
    reads = [
        Read(start + held_up if start < read.at < start + held_up else read.at, read.size, read.first)
        for read in steady(rate, int(rate * seconds), piece=4344)
    ]
    found = sample(reads, 0.0, 0.02)
    assert found is None or found.bytes_per_second < 1.2 * rate


def test_short_payloads_that_pile_up_make_no_link_fast() -> None:
    reads = []
    for k in range(8):  # one in 40 ms, seven in a lump of 1 ms
        seconds = 0.04 if k == 0 else 0.001
        reads += steady(256 * 1024 / seconds, 256 * 1024, begin=0.1 * k)
    found = sample(reads, 0.0, 0.001)
    assert found is not None and found.bytes_per_second == pytest.approx(256 * 1024 / 0.04, rel=0.1)


def test_a_pause_before_the_last_pieces_does_not_make_a_link_slow() -> None:
    """As p2pd on a busy machine: 256 KiB over 10 Mbps."""
    times = (0.0, 0.028, 0.054, 0.167, 0.172, 0.173, 0.193, 0.207)
    found = sample([Read(at, PIECE, first=at == 0.0) for at in times], 0.0, 0.04)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(7 * PIECE / 0.207, rel=0.01)


def test_only_what_came_since_counts_and_runs_are_apart() -> None:
    fast = steady(80 * MBPS, 4_000_000)
    slow = steady(8 * MBPS, 1_000_000, begin=fast[-1].at + 5.0)
    found = sample([*fast, *slow], slow[0].at, 0.02)
    assert found is not None
    assert found.bytes_per_second == pytest.approx(8 * MBPS, rel=0.02)
    assert found.size <= 1_000_000 + PIECE
    both = sample([*fast, *slow], 0.0, 0.02)
    assert both is not None
    assert both.busy_seconds == pytest.approx(
        slow[-1].at - slow[0].at + fast[-1].at, rel=0.01
    )  # not the pause


def test_cold_start_grows_with_round_trips() -> None:
    assert cold_start_bytes(0.0, 0.05) == 14_600
    assert cold_start_bytes(0.1, 0.05) == 7 * 14_600
    assert cold_start_bytes(1e6, 0.001) < math.inf


def test_an_estimate_follows_a_cut_within_seconds_of_traffic() -> None:
    estimate = RateEstimate(bytes_per_second=80 * MBPS, at=0.0)
    for second in (1, 2):
        estimate = estimate.updated(8 * MBPS, 8 * MBPS, 1.0, float(second))
    assert estimate.bytes_per_second < 80 * MBPS / 4
    assert estimate.at == 2.0


def test_two_reports_in_a_row_of_a_much_slower_link_are_believed_at_once() -> None:
    once = RateEstimate(bytes_per_second=80 * MBPS, at=0.0).updated(8 * MBPS, 9 * MBPS, 0.5, 1.0)
    assert once.bytes_per_second > 30 * MBPS
    assert once.updated(7 * MBPS, 8 * MBPS, 0.5, 2.0).bytes_per_second == 9 * MBPS
    between = once.updated(5 * MBPS, math.inf, 0.5, 2.0)  # says nothing of a cut
    assert between.updated(7 * MBPS, 8 * MBPS, 0.5, 3.0).bytes_per_second > 15 * MBPS
    assert once.updated(7 * MBPS, 8 * MBPS, 0.02, 2.0).bytes_per_second > 30 * MBPS  # an odd frame
    little = RateEstimate(bytes_per_second=80 * MBPS, at=0.0).updated(8 * MBPS, 60 * MBPS, 0.5, 1.0)
    assert little.updated(7 * MBPS, 8 * MBPS, 0.5, 2.0).bytes_per_second > 30 * MBPS


def test_who_shared_its_line_for_a_part_of_the_time_had_it_alone_for_the_rest() -> None:
    shared = {"line": 21 * MBPS, "sure": True}
    assert bounds(2 * MBPS, **shared, alone=0.8)[1] == pytest.approx(2.5 * MBPS)
    assert bounds(2 * MBPS, **shared, alone=0.3)[1] == bounds(2 * MBPS, **shared)[1] > 20 * MBPS
    assert bounds(18 * MBPS, **shared, alone=0.6)[1] == bounds(18 * MBPS, **shared)[1] < 24 * MBPS
    assert bounds(2 * MBPS, line=21 * MBPS, sure=False, alone=0.8)[1] == math.inf


def test_a_short_burst_raises_little_however_much_it_was() -> None:
    known = RateEstimate(bytes_per_second=20 * MBPS, at=0.0)
    assert known.updated(44 * MBPS, math.inf, 0.07, 1.0, 0.5).bytes_per_second < 26 * MBPS
    assert known.updated(2 * MBPS, 2 * MBPS, 0.07, 1.0, 0.5).bytes_per_second < 12 * MBPS


def test_one_odd_frame_changes_little() -> None:
    estimate = RateEstimate(bytes_per_second=80 * MBPS, at=0.0).updated(8 * MBPS, 8 * MBPS, 0.02, 1.0)
    assert estimate.bytes_per_second > 75 * MBPS


def test_a_lower_bound_never_lowers() -> None:
    estimate = RateEstimate(bytes_per_second=80 * MBPS, at=0.0)
    low, high = bounds(8 * MBPS, line=8 * MBPS, sure=False)
    assert estimate.updated(low, high, 5.0, 1.0).bytes_per_second == 80 * MBPS
    low, high = bounds(30 * MBPS, line=75 * MBPS, sure=True)  # its part of a line that it shares
    assert estimate.updated(low, high, 5.0, 1.0).bytes_per_second == 80 * MBPS
    low, high = bounds(3 * MBPS, line=6 * MBPS, sure=True)  # more than sharing explains
    assert estimate.updated(low, high, 5.0, 1.0).bytes_per_second < 15 * MBPS


def test_queues_do_not_make_a_round_trip_longer_but_a_new_way_does() -> None:
    rtt = RttEstimate()
    for at in range(8):
        rtt = rtt.updated(float(at), 0.020 + 0.001 * (at % 3), quiet=True)
    for at in range(8, 20):
        rtt = rtt.updated(float(at), 0.2, quiet=False)
    assert rtt.seconds == pytest.approx(0.02)
    for at in range(20, 24):
        rtt = rtt.updated(float(at), 0.08, quiet=True)
    assert rtt.seconds == pytest.approx(0.08)
    assert rtt.updated(24.0, 0.03, quiet=False).seconds == pytest.approx(0.03)
