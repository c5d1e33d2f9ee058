from __future__ import annotations

import pytest

from fusion.swarm.idle_connections import ConnectionLimits, Connections

NET, OTHER = "192.0.2.0/24", "198.51.100.0/24"


def peers(*names: str, subnet: str | None = None) -> list[tuple[bytes, str | None]]:
    return [(name.encode(), subnet) for name in names]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def of(**limits: int) -> tuple[Connections, Clock]:
    clock = Clock()
    return Connections(ConnectionLimits(**limits), clock), clock


def test_idle_ones_are_limited_in_all_and_the_newest_stay() -> None:
    found, _ = of(in_all=2)
    assert found.surplus(peers("a", "b"), set()) == []
    assert set(found.surplus(peers("a", "b", "c", "d"), set())) == {b"a", b"b"}
    assert found.surplus(peers("c", "d"), set()) == []


def test_idle_ones_are_limited_for_a_public_network() -> None:
    found, _ = of(per_subnet=1, in_all=4)
    crowd, others = peers("a", "b", subnet=NET), peers("c", subnet=OTHER) + peers("d", "e")
    assert len(found.surplus(crowd + others, set())) == 1
    assert found.surplus(crowd[:1] + others, set()) == []


def test_a_busy_peer_stays_and_counts_for_nothing() -> None:
    found, _ = of(in_all=1)
    assert found.surplus(peers("a", "b", "c"), {b"a", b"b"}) == []
    assert found.surplus(peers("a", "b", "c", "d"), {b"a", b"b"}) in ([b"c"], [b"d"])


def test_who_was_of_use_lately_outstays_who_never_was() -> None:
    found, clock = of(in_all=2)
    found.use(b"a")
    found.use(b"b")
    found.use(b"a")
    found.surplus(peers("a", "b"), set())
    assert found.surplus(peers("a", "b", "c"), set()) == [b"c"]
    found.use(b"c")
    assert found.surplus(peers("a", "b", "c"), set()) == [b"b"]
    clock.now += 120.0
    assert found.surplus(peers("a", "c", "d"), set()) in ([b"a"], [b"c"])


def test_a_peer_of_many_connections_is_given_up_though_it_is_busy() -> None:
    found, _ = of(per_peer=2, in_all=4)
    assert found.surplus(peers("a", "a", "b", "b"), {b"a"}) == []
    assert found.surplus(peers("a", "a", "a", "b", "b"), {b"a"}) == [b"a"]
    assert len(found.surplus(peers("b", "b", "c", "c", "d"), set())) == 1


def test_nothing_is_remembered_of_who_has_gone() -> None:
    found, clock = of(in_all=2)
    found.use(b"a")
    found.surplus(peers("b"), set())
    clock.now += 120.0
    found.surplus([], set())
    assert not found._used and not found._since


def test_a_bad_limit_is_named() -> None:
    with pytest.raises(ValueError, match="in_all must be positive"):
        ConnectionLimits(in_all=0)
