"""Which addresses a peer tells others, and in which order."""

from __future__ import annotations

import socket

import pytest

from fusion.swarm.streams.reachable import LocalNetwork, is_loopback, is_public, local_network, reachable

LAPTOP = LocalNetwork(
    interfaces={
        "127.0.0.1": "lo",
        "192.168.1.5": "wlan0",
        "10.0.0.7": "eth0",
        "172.17.0.1": "docker0",
        "172.18.0.1": "br-0123456789ab",
        "169.254.3.4": "eth1",
        "fd00::5": "wlan0",
        "fe80::1": "wlan0",
    },
    default=frozenset({"192.168.1.5", "fd00::5"}),
)


def tcp(*hosts: str) -> list[str]:
    return [f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/4001/p2p/x" for host in hosts]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (["127.0.0.1", "10.0.0.7", "192.168.1.5"], ["192.168.1.5", "10.0.0.7"]),
        (["8.8.4.4", "127.0.0.1", "10.0.0.7"], ["10.0.0.7", "8.8.4.4"]),  # the router's comes last
        (["127.0.0.1", "172.17.0.1", "172.18.0.1", "169.254.3.4", "10.0.0.7"], ["10.0.0.7"]),
        (["::1", "fe80::1", "fd00::5", "192.168.1.5"], ["192.168.1.5", "fd00::5"]),
        (["100.64.0.9", "8.8.4.4"], ["100.64.0.9", "8.8.4.4"]),  # a network over the network
        (["127.0.0.1", "172.17.0.1", "169.254.3.4", "::1"], ["127.0.0.1", "::1"]),
        (["192.168.1.5", "192.168.1.5"], ["192.168.1.5"]),
        (["172.17.0.1"], []),
        ([], []),
    ],
)
def test_the_most_useful_addresses_come_first(seen: list[str], expected: list[str]) -> None:
    assert reachable(tcp(*seen), LAPTOP) == tuple(tcp(*expected))


def test_a_bridge_with_the_default_route_is_the_network() -> None:
    network = LocalNetwork(interfaces={"10.0.0.7": "br-lan"}, default=frozenset({"10.0.0.7"}))
    assert reachable(tcp("10.0.0.7"), network) == tuple(tcp("10.0.0.7"))


def test_an_unknown_machine_still_has_addresses() -> None:
    assert reachable(tcp("127.0.0.1", "10.0.0.7"), LocalNetwork()) == tuple(tcp("10.0.0.7"))


def test_tcp_goes_before_udp_names_before_relays() -> None:
    quic, name = "/ip4/192.168.1.5/udp/4001/quic-v1/p2p/x", "/dns4/peer.example/tcp/4001/p2p/x"
    relayed = "/ip4/8.8.8.8/tcp/1/p2p/relay/p2p-circuit/p2p/x"
    (direct,) = tcp("192.168.1.5")
    assert reachable([relayed, name, quic, direct], LAPTOP) == (direct, quic, name, relayed)
    assert is_public(name) and not is_public(direct) and not is_loopback(name)


def test_this_machine_says_which_addresses_it_has() -> None:
    network = local_network()
    assert network.interfaces.get("127.0.0.1")
    assert network.default <= set(network.interfaces)


def test_a_system_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("psutil.net_if_addrs", refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    assert local_network() == LocalNetwork()
