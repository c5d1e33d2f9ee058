"""Guesses from the addresses of two peers: whether they run on one machine, and the latency and rate of a link between them that was
not measured."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from fusion.dag.placement.network import UNKNOWN_LINK, Link
from fusion.swarm.directory.records import PeerRecord

SAME_MACHINE = Link(alpha_seconds=0.0002, bytes_per_second=250e6)
SAME_NETWORK = Link(alpha_seconds=0.001, bytes_per_second=50e6)


def link_guess(peers: Sequence[PeerRecord]) -> Callable[[str, str], Link]:
    """A guess for any two of `peers`: same machine, same private network, or a home uplink."""
    beyond = {str(peer.peer): frozenset(a for a in _addresses(peer) if not a.is_loopback) for peer in peers}
    private = {name: frozenset(_network(a) for a in found if a.is_private) for name, found in beyond.items()}

    def guess(one: str, two: str) -> Link:
        # Peers announce only loopback where they can be reached only there.
        if not beyond[one].isdisjoint(beyond[two]) or not (beyond[one] or beyond[two]):
            return SAME_MACHINE
        return UNKNOWN_LINK if private[one].isdisjoint(private[two]) else SAME_NETWORK

    return guess


def machines_of(peers: Sequence[PeerRecord]) -> dict[str, str]:
    """By peer, a name of its machine: peers that announce the same addresses have the same."""
    found: dict[str, str] = {}
    for peer in peers:
        addresses = _addresses(peer)
        beyond = sorted(str(a) for a in addresses if not a.is_loopback)
        found[peer.peer] = " ".join(beyond) if beyond or addresses else peer.peer
    return found


def _network(address: ipaddress.IPv4Address) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network((address, 24), strict=False)


def _addresses(peer: PeerRecord) -> frozenset[ipaddress.IPv4Address]:
    found = set()
    for address in peer.addresses:
        parts = address.split("/")
        if len(parts) > 2 and parts[1] == "ip4":
            try:
                found.add(ipaddress.IPv4Address(parts[2]))
            except ValueError:
                continue
    return frozenset(found)
