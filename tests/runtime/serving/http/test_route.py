"""The route of an answer, as a stream tells of it."""

from __future__ import annotations

from fusion.runtime.serving.http.route import route_json
from fusion.swarm.directory.records import LinkRecord, Pair
from fusion.swarm.identity import Identity
from fusion.swarm.links.view import link_view

US, ONE, TWO = (Identity.generate().peer_id for _ in range(3))


def test_a_hop_is_told_with_its_round_trip_and_the_last_one_goes_back_to_the_first() -> None:
    view = link_view(
        (),
        [
            LinkRecord(
                peer=ONE,
                pairs=(
                    Pair(US, rtt_ms=2.0, mbps=1.0, age_seconds=0.0),
                    Pair(TWO, rtt_ms=41.25, mbps=1.0, age_seconds=0.0),
                ),
            )
        ],
    )
    found = route_json(3, US, (ONE, ONE, TWO), view)
    assert found["index"] == 3
    assert (found["gateway"]["peer"], found["gateway"]["round_trip_ms"]) == (US, 2.0)
    hops = [(hop["peer"], hop["round_trip_ms"]) for hop in found["stages"]]
    assert hops == [(ONE, None), (ONE, 41.25), (TWO, 41.25)]  # no way at all between two stages of one peer


def test_what_nobody_has_measured_is_null() -> None:
    found = route_json(0, US, (ONE, TWO), link_view((), ()))
    assert {hop["round_trip_ms"] for hop in (found["gateway"], *found["stages"])} == {None}
