from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.swarm.links.routes import Demand, Holder, LinkTime, cheapest, seconds
from fusion.swarm.transport import PeerId

A, B, C, D = map(PeerId, "ABCD")


def holder(peer: PeerId, compute: float = 0.01, queue: float = 0.0) -> Holder:
    return Holder(peer=peer, compute_seconds=compute, queue_seconds=queue)


def links(**slow: float) -> object:
    """1 ms everywhere, but for the pairs given."""
    return lambda one, two: LinkTime(slow.get(one + two, 0.001), 1e-8)


@given(st.data())
@settings(max_examples=examples(80), deadline=None)
def test_no_route_is_cheaper(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    cost = st.floats(0, 1)
    stages = [
        [
            holder(PeerId(name), data.draw(cost), data.draw(cost))
            for name in data.draw(st.lists(st.sampled_from("ABCDE"), min_size=1, max_size=3, unique=True))
        ]
        for _ in range(count)
    ]
    table = {
        (a, b): LinkTime(data.draw(cost), data.draw(st.floats(0, 1e-3)))
        for a, b in product("ABCDE", repeat=2)
    }
    demand = Demand(
        hop_bytes=tuple(data.draw(st.floats(0, 1e3)) for _ in range(count - 1)),
        start=data.draw(st.sampled_from([None, A])),
        start_bytes=10.0,
        answer_bytes=20.0,
        ring=data.draw(st.booleans()),
        ring_bytes=8.0,
    )
    best = cheapest(stages, demand, lambda a, b: table[a, b])
    every = [seconds(route, demand, lambda a, b: table[a, b]) for route in product(*stages)]
    assert best.seconds == pytest.approx(min(every))


def test_a_slow_link_is_gone_round() -> None:
    stages = [[holder(A)], [holder(B), holder(C)]]
    demand = Demand(hop_bytes=(1e6,))
    assert cheapest(stages, demand, links()).peers == (A, B)  # type: ignore[arg-type]
    assert cheapest(stages, demand, links(AB=0.5)).peers == (A, C)  # type: ignore[arg-type]


def test_the_ring_closes_over_a_link_too() -> None:
    stages = [[holder(A), holder(B)], [holder(C)]]
    demand = Demand(hop_bytes=(8.0,), ring=True)
    assert cheapest(stages, demand, links(CA=0.2)).peers == (B, C)  # type: ignore[arg-type]


def test_bad_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="every stage needs a holder"):
        cheapest([[holder(A)], []], Demand(hop_bytes=(0.0,)), links())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hop_bytes"):
        cheapest([[holder(A)]], Demand(hop_bytes=(0.0,)), links())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compute_seconds"):
        holder(A, -1.0)
