"""The devices of a very large swarm that the search considers: its tables grow with the square of their number."""

from __future__ import annotations

from collections.abc import Callable

from fusion.dag.placement.network import Device, Network

LIMIT = 1024  # devices


def shortlist(network: Network, limit: int = LIMIT) -> Network:
    """At most `limit` devices: half of them the fastest, a quarter those with most memory, a quarter those with the fastest
    lines."""

    def speed(device: Device) -> float:
        return device.flops_per_second

    def memory(device: Device) -> float:
        return device.memory_bytes

    def line(device: Device) -> float:
        return min(device.up_bytes_per_second, device.down_bytes_per_second)

    if len(network.devices) <= limit:
        return network
    chosen = set[str]()
    ranks: tuple[tuple[Callable[[Device], float], int], ...] = (
        (speed, limit // 2),
        (memory, limit // 4),
        (line, limit // 4),
    )
    for rank, count in ranks:
        remaining = sorted((d for d in network.devices if d.peer not in chosen), key=speed, reverse=True)
        chosen.update(d.peer for d in sorted(remaining, key=rank, reverse=True)[:count])
    return network.only(chosen)
