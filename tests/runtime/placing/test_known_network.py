"""What placement is told of links: what was measured first, then what follows from it, then a guess."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from fusion.dag.placement.network import UNKNOWN_LINK
from fusion.runtime.placing.known_network import known_network
from fusion.runtime.placing.link_guess import SAME_MACHINE, SAME_NETWORK
from fusion.swarm.directory.records import LinkRecord, Pair, PeerRecord
from fusion.swarm.links.view import BYTES_PER_MBIT, link_view
from fusion.swarm.transport import PeerId

A, B, C = PeerId("A"), PeerId("B"), PeerId("C")


def peer(name: PeerId, host: str, **known: float | tuple[float, ...]) -> PeerRecord:
    made = PeerRecord(
        peer=name, name=name, addresses=(f"/ip4/{host}/tcp/1",), role="peer", device="cpu", flops_per_second=0.0,
        memory_bytes=9, free_memory_bytes=5, software="0", opset=1, started_at=0.0,
    )  # fmt: skip
    return replace(made, **known)  # type: ignore[arg-type]


def test_what_was_measured_comes_before_what_is_known_of_lines_and_that_before_a_guess() -> None:
    peers = [
        peer(A, "192.168.1.1", up_mbps=50.0),
        peer(B, "192.168.1.2", down_mbps=30.0),
        peer(C, "1.2.3.4"),
    ]
    records = [LinkRecord(peer=A, pairs=(Pair(C, 80.0, 20.0, 1.0),))]
    known = known_network(peers, link_view(peers, records))
    network = known.network
    there = network.link("A", "C")
    assert (there.alpha_seconds, there.bytes_per_second) == (0.04, 20 * BYTES_PER_MBIT)
    back = network.link("C", "A")  # the round trip is the same both ways; of the rate nothing is known
    assert (back.alpha_seconds, back.bytes_per_second) == (0.04, UNKNOWN_LINK.bytes_per_second)
    lines = network.link("A", "B")
    assert lines.alpha_seconds == SAME_NETWORK.alpha_seconds
    assert lines.bytes_per_second == 30 * BYTES_PER_MBIT
    assert network.link("B", "C") == UNKNOWN_LINK
    assert known.known("A", "C") and not known.known("C", "A") and not known.known("A", "B")
    device = network.device("A")
    assert (device.flops_per_second, device.memory_bytes) == (1.0, 5)
    assert (device.up_bytes_per_second, device.down_bytes_per_second) == (50 * BYTES_PER_MBIT, inf)


def test_a_line_is_no_slower_than_the_fastest_link_that_was_measured_over_it() -> None:
    peers = [peer(A, "1.1.1.1", up_mbps=5.0), peer(B, "2.2.2.2", down_mbps=5.0)]
    network = known_network(
        peers, link_view(peers, [LinkRecord(peer=A, pairs=(Pair(B, 10.0, 80.0, 1.0),))])
    ).network
    assert network.rate("A", "B") == 80 * BYTES_PER_MBIT


def test_a_round_trip_that_nobody_measured_follows_from_coordinates() -> None:
    peers = [
        replace(peer(A, "1.1.1.1"), coordinate=(0.0, 0.0, 5.0), coordinate_error=0.1),
        replace(peer(B, "2.2.2.2"), coordinate=(30.0, 40.0, 5.0), coordinate_error=0.1),
    ]
    network = known_network(peers, link_view(peers, [])).network
    assert network.link("A", "B").alpha_seconds == pytest.approx(0.03)
    assert network.link("A", "B").bytes_per_second == UNKNOWN_LINK.bytes_per_second


def test_a_rate_at_which_nobody_looks_closer_is_a_lower_bound() -> None:
    peers = [peer(A, "1.1.1.1", up_mbps=300.0), peer(B, "1.1.1.1", down_mbps=300.0), peer(C, "2.2.2.2")]
    records = [LinkRecord(peer=A, pairs=(Pair(B, 0.2, 300.0, 1.0), Pair(C, 0.2, 300.0, 1.0)))]
    network = known_network(peers, link_view(peers, records)).network
    assert network.rate("A", "B") == SAME_MACHINE.bytes_per_second
    assert network.rate("A", "C") == 300 * BYTES_PER_MBIT
    assert network.device("A").up_bytes_per_second == inf


def test_what_a_peer_measured_of_itself_is_used_and_nonsense_is_not() -> None:
    parts = (1e-11, 2e-11, 3e-11, 1e-10, 1e-10, 1e-10, 1e-9, 1e-4, 1e-6, 1e-10)
    network = known_network(
        [peer(A, "1.1.1.1", speeds=parts), peer(B, "2.2.2.2", speeds=(0.0,) * 10)],
        link_view([], []),
    ).network
    assert network.device("A").speeds.parts == parts
    assert network.device("B").measured is None  # no operator takes no time


def test_peers_of_one_machine_share_its_cores() -> None:
    hosts = {A: "127.0.0.1", B: "127.0.0.1", C: "1.2.3.4"}
    peers = [peer(name, host, cores=2.0) for name, host in hosts.items()]
    network = known_network(peers, link_view([], [])).network
    a, b, c = (network.device(name).machine for name in hosts)
    assert a == b and a.cores == 2.0 and c.name != a.name
    assert known_network([peer(A, "1.2.3.4")], link_view([], [])).network.device("A").machine.cores == inf


def test_links_are_worked_out_for_the_pairs_that_are_asked_for() -> None:
    """Anybody may list peers by the thousand, whose pairs would be millions."""
    peers = [
        peer(PeerId(f"{n}"), f"1.{n // 250}.{n % 250}.1", up_mbps=8.0, down_mbps=8.0) for n in range(4000)
    ]
    network = known_network(peers, link_view(peers, [])).network
    assert len(network.links) == 4000 * 3999 and network.rate("17", "3999") == 8 * BYTES_PER_MBIT
    assert network.link("17", "17") == network.link("17", "nobody") == UNKNOWN_LINK
    few = known_network(peers[:3], link_view(peers[:3], [])).network
    assert set(few.links) == {(a, b) for a in "012" for b in "012" if a != b}
    assert few.pair_rates[0, 1] == 8 * BYTES_PER_MBIT
