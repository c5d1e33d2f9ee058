"""What this machine can do, measured in a moment at start: the numbers a peer announces."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch

MEASURE_SECONDS = 0.05
LEAST_PRODUCTS = (
    12  # also where that takes longer: on a busy machine one that nothing interrupts is among so many
)
# A volunteer who says nothing lends half of what is free now: the machine stays usable.
LENT_SHARE = 0.5


@dataclass(frozen=True)
class Capability:
    device: str  # "cpu: 2 threads" or "cuda: NVIDIA ..."
    flops_per_second: float  # achieved on float32 matrix products of a transformer's size: lambda * peak
    memory_bytes: int


def measure(device: str, threads: int, memory_bytes: int | None) -> Capability:
    """Run a short matrix benchmark on `device` in the calling thread (the worker's). About 0.1 s."""
    cuda = device.startswith("cuda")
    name = (
        f"cuda: {torch.cuda.get_device_name(device)}"
        if cuda
        else f"cpu: {threads} thread{'s'[: threads > 1]}"
    )
    if memory_bytes is None:
        free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available
        memory_bytes = int(free * LENT_SHARE)
    return Capability(name, _matrix_flops_per_second(device, 4096 if cuda else 384), memory_bytes)


def _matrix_flops_per_second(device: str, width: int) -> float:
    left = torch.ones(width, width, device=device)
    right = torch.ones(width, width, device=device)

    def product() -> None:
        torch.mm(left, right)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)

    product()  # the first call sets up the library
    seconds, until = list[float](), time.perf_counter() + MEASURE_SECONDS
    while len(seconds) < LEAST_PRODUCTS or time.perf_counter() < until:
        began = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - began)
    return 2.0 * width**3 / min(seconds)
