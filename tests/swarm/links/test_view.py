from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.directory_records import link_record, peer_record

from fusion.swarm.directory.records import Pair
from fusion.swarm.identity import Identity
from fusion.swarm.links.view import AGREEING, BYTES_PER_MBIT, LinkView, link_view
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


RATE = st.floats(0.001, 1e7)


@given(honest=RATE, reported=RATE, trip=st.floats(0.1, 1e5), claimed=st.floats(0.001, 1e5))
def test_no_link_is_better_than_the_honest_end_found_it(
    honest: float, reported: float, trip: float, claimed: float
) -> None:
    """Alice is honest; bob lies about what he sends, and about the round trip."""
    records = [
        link_record(ALICE, pairs=(Pair(B, trip, 0.0, 0.0, honest),)),
        link_record(BOB, pairs=(Pair(A, claimed, reported, 0.0, 0.0),)),
    ]
    liar = link_view(
        [PEERS[0], peer_record(BOB, up_mbps=1e7, down_mbps=1e7, flops_per_second=1e21)], records
    ).link(B, A)
    assert liar.bytes_per_second is not None and liar.rtt_seconds is not None
    assert liar.bytes_per_second <= honest * BYTES_PER_MBIT
    assert liar.rtt_seconds * 1e3 >= trip / AGREEING * 0.999


def test_what_arrived_is_a_measurement_where_the_sender_says_nothing() -> None:
    view = link_view(PEERS, [link_record(ALICE, pairs=(Pair(B, 50.0, 12.0, 0.0, 3.0),))])
    assert view.link(B, A).rate_measured and view.link(B, A).bytes_per_second == pytest.approx(3e6 / 8)
    assert view.link(A, B).bytes_per_second == pytest.approx(12e6 / 8)


def test_a_line_carries_what_its_owner_measured_over_it() -> None:
    peers = [peer_record(ALICE, up_mbps=8e-6, down_mbps=8e-6), peer_record(BOB, up_mbps=90.0), PEERS[2]]
    measured = link_record(ALICE, pairs=(Pair(B, 50.0, 40.0, 0.0, 30.0),))
    view = link_view(peers, [measured])
    assert view.link(A, C).bytes_per_second == pytest.approx(40 * BYTES_PER_MBIT)
    assert view.link(C, A).bytes_per_second == pytest.approx(30 * BYTES_PER_MBIT)
    less = link_view(peers, [measured, link_record(BOB, pairs=(Pair(A, 50.0, 25.0, 0.0, 20.0),))])
    assert less.link(A, C).bytes_per_second == pytest.approx(20 * BYTES_PER_MBIT)
    assert less.link(C, A).bytes_per_second == pytest.approx(25 * BYTES_PER_MBIT)


def test_what_others_say_of_a_line_raises_it_for_nobody() -> None:
    peers = [peer_record(ALICE, up_mbps=20.0, down_mbps=30.0), *PEERS[1:]]
    view = link_view(peers, [link_record(BOB, pairs=(Pair(A, 50.0, 1e6, 0.0, 1e6),))])
    assert view.link(A, C).bytes_per_second == pytest.approx(20 * BYTES_PER_MBIT)
    assert view.link(C, A).bytes_per_second == pytest.approx(30 * BYTES_PER_MBIT)
