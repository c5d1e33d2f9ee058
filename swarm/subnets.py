"""The public network of an address: whoever rents a network has many addresses in it, and can have many peer ids at each. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

PREFIXES = {4: 24, 6: 48}  # the smallest network that one customer usually has
MOST_IN_A_BUCKET = 2


def subnet_of(address: str) -> str | None:
    """The network of a multiaddr; None for one without a public IP address: private networks and this machine have few addresses and no
    strangers. None, too, for a relayed one, whose address is the relay's."""
    if "/p2p-circuit" in address:
        return None
    parts = address.split("/")
    try:
        ip = ipaddress.ip_address(parts[2]) if parts[1] in ("ip4", "ip6") else None
    except (IndexError, ValueError):
        return None
    if ip is None or not ip.is_global:
        return None
    return str(ipaddress.ip_network((ip, PREFIXES[ip.version]), strict=False))


def may_enter(subnets: Iterable[str | None], subnet: str | None) -> bool:
    """Whether a node of `subnet` may join a bucket with nodes of `subnets` (as in Ethereum's discovery)."""
    return subnet is None or sum(other == subnet for other in subnets) < MOST_IN_A_BUCKET
