"""Which spare devices serve a stage beside its owner: where a stage is slowest, one more copy of it lets sessions through."""

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
    """By stage: the spare devices that hold it too. `segments` are those of the stages themselves, bound by bound.

    One at a time, the stage that gets fewest sequences through gets the device that runs it fastest; a device that
    has memory for no stage stays spare, and one goes where it fits.
    """
    stages = np.arange(len(owners))
    memory = segments.memory(stages, stages + 1, 1)

    def seconds(device: Device) -> Floats:
        return segments.passes(stages, stages + 1, device.speeds.seconds)[0]

    through = np.array([1 / max(float(seconds(d)[s]), 1e-12) for s, d in enumerate(owners)])
    found: list[list[str]] = [[] for _ in owners]
    left = {d.peer: (d, seconds(d)) for d in spare}
    while left:
        for stage in np.argsort(through, kind="stable").tolist():
            fitting = [
                (float(t[stage]), peer) for peer, (d, t) in left.items() if memory[stage] <= d.memory_bytes
            ]
            if fitting:
                taken, peer = min(fitting)
                break
        else:
            break
        del left[peer]
        found[stage].append(peer)
        through[stage] += 1 / max(taken, 1e-12)
    return tuple(tuple(peers) for peers in found)
