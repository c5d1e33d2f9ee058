"""What a network in a box may be, and what the three networks that we call ours are."""

from __future__ import annotations

import math

import pytest
from box.network_file import NETWORKS, read_network
from box.spec import Host, Link, NetworkSpec

A, B = Host(name="a"), Host(name="b")


def test_a_pair_without_a_link_has_the_default() -> None:
    spec = NetworkSpec(hosts=(A, B), links={("a", "b"): Link(rate_mbps=8)}, default=Link(delay_ms=5))
    assert (spec.link("a", "b").rate_mbps, spec.link("a", "b").delay_ms) == (8, 0)
    assert (spec.link("b", "a").rate_mbps, spec.link("b", "a").delay_ms) == (math.inf, 5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Link(rate_mbps=0), "rate_mbps"),
        (lambda: Link(rate_mbps=math.nan), "rate_mbps"),
        (lambda: Link(delay_ms=-1), "delay_ms"),
        (lambda: Link(queue_ms=0), "queue_ms"),
        (lambda: Link(loss=1.1), "loss"),
        (lambda: Host(name="a", up_mbps=-8), "up_mbps of a"),
        (lambda: NetworkSpec(hosts=(A, A)), "name"),
        (lambda: NetworkSpec(hosts=(A, B), links={("a", "c"): Link()}), "c"),
        (lambda: NetworkSpec(hosts=(A, B), links={("a", "a"): Link()}), "two"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]


def test_the_networks_are_those_of_the_design() -> None:
    a, b, c = (read_network(NETWORKS / f"{name}.toml") for name in "abc")
    assert [len(spec.hosts) for spec in (a, b, c)] == [6, 6, 6]
    inside, across = a.link("west-1", "west-2"), a.link("west-1", "east-3")
    assert (inside.rate_mbps, 2 * inside.delay_ms, across.rate_mbps, 2 * across.delay_ms) == (1000, 1, 80, 20)
    assert [(host.down_mbps, host.up_mbps) for host in b.hosts][::5] == [(300, 100), (20, 8)]
    round_trips = {2 * link.delay_ms for link in b.links.values()}
    assert (min(round_trips), max(round_trips)) == (10, 60)
    assert c.link("pair-1", "pair-2").rate_mbps == 10_000 and c.link("trio-1", "trio-2").rate_mbps == 1000
    assert next(host for host in c.hosts if host.name == "straggler").up_mbps == 8
