from __future__ import annotations

import pytest
from support.directory_records import link_record, peer_record

from fusion.swarm.directory.records import Pair
from fusion.swarm.identity import Identity
from fusion.swarm.links.view import LinkView, link_view
from fusion.swarm.transport import PeerId

ALICE, BOB, CAROL = (Identity.generate() for _ in range(3))
A, B, C = ALICE.peer_id, BOB.peer_id, CAROL.peer_id
PEERS = [
    peer_record(ALICE, up_mbps=20.0, down_mbps=100.0, coordinate=(0.0, 0.0, 5.0), coordinate_error=0.1),
    peer_record(BOB, up_mbps=8.0, coordinate=(30.0, 40.0, 1.0), coordinate_error=0.1),
    peer_record(CAROL),
]


def test_what_was_measured_counts_before_what_is_estimated() -> None:
    view = link_view(PEERS, [link_record(ALICE, pairs=(Pair(B, 50.0, 12.0, 3.0),))])
    there, back = view.link(A, B), view.link(B, A)
    assert there.measured and there.age_seconds == 3.0
    assert (there.rtt_seconds, there.bytes_per_second) == (pytest.approx(0.05), pytest.approx(1.5e6))
    assert back.rtt_measured and not back.rate_measured and not back.measured
    assert (back.rtt_seconds, back.bytes_per_second) == (
        pytest.approx(0.05),
        pytest.approx(1e6),
    )  # bob's uplink


def test_coordinates_stand_in_for_pings() -> None:
    link = link_view(PEERS, []).link(A, B)
    assert link.rtt_seconds == pytest.approx(0.056) and not link.rtt_measured


def test_of_what_nobody_knows_there_is_no_number() -> None:
    link = link_view(PEERS, []).link(C, B)
    assert (link.rtt_seconds, link.bytes_per_second, link.age_seconds) == (None, None, None)
    assert LinkView().link(PeerId("x"), PeerId("y")).bytes_per_second is None


def test_a_round_trip_is_the_same_both_ways() -> None:
    records = [
        link_record(ALICE, pairs=(Pair(B, 50.0, 0.0, 0.0),)),
        link_record(BOB, pairs=(Pair(A, 48.0, 5.0, 0.0),)),
    ]
    view = link_view(PEERS, records)
    assert view.link(A, B).rtt_seconds == view.link(B, A).rtt_seconds == pytest.approx(0.048)
    assert not view.link(A, B).rate_measured  # a rate has a direction
