import numpy as np
import pytest
from support.staged import make

from fusion.dag.cutting.cuts import split
from fusion.dag.placement.segments import measure
from fusion.dag.placement.speeds import CONVOLUTIONS, KINDS, NORMED, PRODUCTS, TOUCHED, Rows, Speeds
from fusion.runtime.device.real_pace import (
    LEAST,
    LEAST_STEPS,
    MOST,
    REMEMBERED,
    REMEMBERED_SECONDS,
    RealPace,
)

PROBED = Speeds.uniform(1e9, 1e8)
SIZES = {"batch": 2, "sequence": 12}
FLOPS = {PRODUCTS: 1e9}  # a second of products


def asks(flops: dict[int, float]) -> Rows:
    found = np.zeros(KINDS)
    for kind, count in flops.items():
        found[kind] = count
    return found


def pace_at(now: float = 0.0) -> RealPace:
    return RealPace(lambda: PROBED, lambda: 0.0, lambda: now)


def factor(pace: RealPace, kind: int = PRODUCTS) -> float:
    return pace.speeds.parts[kind] / PROBED.parts[kind]


def seen(pace: RealPace, flops: dict[int, float], seconds: float, steps: int = LEAST_STEPS) -> None:
    for _ in range(steps):
        pace.record(asks(flops), seconds)


def test_a_stage_asks_for_what_placement_says() -> None:
    graph = make("tied").graph
    (stage,) = split(graph, ())
    forward, backward = measure(graph, (), SIZES, True).passes(0, 1, PROBED.seconds)
    assert RealPace.work(stage, SIZES) @ PROBED.seconds == pytest.approx(float(forward + backward))


def test_some_steps_in_it_is_the_median_that_counts_and_old_steps_are_forgotten() -> None:
    pace = pace_at()
    seen(pace, FLOPS, 1.5, LEAST_STEPS - 1)
    assert pace.speeds == PROBED
    pace.record(asks(FLOPS), 100.0)  # the machine slept
    assert factor(pace) == pytest.approx(1.5, abs=0.02)
    assert {type(part) for part in pace.speeds.parts} == {float}  # as a record carries them
    seen(pace, {PRODUCTS: 2e9}, 2.2, REMEMBERED)
    assert factor(pace) == pytest.approx(1.1, abs=0.005)


def test_nothing_that_a_step_takes_makes_a_peer_endlessly_slow_or_fast() -> None:
    pace = pace_at()
    seen(pace, {}, 1.0)
    seen(pace, {PRODUCTS: 1.0}, 1e9)
    assert factor(pace) == pytest.approx(MOST, rel=0.03) and factor(pace) <= MOST
    pace = pace_at()
    seen(pace, FLOPS, 1e-9)
    assert factor(pace) == pytest.approx(LEAST, rel=0.03) and factor(pace) >= LEAST
    pace = pace_at()
    seen(pace, {PRODUCTS: 1e308, TOUCHED: 1e308, NORMED: 1e308}, 1.0)  # as a graph may claim
    seen(pace, {PRODUCTS: float("inf")}, 1.0)
    for found, probed in zip(pace.speeds.parts, PROBED.parts, strict=True):
        assert LEAST * probed <= found <= MOST * probed


def test_nobody_is_marked_as_slow_for_good() -> None:
    now = 0.0
    pace = RealPace(lambda: PROBED, lambda: 0.0, lambda: now)
    seen(pace, FLOPS, 9.0, REMEMBERED)
    assert factor(pace) == pytest.approx(MOST, rel=0.03)
    now = REMEMBERED_SECONDS + 1.0
    assert pace.speeds == PROBED


def test_what_one_kind_takes_says_half_as_much_of_the_others() -> None:
    pace = pace_at()
    seen(pace, FLOPS, 1.6)
    assert factor(pace, CONVOLUTIONS) == pytest.approx(1.3, abs=0.02)
    assert pace.speeds.updated_byte / PROBED.updated_byte == pytest.approx(1.3, abs=0.02)


def test_kinds_are_told_apart_once_stages_have_asked_for_more_and_for_less_of_them() -> None:
    pace = pace_at()
    kinds = (PRODUCTS, NORMED)
    true = {PRODUCTS: 0.9, NORMED: 2.0}
    for share in (0.9, 0.1):
        wanted = {PRODUCTS: share, NORMED: 1 - share}  # seconds, as probes say
        flops = {kind: wanted[kind] / PROBED.seconds[kind] for kind in kinds}
        seen(pace, flops, sum(true[kind] * wanted[kind] for kind in kinds))
    for kind in kinds:
        assert factor(pace, kind) == pytest.approx(true[kind], abs=0.06)
    assert 0.9 < factor(pace, TOUCHED) < 2.0  # of which nobody has seen any


def test_a_job_of_one_kind_leaves_what_is_said_of_another_almost_as_it_was() -> None:
    pace = pace_at()
    seen(pace, FLOPS, 1.0)
    before = factor(pace)
    seen(pace, {CONVOLUTIONS: 1e9}, 3.0)
    assert factor(pace, CONVOLUTIONS) > 2.8 and factor(pace) == pytest.approx(before, abs=0.1)


def test_a_few_steps_of_a_stranger_weigh_little_beside_many_of_others() -> None:
    pace = pace_at()
    seen(pace, FLOPS, 1.0, REMEMBERED - LEAST_STEPS)
    seen(pace, {PRODUCTS: 2e9}, 6.0)  # three times as long as is promised
    assert factor(pace) < 1.2
