"""Which spare devices serve a stage beside its owner: a replica of the slowest stage raises the throughput."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fusion.dag.placement.network import Device
from fusion.dag.placement.segments import Segments

Floats = npt.NDArray[np.float64]


def replicate(
    segments: Segments, owners: Sequence[Device], spare: Sequence[Device]
) -> tuple[tuple[str, ...], ...]:
    """The replicas of each stage, as peers. `segments` has one segment a stage.

    Greedy: the stage with the lowest throughput for which a spare device has memory gets the one that runs it fastest.
    """
    stages = np.arange(len(owners))
    memory = segments.memory(stages, stages + 1, 1)

    def seconds(device: Device) -> Floats:
        return segments.passes(stages, stages + 1, device.speeds.seconds)[0]

    throughput = np.array([1 / max(float(seconds(d)[s]), 1e-12) for s, d in enumerate(owners)])
    replicas: list[list[str]] = [[] for _ in owners]
    spare_seconds = {d.peer: (d, seconds(d)) for d in spare}
    while spare_seconds:
        for stage in np.argsort(throughput, kind="stable").tolist():
            fitting = [
                (float(t[stage]), peer)
                for peer, (d, t) in spare_seconds.items()
                if memory[stage] <= d.memory_bytes
            ]
            if fitting:
                seconds_there, peer = min(fitting)
                break
        else:
            break
        del spare_seconds[peer]
        replicas[stage].append(peer)
        throughput[stage] += 1 / max(seconds_there, 1e-12)
    return tuple(tuple(peers) for peers in replicas)
