"""What addresses alone tell of two peers: whether they are one machine, and what a link between them is probably like, until
somebody has measured it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from itertools import permutations

from fusion.dag.placement.network import UNKNOWN_LINK, Link
from fusion.swarm.directory.records import PeerRecord

SAME_MACHINE = Link(alpha_seconds=0.0002, bytes_per_second=250e6)
SAME_NETWORK = Link(alpha_seconds=0.001, bytes_per_second=50e6)


def guess_links(peers: Sequence[PeerRecord]) -> dict[tuple[str, str], Link]:
    """A guess for every ordered pair: same machine, same private network, or a home uplink."""
    addresses = {peer.peer: _addresses(peer) for peer in peers}
    return {(a.peer, b.peer): _guess(addresses[a.peer], addresses[b.peer]) for a, b in permutations(peers, 2)}


def machines_of(peers: Sequence[PeerRecord]) -> dict[str, str]:
    """By peer, a name that those have in common who announce the same addresses, which is who runs on one machine."""
    found: dict[str, str] = {}
    for peer in peers:
        addresses = _addresses(peer)
        beyond = sorted(str(a) for a in addresses if not a.is_loopback)
        found[peer.peer] = " ".join(beyond) if beyond or addresses else peer.peer
    return found


def _guess(one: frozenset[ipaddress.IPv4Address], two: frozenset[ipaddress.IPv4Address]) -> Link:
    ones, twos = ({a for a in found if not a.is_loopback} for found in (one, two))
    if ones & twos or not (
        ones or twos
    ):  # nothing but loopback is announced where nothing else can be reached
        return SAME_MACHINE
    if {_network(a) for a in ones if a.is_private} & {_network(a) for a in twos if a.is_private}:
        return SAME_NETWORK
    return UNKNOWN_LINK


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
