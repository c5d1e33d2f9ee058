from __future__ import annotations

import math
import statistics

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.coordinates import LARGEST_MS, Coordinate, distance_ms, moved


def test_peers_that_measured_few_of_the_others_know_the_way_to_all() -> None:
    rng = numpy.random.default_rng(7)
    places = rng.uniform(-40, 40, (40, 2))
    heights = rng.uniform(1, 15, 40)

    def rtt(a: int, b: int) -> float:
        return float(math.dist(places[a], places[b]) + heights[a] + heights[b])

    known = [Coordinate() for _ in places]
    met = [list(rng.choice(40, 8, replace=False)) for _ in places]
    for _ in range(60):
        for a, others in enumerate(met):
            for b in others:
                if a != b:
                    known[a] = moved(known[a], known[b], rtt(a, b), float(rng.random()))
    wrong = [
        abs(distance_ms(known[a], known[b]) - rtt(a, b)) / rtt(a, b)
        for a in range(40)
        for b in range(a)
        if b not in met[a] and a not in met[b]
    ]
    assert statistics.median(wrong) < 0.2
    assert max(c.error for c in known) < 0.5


@pytest.mark.parametrize(
    ("claimed", "rtt_ms"),
    [((9999.0, 9999.0), None), ((-9999.0, 9999.0), 300.0), ((0.0, 0.0), 3000.0), (None, 3000.0)],
)
def test_one_neighbour_that_says_what_is_not_so_moves_us_little(
    claimed: tuple[float, float] | None, rtt_ms: float | None
) -> None:
    """One of six, that stays at a coordinate or always claims ours; its round trip is the true one or as late as it likes."""
    rng = numpy.random.default_rng(7)
    places = rng.uniform(-40, 40, (12, 2))

    def rtt(a: int, b: int) -> float:
        return float(math.dist(places[a], places[b]) + 10)

    known = [Coordinate() for _ in places]
    for _ in range(60):
        for a in range(12):
            for b in range(a + 1, a + 7):
                known[a] = moved(known[a], known[b % 12], rtt(a, b % 12), float(rng.random()))
        liar = Coordinate(claimed or known[0].vector, 0.1, 0.0)
        known[0] = moved(known[0], liar, rtt_ms or 20.0, float(rng.random()))
    wrong = [abs(distance_ms(known[a], known[b]) - rtt(a, b)) for a in range(12) for b in range(a)]
    assert max(wrong) < 150 and statistics.median(wrong) < 15


@given(
    st.tuples(*[st.floats(-LARGEST_MS, LARGEST_MS)] * 2),
    st.floats(0, LARGEST_MS),
    st.floats(0, 1.5),
    st.floats(1e-3, 1e9),
    st.floats(0, 0.999),
)
def test_nothing_that_others_say_leads_out_of_bounds(
    vector: tuple[float, ...], height: float, error: float, rtt_ms: float, tie_break: float
) -> None:
    ours = moved(Coordinate(), Coordinate(vector, height, error), rtt_ms, tie_break)
    again = moved(ours, Coordinate(vector, height, error), rtt_ms, tie_break)  # `Coordinate` checks itself
    assert again.height > 0


@pytest.mark.parametrize(
    ("parts", "error"),
    [((0.0, 0.0), 0.1), ((0.0, math.nan, 1.0), 0.1), ((0.0, 2e4, 1.0), 0.1), ((0.0, 0.0, -1.0), 0.1),
     ((0.0, "a", 1.0), 0.1), ((0.0, 0.0, 1.0), math.nan), ((0.0, 0.0, 1.0), 9.0)],
)  # fmt: skip
def test_what_is_no_coordinate_is_refused(parts: tuple[float, ...], error: float) -> None:
    with pytest.raises(ValueError, match="coordinate"):
        Coordinate.from_parts(parts, error)


@pytest.mark.parametrize("rtt_ms", [0.0, -1.0, math.nan, math.inf])
def test_a_round_trip_takes_some_time(rtt_ms: float) -> None:
    with pytest.raises(ValueError, match="rtt_ms"):
        moved(Coordinate(), Coordinate(), rtt_ms, 0.5)
