"""When packets leave lines, in a time of the test's own."""

from __future__ import annotations

from random import Random

import pytest
from box.lines import Line, Path

BYTE = 1e-6  # seconds: 8 Mbps


def path(
    *, up: float = 0.0, link: float = 0.0, down: float = 0.0, delay: float = 0.0, queue: float = 0.05
) -> Path:
    """By seconds a byte on each line."""
    return Path(Line(up, queue), Line(link, queue), Line(down, queue), delay, 0.0, Random(0))


def carry(way: Path, size: int, now: float) -> float | None:
    """When it is delivered that is sent now, if nothing else is under way to its target."""
    times = way.depart(size, now)
    return None if times is None else way.arrive(size, times[0], times[1])


def test_a_packet_takes_its_time_on_the_slowest_line_once_and_then_the_delay() -> None:
    assert carry(path(delay=0.01), 1500, 1.0) == pytest.approx(1.01)
    for lines in ({"up": BYTE}, {"link": BYTE}, {"down": BYTE}, {"up": BYTE, "link": BYTE, "down": BYTE}):
        way = path(delay=0.01, **lines)
        assert carry(way, 1500, 1.0) == pytest.approx(1.01 + 1500 * BYTE), lines


def test_what_comes_while_the_line_is_busy_waits_and_what_would_wait_too_long_is_dropped() -> None:
    way = path(link=BYTE, queue=0.0021)
    assert [carry(way, 1000, 1.0) for _ in range(4)] == [
        pytest.approx(1.001), pytest.approx(1.002), pytest.approx(1.003), None,
    ]  # fmt: skip
    assert carry(way, 1000, 1.0015) == pytest.approx(1.004), "there is room again"


def test_the_pairs_of_a_host_share_its_lines() -> None:
    up, down = Line(BYTE, 1.0), Line(2 * BYTE, 1.0)
    one, other = (Path(up, Line(0.0, 1.0), down, 0.0, 0.0, Random(i)) for i in range(2))
    assert carry(one, 1000, 1.0) == pytest.approx(1.002)
    times = other.depart(1000, 1.0)
    assert times is not None and times == pytest.approx((1.001, 1.002))
    assert other.arrive(1000, times[0], times[1]) == pytest.approx(1.004)


def test_no_packet_overtakes_another_when_the_delay_shrinks() -> None:
    way = path(delay=0.5)
    first = carry(way, 100, 1.0)
    way.delay = 0.1
    assert carry(way, 100, 1.0) == first == 1.5
    assert carry(way, 100, 1.5) == 1.6


def test_the_share_that_is_lost_is_the_one_asked_for_and_a_seed_repeats_it() -> None:
    draws = []
    for _ in range(2):
        way = path()
        assert not any(way.lost() for _ in range(100))
        way.loss = 0.1
        draws.append([way.lost() for _ in range(10_000)])
    assert draws[0] == draws[1] and 900 < sum(draws[0]) < 1100
    way.loss = 1.0
    assert all(way.lost() for _ in range(100))
