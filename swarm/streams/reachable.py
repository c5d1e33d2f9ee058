"""Which of its addresses others can dial, the most widely useful first."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# Host-only networks of containers and virtual machines: each machine has the same ones, so that a peer that dialled such an
# address would reach itself.
_VIRTUAL = ("docker", "br-", "veth", "virbr", "lxcbr", "lxdbr", "incusbr", "cni", "flannel", "cali", "podman", "vboxnet", "vmnet")  # fmt: skip
# Documentation addresses (RFC 5737, 3849), to ask the system for the source address of its default route; nothing is sent.
_FAR_AWAY = ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1"))

_DEFAULT_ROUTE, _NEAR, _PUBLIC, _RELAYED = range(4)


@dataclass(frozen=True, kw_only=True)
class LocalNetwork:
    """`interfaces`: each IP address of this machine and the interface that has it; `default`: those of its default
    routes."""

    interfaces: Mapping[str, str] = field(default_factory=dict)
    default: frozenset[str] = frozenset()


def reachable(addresses: Iterable[str], network: LocalNetwork) -> tuple[str, ...]:
    """The multiaddrs at which others can dial us, the most useful first: that of the default route, those of the local network,
    those seen by others from outside, relayed ones. Loopback ones only where there is no other."""
    ranks = {address: _rank(address, network) for address in addresses}
    found = [(rank, "/tcp/" not in address, address) for address, rank in ranks.items() if rank]
    return tuple(address for *_, address in sorted(found)) or tuple(filter(is_loopback, ranks))


def is_loopback(address: str) -> bool:
    ip = _ip(address)
    return ip is not None and ip.is_loopback


def is_public(address: str) -> bool:
    """Whether the multiaddr is valid everywhere, and not only in our own network."""
    ip = _ip(address)
    return ip is None or ip.is_global


def local_network() -> LocalNetwork:
    """This machine's interfaces and default routes now; empty where the system does not report them."""
    import psutil  # imported here: the command line only parses addresses

    interfaces: dict[str, str] = {}
    try:
        for name, entries in psutil.net_if_addrs().items():
            interfaces |= {entry.address.partition("%")[0]: name for entry in entries}
    except (OSError, psutil.Error):
        interfaces = {}
    default = set()
    for family, far_away in _FAR_AWAY:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far_away, 9))
                default.add(probe.getsockname()[0])
        except OSError:  # no route of that IP version
            continue
    return LocalNetwork(interfaces=interfaces, default=frozenset(default))


def _rank(address: str, network: LocalNetwork) -> tuple[int, int] | None:
    """The sort key, lower is more useful; None for an address that is useless to others."""
    if "/p2p-circuit" in address:
        return _RELAYED, 0
    ip = _ip(address)
    if ip is None:
        return _PUBLIC, 0
    if ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast:
        return None
    if str(ip) in network.default:
        return _DEFAULT_ROUTE, ip.version
    if network.interfaces.get(str(ip), "").startswith(_VIRTUAL):
        return None
    return (_PUBLIC if ip.is_global else _NEAR), ip.version


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a multiaddr begins with; None where it begins with a name."""
    parts = address.split("/")
    try:
        return ipaddress.ip_address(parts[2]) if parts[1] in ("ip4", "ip6") else None
    except (IndexError, ValueError):
        return None
