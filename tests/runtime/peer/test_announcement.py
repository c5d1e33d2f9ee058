"""What a peer says about itself is something that the directory takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fusion.dag.placement.speeds import Speeds
from fusion.runtime.job.context import Context
from fusion.runtime.job.memory_budget import MemoryBudget
from fusion.runtime.peer.announcement import record_of
from fusion.runtime.peer.capability import Capability
from fusion.swarm.directory.sealing import encode
from fusion.swarm.identity import Identity

PEER = Identity.generate().peer_id
# As a laptop has them that listens for TCP and QUIC, over IPv4 and IPv6.
MANY = tuple(
    f"/{host}/{port}/p2p/{PEER}"
    for host in ("ip4/192.168.1.20", "ip4/10.8.0.2", *(f"ip6/2001:db8::{n}" for n in range(6)))
    for port in ("tcp/31337", "udp/31337/quic-v1")
)
LONG = f"/dns4/{'a' * 250}/tcp/1/p2p/{PEER}"


@pytest.mark.parametrize(
    ("addresses", "announced"),
    [(MANY[:12], MANY[:12]), (MANY, MANY[:12]), ((LONG, *MANY), MANY[:12]), ((LONG,), ())],
)
def test_of_more_addresses_than_a_record_has_room_for_the_most_useful_are_announced(
    addresses: tuple[str, ...], announced: tuple[str, ...]
) -> None:
    transport = cast("Any", SimpleNamespace(addresses=addresses))
    context = Context(
        peer_id=PEER, transport=transport, directory=cast("Any", None), leases=cast("Any", None),
        worker=None, blobs=cast("Any", None), memory=MemoryBudget(1 << 30),
    )  # fmt: skip
    speeds = Speeds.uniform(1e9, 1e9)
    record = record_of(context, Capability("cpu", speeds, 1 << 30, 2.0), started_at=0.0)
    assert record.addresses == announced
    encode(record)
