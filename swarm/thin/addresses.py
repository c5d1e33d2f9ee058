"""Which multiaddrs a thin client can dial: a host by number or name, and a TCP port. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.swarm.identity import is_peer_id
from fusion.swarm.transport import PeerId

HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    peer: PeerId  # that has to answer there


def parse(address: str) -> Target:
    """The target of a full multiaddr. Raises ValueError, in one line, for other texts, and for addresses that only a peer can dial."""
    where, _, peer = address.rpartition("/p2p/")
    if not is_peer_id(peer) or not where.startswith("/"):
        raise ValueError(f"{address[:200]!r} is not a multiaddr that ends in /p2p/<peer id>")
    parts = where.split("/")
    match parts[1:]:
        case [kind, host, "tcp", port] if kind in HOSTS and host and _is_port(port):
            return Target(host, int(port), PeerId(peer))
    raise ValueError(f"{address[:200]!r}: a thin client dials /ip4, /ip6 or /dns addresses over /tcp")


def dialable(addresses: tuple[str, ...]) -> tuple[Target, ...]:
    """The targets of those of a peer's addresses that can be dialled, in their order."""
    found = []
    for address in addresses:
        try:
            found.append(parse(address))
        except ValueError:
            continue
    return tuple(found)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536
