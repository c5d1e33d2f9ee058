from __future__ import annotations

import pytest

from fusion.swarm.thin.addresses import Target, dialable, parse
from fusion.swarm.transport import PeerId

PEER = PeerId("12D3KooWDfrtqT6WmundLAipkqtaXrBRUXUsaAVxdVmnpVcDyJve")


@pytest.mark.parametrize(
    ("where", "host", "port"),
    [
        ("/ip4/203.0.113.7/tcp/31337", "203.0.113.7", 31337),
        ("/ip6/2001:db8::1/tcp/1", "2001:db8::1", 1),
        ("/dns/peer.example/tcp/65535", "peer.example", 65535),
        ("/dns4/peer.example/tcp/443", "peer.example", 443),
    ],
)
def test_what_can_be_dialled(where: str, host: str, port: int) -> None:
    assert parse(f"{where}/p2p/{PEER}") == Target(host, port, PEER)


@pytest.mark.parametrize(
    "address",
    [
        *("", PEER, f"/p2p/{PEER}", f"ip4/1.2.3.4/tcp/1/p2p/{PEER}", "/ip4/1.2.3.4/tcp/1"),
        *(f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}x", f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p-circuit"),
        *(f"/ip4/1.2.3.4/tcp/{port}/p2p/{PEER}" for port in ("0", "65536", "x", "-1", "²", "9" * 5000)),
        *(f"/ip4/1.2.3.4/{rest}/p2p/{PEER}" for rest in ("udp/1/quic-v1", "tcp/1/ws", "tcp", "")),
        f"/ip4//tcp/1/p2p/{PEER}",
    ],
)
def test_what_cannot_is_said_in_one_line(address: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(address)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_of_several_those_that_can() -> None:
    ways = (f"/ip4/1.2.3.4/udp/1/quic-v1/p2p/{PEER}", f"/ip4/1.2.3.4/tcp/2/p2p/{PEER}")
    assert dialable(ways) == (Target("1.2.3.4", 2, PEER),)
