from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.swarm.directory.records import MAX_PAIRS
from fusion.swarm.links.probes import ProbeLine, ProbeReport
from fusion.swarm.links.table import SUM_SECONDS, LinkTable, OwnLine, after, corrected, held
from fusion.swarm.streams.link_estimate import FALL, RateEstimate
from fusion.swarm.transport import PeerId

MBPS = 1e6 / 8


def test_the_neighbours_that_stand_for_all_are_among_those_who_have_answered() -> None:
    table = LinkTable(PeerId("us"), candidates=2)
    for number in range(100):
        table.meet(PeerId(f"listed-{number}"), 0.0, answers=False)
    assert table.wanted(0.0) == []
    table.meet(PeerId("friend"), 0.0)
    assert table.wanted(0.0) == ["friend"] and table.listed(PeerId("listed-1"))
    table.meet(PeerId("friend"), 50.0, answers=False)
    table.forget(70.0)
    assert table.wanted(70.0) == ["friend"]  # it may be back
    table.forget(200.0)
    assert table.wanted(200.0) == []


def test_a_cut_is_believed_after_a_few_reports_of_little_traffic() -> None:
    known = RateEstimate(bytes_per_second=80 * MBPS, at=0.0)
    report = ProbeReport(
        size=256 * 1024, seconds=0.3, bytes_per_second=8 * MBPS, sure=True, sharers=1, together=8 * MBPS
    )
    for second in range(1, 5):
        known = after(known, report, report.together, float(second))
    assert known.bytes_per_second < 16 * MBPS
    tiny = ProbeReport(
        size=2048, seconds=0.01, bytes_per_second=8 * MBPS, sure=True, sharers=1, together=8 * MBPS
    )
    assert after(known, tiny, tiny.together, 5.0).bytes_per_second > 0.95 * known.bytes_per_second


def test_what_went_out_bears_a_report_out_and_raises_nothing() -> None:
    report = ProbeReport(
        size=1 << 20, seconds=1.0, bytes_per_second=4 * MBPS, sure=True, sharers=1, together=4 * MBPS
    )
    for known, sent, believed in ((80, 0, 4), (80, 8, 4), (80, 60, 30), (8, 60, 8), (0, 60, 4)):
        assert corrected(report, known * MBPS, sent * MBPS).bytes_per_second == believed * MBPS


def test_links_that_we_use_are_published_before_those_that_bring_us_something() -> None:
    table = LinkTable(PeerId("us"), candidates=2)
    for number in range(3 * MAX_PAIRS):
        peer = PeerId(f"peer-{number}")
        table.meet(peer, 0.0)
        neighbour = table.add(cast(ProbeLine, SimpleNamespace(peer=peer)))
        neighbour.answers.rtt = neighbour.answers.rtt.updated(0.0, 0.02, quiet=True)
        neighbour.traffic.active_at = float(number)
    for number in (3, 5):
        used = table.find(PeerId(f"peer-{number}"))
        assert used is not None
        used.traffic.sent_at = 1.0
    published = [pair.peer for pair in table.record(99.0).pairs]
    assert len(published) == MAX_PAIRS and set(published[:2]) == {"peer-3", "peer-5"}


@given(st.lists(st.floats(1.0, 1e9), min_size=1, max_size=30))
def test_a_rate_that_falls_in_steps_is_seen_to_have_fallen(rates: list[float]) -> None:
    stood = 0.0
    for rate in rates:
        stood = held(stood, rate)
        assert rate <= stood < FALL * rate or stood == rate


def test_an_own_line_carries_the_most_that_was_seen_since_it_fell() -> None:
    line = OwnLine()
    fast, slow = (
        RateEstimate(bytes_per_second=80 * MBPS, at=0.0),
        RateEstimate(bytes_per_second=8 * MBPS, at=5.0),
    )
    assert line.mbps([], 0.0) == 0.0
    line.add(1.0, 100 * MBPS)
    assert line.mbps([(0.0, fast), (5.0, slow)], 5.0) == pytest.approx(100)
    line.fell(5.0)
    assert line.mbps([(0.0, fast), (5.0, slow)], 5.0) == pytest.approx(8)
    line.add(5.0 + SUM_SECONDS, 12 * MBPS)
    assert line.mbps([(0.0, fast), (5.0, slow)], 8.0) == pytest.approx(12)
    assert line.mbps([(9.0, fast)], 9.0) == pytest.approx(80)  # it was measured again
