import pytest
from support.staged import make

from fusion.dag.cutting.cuts import split
from fusion.dag.placement.segments import measure
from fusion.dag.placement.speeds import Speeds
from fusion.runtime.device.real_pace import LEAST_STEPS, MOST, REMEMBERED, REMEMBERED_SECONDS, RealPace

SPEEDS = Speeds.uniform(1e9, 1e8)
SIZES = {"batch": 2, "sequence": 12}


def test_a_stage_is_promised_what_placement_promises() -> None:
    graph = make("tied").graph
    (stage,) = split(graph, ())
    forward, backward = measure(graph, (), SIZES, True).passes(0, 1, SPEEDS.seconds)
    pace = RealPace(lambda: SPEEDS, lambda: 0.0, lambda: 0.0)
    assert pace.promised(stage, SIZES) == pytest.approx(float(forward + backward))


def test_some_steps_in_it_is_the_median_that_counts_and_old_steps_are_forgotten() -> None:
    pace = RealPace(lambda: SPEEDS, lambda: 0.0, lambda: 0.0)
    for _ in range(LEAST_STEPS - 1):
        pace.saw(1.0, 1.5)
    assert pace.factor == 1.0
    pace.saw(1.0, 100.0)  # the machine slept
    assert pace.factor == 1.5
    for _ in range(REMEMBERED):
        pace.saw(2.0, 2.2)
    assert pace.factor == pytest.approx(1.1)


def test_nothing_that_a_step_takes_makes_a_peer_endlessly_slow() -> None:
    pace = RealPace(lambda: SPEEDS, lambda: 0.0, lambda: 0.0)
    for _ in range(LEAST_STEPS):
        pace.saw(0.0, 1.0)
        pace.saw(1e-9, 1e9)
    assert pace.factor == MOST and SPEEDS.times(MOST).parts[0] == pytest.approx(3e-9)


def test_nobody_is_marked_as_slow_for_good() -> None:
    now = 0.0
    pace = RealPace(lambda: SPEEDS, lambda: 0.0, lambda: now)
    for _ in range(REMEMBERED):
        pace.saw(1.0, 9.0)
    assert pace.factor == MOST
    now = REMEMBERED_SECONDS + 1.0
    assert pace.factor == 1.0
