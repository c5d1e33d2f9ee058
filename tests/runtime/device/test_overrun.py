from __future__ import annotations

import pytest
from support.instances import Builder

from fusion.dag.cutting.cuts import split
from fusion.runtime.device.overrun import IN_A_ROW, SPARE_SECONDS, TIMES, Overrun, call_seconds


def test_three_calls_in_a_row_of_ten_times_the_estimate_are_enough() -> None:
    watched = Overrun(2.0)
    late, timely = 2.0 * TIMES + 0.1, 2.0 * TIMES - 0.1
    assert not any(watched.took(seconds) for seconds in [late, late, timely] * 5)
    assert [watched.took(late) for _ in range(IN_A_ROW)] == [False] * (IN_A_ROW - 1) + [True]


def test_a_small_call_may_take_a_second() -> None:
    watched = Overrun(1e-6)
    assert not any(watched.took(SPARE_SECONDS) for _ in range(100))
    assert [watched.took(1.01 * SPARE_SECONDS) for _ in range(IN_A_ROW)][-1]


def test_a_call_takes_longer_the_more_there_is_to_compute() -> None:
    def seconds(width: int, batch: int, rate: float = 1e9) -> float:
        built = Builder(width)
        built.block(width, width)
        (stage,) = split(built.graph(), ())
        return call_seconds(stage, {"batch": batch}, rate)

    assert seconds(512, 64, 1e9) > 2 * 64 * 512 * 512 / 1e9, "no less than the product"
    assert seconds(512, 4096) == pytest.approx(64 * seconds(512, 64), rel=0.3)
    assert seconds(512, 4096, 1e10) < seconds(512, 4096, 1e9)
