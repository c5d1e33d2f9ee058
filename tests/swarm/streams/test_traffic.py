from __future__ import annotations

from fusion.swarm.streams.traffic import MAX_PEERS, TrafficCounter
from fusion.swarm.transport import PeerId, Traffic


def test_ten_thousand_identities_do_not_push_a_partner_out() -> None:
    counter = TrafficCounter()
    counter.sent(PeerId("partner"), 1000)
    for stranger in range(10_000):
        counter.received(PeerId(f"stranger {stranger}"), 10)
    counter.received(PeerId("partner"), 5)
    assert counter.snapshot()[PeerId("partner")] == Traffic(1000, 5)
    assert len(counter.snapshot()) <= MAX_PEERS
    assert PeerId("stranger 9999") in counter.snapshot()
