"""The network of a swarm file, the same one that `fusion-peer plan --swarm` reads, as one for a box."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

from box.spec import QUEUE_MS, Host, Link, NetworkSpec

from fusion.runtime.placing.swarm_file import load

NETWORKS = Path(__file__).parent / "networks"


def read_network(path: Path) -> NetworkSpec:
    """The network whose hosts are the file's peers. Raises JobError with one line that names the wrong field."""
    swarm = load(path)
    links = {}
    for ends in permutations((peer.name for peer in swarm.peers), 2):
        pair = swarm.pair(*ends)
        queue_ms = QUEUE_MS if pair.queue_ms is None else pair.queue_ms
        links[ends] = Link(rate_mbps=pair.mbps, delay_ms=pair.rtt_ms / 2, queue_ms=queue_ms, loss=pair.loss)
    hosts = tuple(
        Host(name=peer.name, up_mbps=peer.up_mbps or math.inf, down_mbps=peer.down_mbps or math.inf)
        for peer in swarm.peers
    )
    return NetworkSpec(hosts=hosts, links=links)
